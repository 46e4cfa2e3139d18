"""Preference optimization: preference pairs (DPO and its relatives), completions with labels (KTO), the reference."""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.helpers import losses
from tests.conftest import CHINESE, ENGLISH, tiny_recipe
from tests.train.test_kill import run_trainer
from zero2all.base.conversation import ChatExample
from zero2all.base.errors import Z2aError
from zero2all.base.units import Duration
from zero2all.corpus import build_corpus
from zero2all.model import IGNORE_INDEX
from zero2all.recipe import Recipe, recipe_yaml
from zero2all.tokens import TokenStore, build_tokens
from zero2all.tokens.token_store import Array
from zero2all.train import Run, train
from zero2all.train.data_loader import read_batch
from zero2all.train.objectives.completions import MismatchedCompletions
from zero2all.train.plan import Plan

SEQ_LEN = 128


def words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(ENGLISH.split() + CHINESE.split(), k=rng.randint(1, most)))


def pair(rng: random.Random) -> dict[str, Any]:
    prompt: list[dict[str, str]] = []
    if rng.random() < 0.3:
        prompt += [{"role": "user", "content": words(rng, 2)}, {"role": "assistant", "content": words(rng, 2)}]
    prompt += [{"role": "user", "content": words(rng, 3)}]
    chosen, rejected = words(rng, 4), words(rng, 6) + " no"
    answers = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
    return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}


@pytest.fixture(scope="module")
def base(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe = tiny_recipe(
        workspace,
        f"out={tmp_path_factory.mktemp('base')}",
        "train.steps=2",
        f"train.seq_len={SEQ_LEN}",
        f"model.max_position_embeddings={SEQ_LEN}",
    )
    train(recipe)
    return Run.open(recipe.run_dir)


@pytest.fixture(scope="module")
def dpo(workspace: Path, base: Run, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    out, rng = tmp_path_factory.mktemp("dpo"), random.Random(4)
    (out / "pairs.jsonl").write_text("\n".join(json.dumps(pair(rng)) for _ in range(60)), encoding="utf-8")
    ratings = [
        {"prompt": words(rng, 3), "completion": words(rng, 5), "label": rng.random() < 0.5, "other": n}
        for n in range(40)
    ]
    (out / "ratings.jsonl").write_text("\n".join(map(json.dumps, ratings)), encoding="utf-8")
    sources = [
        {"name": "pairs", "kind": "preference", "paths": [f"{out}/pairs.jsonl"]},
        {"name": "ratings", "kind": "rating", "paths": [f"{out}/ratings.jsonl"]},
    ]
    recipe = tiny_recipe(
        workspace, f"out={out}", f"corpus.sources={json.dumps(sources)}", "corpus.dir=null", "tokens.dir=null",
        "corpus.holdout=0.15", f"train.init={base.directory}", "train.objective.name=dpo", f"train.seq_len={SEQ_LEN}",
        "train.mixture={pairs: 1}", "train.steps=4", "train.batch_tokens=640", "train.micro_batch_tokens=256",
        f"model.max_position_embeddings={SEQ_LEN}",
        "train.optimizer.lr=1e-3", "train.schedule.warmup=0 steps",
    )  # fmt: skip
    build_corpus(recipe.corpus, recipe.documents_dir)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    return recipe


def changed(recipe: Recipe, **objective: Any) -> Recipe:
    updated = recipe.train.objective.model_copy(update=objective)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"objective": updated})})


def examples(recipe: Recipe, source: str, kind: Any) -> dict[str, ChatExample]:
    import pyarrow.parquet as pq

    return {
        row["gid"]: ChatExample.from_json(json.loads(row["others"]), kind)
        for path in (recipe.documents_dir / "train").glob(f"{source}*.parquet")
        for row in pq.read_table(path).to_pylist()
    }


def test_a_row_holds_both_answers_of_a_pair_and_only_answers_after_the_prompt_are_targets(dpo: Recipe) -> None:
    from zero2all.tokenizer import Tokenizer

    tokenizer, plan = Tokenizer(dpo.tokenizer_dir), Plan(dpo, TokenStore(dpo.tokens_dir, "train"))
    pairs = examples(dpo, "pairs", "preference")
    batch = read_batch(plan, 0)
    spans = batch.stage.dataset.documents(*batch.sample_range)
    expected = [
        conversation.messages[-1].content
        for first in spans[::2]
        for conversation in (pairs[first.gid].conversation, pairs[first.gid].rejected)
        if conversation is not None
    ]
    assert [span.gid for span in spans[::2]] == [span.gid for span in spans[1::2]]
    assert batch.completions is not None
    seen = []
    for row, answers in zip(batch.targets, batch.completions.rows, strict=False):
        for number, is_chosen in enumerate(answers.desirable, 1):
            assert is_chosen == (number % 2 == 1)
            own = torch.from_numpy(answers.segments[1:]) == number
            ids = row[own].tolist()
            assert len(ids) == answers.lengths[number - 1]
            assert ids[-1] == tokenizer.special_ids["<|im_end|>"]
            seen.append(tokenizer.decode(ids[:-1]))
        assert ((row != IGNORE_INDEX) == torch.from_numpy(answers.segments[1:] > 0)).all()
    assert seen == expected
    assert batch.completions.counts.examples == len(spans) // 2


def test_the_first_step_is_ln_2(dpo: Recipe) -> None:
    train(dpo)
    run = Run.open(dpo.run_dir)
    assert float(losses(run)[0]) == pytest.approx(math.log(2), abs=1e-6)
    steps = [json.loads(line) for line in run.record_path.read_text("utf-8").splitlines()]
    metrics = {k: v for line in steps for k, v in line.items() if line.get("step") == 3}
    assert metrics["rewards/margins"] == pytest.approx(
        metrics["rewards/chosen"] - metrics["rewards/rejected"], abs=1e-5
    )
    assert float(losses(run)[3]) < math.log(2)


def elsewhere(recipe: Recipe, out: Path, **options: Any) -> Recipe:
    """The same data and tokenizer, another run."""
    places = {name: getattr(recipe, name).model_copy(update={"dir": getattr(recipe, f"{name}_dir")}) for name in
              ("tokens", "tokenizer")}  # fmt: skip
    return recipe.model_copy(update={"out": out, "train": recipe.train.model_copy(update=options), **places})


def kto(recipe: Recipe) -> Recipe:
    both = changed(recipe, name="kto")
    return both.model_copy(update={"train": both.train.model_copy(update={"mixture": {"pairs": 1, "ratings": 1}})})


def step_losses(recipe: Recipe) -> list[float]:
    return [float(loss) for loss in losses(Run.open(recipe.run_dir)).values()]


LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("sigmoid", {}), ("sigmoid", {"sft_weight": 0.5}), ("ipo", {}), ("hinge", {}), ("robust", {"label_smoothing": 0.1}),
    ("simpo", {"beta": 2.0}), ("orpo", {}),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "settings"), LOSSES)
def test_micro_batches_do_not_change_the_loss(dpo: Recipe, loss: str, settings: dict[str, Any], tmp_path: Path) -> None:
    recipe = changed(dpo, dpo=dpo.train.objective.dpo.model_copy(update={"loss": loss, **settings}))
    runs = []
    for name, micro in (("one", None), ("many", SEQ_LEN)):
        own = elsewhere(recipe, tmp_path / name, micro_batch_tokens=micro, steps=3)
        train(own)
        runs.append(step_losses(own))
    assert runs[0] == pytest.approx(runs[1], abs=2e-5)
    assert runs[0][2] != runs[0][0]


def test_kto_starts_at_one_half_and_micro_batches_do_not_change_it(dpo: Recipe, tmp_path: Path) -> None:
    runs = []
    for name, micro in (("one", None), ("many", SEQ_LEN)):
        own = elsewhere(kto(dpo), tmp_path / name, micro_batch_tokens=micro)
        train(own)
        runs.append(step_losses(own))
    assert runs[0][0] == pytest.approx(0.5, abs=1e-6)  # as the reference, whatever the labels
    assert runs[0] == pytest.approx(runs[1], abs=2e-5)
    assert runs[0][-1] < 0.5


@pytest.mark.parametrize("source", ["ratings", "pairs"])
def test_kto_pairs_a_prompt_with_the_answer_to_the_next_different_prompt(dpo: Recipe, source: str) -> None:
    plan = Plan(kto(dpo), TokenStore(dpo.tokens_dir, "train"))
    rows = plan.stages[0].dataset.conversation_rows[source]
    pairs = MismatchedCompletions(rows, source)
    used = rows.used_documents.tolist()
    assert len(used) > 20
    for place, number in enumerate(used):
        prompt, _ = split(*rows.read_document(number))
        others = (split(*rows.read_document(following)) for following in used[place:] + used[:place])
        answer = next(answer for other, answer in others if other != prompt)
        tokens, mask = pairs.read(number)
        assert split(tokens, mask) == (prompt, answer)
        assert pairs.lengths[number] == len(tokens)


def split(tokens: Array, mask: Array) -> tuple[list[int], list[int]]:
    """Prompt and answer."""
    return tokens[: int(mask.argmax())].tolist(), tokens[mask].tolist()


class Conversations:
    """Rows of conversations with these prompts and answers, as ``MismatchedCompletions`` reads them."""

    seq_len = 64

    def __init__(self, prompts: list[list[int]], left_out: tuple[int, ...] = ()) -> None:
        self.document_lengths = np.zeros(len(prompts))
        self._prompts = prompts
        self.used_documents = np.array([n for n in range(len(prompts)) if n not in left_out], dtype=np.int64)

    def read_document(self, number: int) -> tuple[Array, Array]:
        prompt, answer = self._prompts[number], [100 + number] * (1 + number % 3)
        mask = [False] * len(prompt) + [True] * len(answer) + [False]
        return np.array([*prompt, *answer, 0]), np.array(mask)


@pytest.mark.parametrize(
    ("prompts", "left_out"),
    [
        ([[1], [1], [2], [2], [1], [1]], ()),  # a prompt that comes again, also around the end
        ([[1], [1], [1], [2]], ()),
        ([[1, 2], [1], [1, 2], [1, 2]], (1,)),
        ([[1], [2]] * 5, (3, 4)),
        ([[n // 2 % 3] for n in range(20)], (0, 7)),
    ],
)
def test_repeated_prompts_never_get_an_answer_of_their_own(prompts: list[list[int]], left_out: tuple[int, ...]) -> None:
    rows = Conversations(prompts, left_out)
    if len({tuple(prompts[number]) for number in rows.used_documents.tolist()}) == 1:
        with pytest.raises(Z2aError, match=r"all conversations of talk have the same prompt.*train\.mixture"):
            MismatchedCompletions(rows, "talk")  # type: ignore[arg-type]
        return
    pairs = MismatchedCompletions(rows, "talk")  # type: ignore[arg-type]
    for number in rows.used_documents.tolist():
        prompt, answer = split(*pairs.read(number))
        assert prompt == prompts[number]
        assert prompts[answer[0] - 100] != prompt
        assert answer[0] - 100 not in left_out
        assert pairs.lengths[number] == len(prompt) + len(answer) + 1


def test_a_source_without_conversations_has_no_mismatched_completions() -> None:
    assert len(MismatchedCompletions(Conversations([]), "talk").lengths) == 0  # type: ignore[arg-type]


def family(dpo: Recipe, name: str) -> Recipe:
    return kto(dpo) if name == "kto" else dpo


@pytest.mark.long
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_sigkill_and_resume_is_bitwise_the_uninterrupted_run(dpo: Recipe, objective: str, tmp_path: Path) -> None:
    recipe = elsewhere(family(dpo, objective), tmp_path / "uninterrupted", steps=9)
    recipe = recipe.model_copy(
        update={"checkpoint": recipe.checkpoint.model_copy(update={"every": Duration(7, "steps")})}
    )
    assert run_trainer(saved(recipe), 9)[0] == 0
    killed = recipe.model_copy(update={"out": tmp_path / "killed"})
    assert run_trainer(saved(killed), 8)[0] == -signal.SIGKILL
    assert run_trainer(saved(killed), 9)[0] == 0
    assert losses(Run.open(killed.run_dir)) == losses(Run.open(recipe.run_dir))


def saved(recipe: Recipe) -> Path:
    recipe.out.mkdir(exist_ok=True)
    path = recipe.out / "recipe.yaml"
    path.write_text(recipe_yaml(recipe))
    return path


def test_the_reference_is_that_of_the_first_start(dpo: Recipe, tmp_path: Path) -> None:
    """Also if it was deleted before a resume; with other initial weights the run is refused."""
    recipe = elsewhere(dpo, tmp_path / "run", steps=4)
    train(recipe)
    first = np.load(recipe.run_dir / "reference" / "0.npy")
    shutil.rmtree(recipe.run_dir / "reference")
    train(elsewhere(recipe, recipe.out, steps=5), extend="constant")
    assert np.array_equal(np.load(recipe.run_dir / "reference" / "0.npy"), first)
    shutil.rmtree(recipe.run_dir / "reference")
    assert recipe.train.init is not None
    record = recipe.run_dir / "init.json"
    record.write_text(record.read_text().replace(json.loads(record.read_text())["fingerprint"], "0" * 16))
    with pytest.raises(Z2aError, match=r"is not what .* began with"):
        train(elsewhere(recipe, recipe.out, steps=5), extend="constant")


def test_sources_of_another_kind_are_refused(dpo: Recipe, workspace: Path, tmp_path: Path) -> None:
    with pytest.raises(Z2aError, match="ratings is of kind rating"):
        train(elsewhere(dpo, tmp_path, mixture={}))
    with pytest.raises(Z2aError, match="pairs is of kind preference"):
        train(elsewhere(changed(dpo, name="sft"), tmp_path))
    text = elsewhere(dpo, tmp_path, mixture={})
    text = text.model_copy(update={"tokens": text.tokens.model_copy(update={"dir": workspace / "tokens"})})
    with pytest.raises(Z2aError, match="kind preference"):
        train(text)
