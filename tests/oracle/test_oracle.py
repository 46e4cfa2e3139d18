"""A step of every objective, chat template and layout equals transformers on each conversation alone."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from tests.oracle.product import ObservedStep, observe
from tests.oracle.reference import Models, TokenSequence, TransformersTokenizer, whole_conversations
from tests.oracle.table import (
    DPO_VARIANTS,
    LAYOUTS,
    OBJECTIVES,
    Cell,
    Layout,
    cells,
    compare,
    markdown,
    measure,
)
from tests.oracle.templates import TEMPLATES, Template
from tests.oracle.workspace import Workspace
from zero2all.base.errors import RecipeError
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore
from zero2all.train.objectives.completions import CompletionSources
from zero2all.train.plan import Plan

LLAMA = next(template for template in TEMPLATES if template.name == "Llama 3")
ONE_PROCESS, *SEVERAL_RANKS = LAYOUTS
PRETRAINING, SFT, _, KTO, *_ = OBJECTIVES


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("oracle") / "workspace")


@pytest.fixture(scope="module")
def tokenizer(workspace: Workspace) -> TransformersTokenizer:
    workspace.add(LLAMA)
    return TransformersTokenizer(workspace, LLAMA.name)


@pytest.fixture(scope="module")
def sft_step(
    workspace: Workspace, tokenizer: TransformersTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> ObservedStep:
    return observe(Cell(LLAMA, ONE_PROCESS, SFT).recipe(workspace, tmp_path_factory.mktemp("sft")))


def assert_equal(workspace: Workspace, selected: list[Cell], out: Path) -> None:
    found = list(measure(workspace, selected, out))
    assert len(found) == len(selected) > 0
    assert all(one.equal for one in found), "\n".join(str(one) for one in found if not one.equal)


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_every_objective_in_one_process(workspace: Workspace, template: Template, tmp_path: Path) -> None:
    assert_equal(workspace, cells([template], [ONE_PROCESS], OBJECTIVES), tmp_path)


@pytest.mark.slow
def test_every_loss_of_pairs(workspace: Workspace, tmp_path: Path) -> None:
    assert_equal(workspace, cells([LLAMA], [ONE_PROCESS], DPO_VARIANTS), tmp_path)


@pytest.mark.slow
def test_every_layout(workspace: Workspace, tmp_path: Path) -> None:
    """All in the same ranks: starting them takes seconds."""
    assert_equal(workspace, cells([LLAMA], SEVERAL_RANKS, OBJECTIVES), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_whole_table(workspace: Workspace, tmp_path: Path) -> None:
    assert_equal(workspace, cells(TEMPLATES, LAYOUTS, (*OBJECTIVES, *DPO_VARIANTS)), tmp_path)


@pytest.mark.parametrize("layout", SEVERAL_RANKS, ids=lambda layout: layout.name)
def test_what_the_table_leaves_out_is_an_error_of_the_recipe(
    workspace: Workspace, layout: Layout, tmp_path: Path
) -> None:
    for objective in OBJECTIVES:
        if layout.name not in objective.layouts:
            with pytest.raises(RecipeError, match="parallel"):
                Cell(LLAMA, layout, objective).recipe(workspace, tmp_path, "http://127.0.0.1:1/v1")


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
@pytest.mark.parametrize("with_tags", [False, True], ids=["published", "with generation tags"])
def test_tokens_and_answers_are_those_of_transformers(
    workspace: Workspace, template: Template, with_tags: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    directory = template.write(tmp_path / "own", with_tags=with_tags)
    tagged = directory if with_tags else template.write(tmp_path / "tagged", with_tags=True)
    ours, theirs = Tokenizer(directory), transformers.AutoTokenizer.from_pretrained(tagged)
    for messages in workspace.records.chats:
        [chat] = ours.encode_chats(ours.reference, [ours.split_chat(messages)])
        expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert chat.ids.tolist() == expected["input_ids"]
        assert chat.generated.tolist() == list(map(bool, expected["assistant_masks"]))
        prompt = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
        assert ours.render_chat(messages[:-1], add_generation_prompt=True) == prompt


def test_rows_hold_several_conversations_of_several_turns(
    workspace: Workspace, tokenizer: TransformersTokenizer, sft_step: ObservedStep
) -> None:
    placed = whole_conversations(sft_step, tokenizer)
    answers = [workspace.records.chats[one.sequence.example[1]] for one in placed]
    assert len(placed) > len({one.row for one in placed})
    assert {sum(message["role"] == "assistant" for message in messages) for messages in answers} == {1, 2, 3}


def test_the_divergence_of_kto_is_that_of_prompts_with_answers_to_other_prompts(
    workspace: Workspace, tokenizer: TransformersTokenizer, tmp_path: Path
) -> None:
    recipe = Cell(LLAMA, ONE_PROCESS, KTO).recipe(workspace, tmp_path)
    step, models = observe(recipe), Models(workspace)
    models.trained.load(step.weights)
    plan = Plan(recipe, TokenStore(recipe.tokens_dir, "train"))
    stage, mismatched, ratios = plan.stage_of(1), CompletionSources(recipe, plan, mismatched=True).mismatched, []
    known = {one.prompt: one for one in tokenizer.documents if any(one.targets)}
    for source, number in stage.dataset.completion_documents(*stage.sample_range(1)):
        tokens, mask = mismatched[source].read(number)
        *ids, _ = tokens.tolist()  # without the end of the document
        pair = TokenSequence(tuple(ids), tuple(mask.tolist()[:-1]))
        assert pair.ids not in {one.ids for one in known.values()}
        assert pair.prompt in known
        with torch.no_grad():
            ratios.append(float(models.trained.logps(pair).sum() - models.initial.logps(pair).sum()))
    assert step.metrics["kl"] == pytest.approx(max(0.0, sum(ratios) / len(ratios)), abs=1e-5)
    assert step.metrics["kl"] > 0.01


def test_the_oracle_sees_mistakes_and_the_table_has_a_line_for_each_template_and_layout(
    workspace: Workspace, tokenizer: TransformersTokenizer, sft_step: ObservedStep, tmp_path: Path
) -> None:
    """Attention across documents, another weight, a lost gradient, a target too many."""
    models = Models(workspace)
    cell = Cell(LLAMA, ONE_PROCESS, PRETRAINING)
    recipe = cell.recipe(workspace, tmp_path)
    unmasked = recipe.model_copy(update={"train": recipe.train.model_copy(update={"document_mask": False})})
    difference = compare(cell, observe(unmasked), tokenizer, models)
    assert difference.logp > 1e-2
    assert difference.gradient > 1e-2

    cell, step = Cell(LLAMA, ONE_PROCESS, SFT), deepcopy(sft_step)
    found = compare(cell, step, tokenizer, models)
    assert found.equal
    last = markdown([found]).splitlines()[-1]
    assert last.startswith("| Llama 3 | one process | ")
    assert last.endswith("| yes |")
    step.weights["norm.weight"] *= 1.01
    assert not compare(cell, step, tokenizer, models).equal
    step.weights["norm.weight"] /= 1.01
    step.gradients["norm.weight"] *= 1.01
    assert not compare(cell, step, tokenizer, models).equal
    step.gradients["norm.weight"] /= 1.01
    step.is_target[0, :] = True
    assert "other targets" in compare(cell, step, tokenizer, models).problem
