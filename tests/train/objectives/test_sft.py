"""Supervised fine-tuning: what is a target, what is not, and that packing changes nothing but the speed."""

from __future__ import annotations

import json
import random
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.conftest import CHINESE, ENGLISH, tiny_recipe
from tests.train.objectives.test_preference import elsewhere
from zero2all.base.conversation import Conversation
from zero2all.base.errors import Z2aError
from zero2all.cli.main import app
from zero2all.corpus import build_corpus
from zero2all.evals import evaluate_bpb
from zero2all.model import IGNORE_INDEX, ModelInputs, document_starts
from zero2all.recipe import Recipe, recipe_yaml
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore, build_tokens
from zero2all.tokens.conversation_rows import ConversationRows, best_fit_decreasing
from zero2all.tokens.inspect import inspect_conversations, render_conversations
from zero2all.track import read_steps
from zero2all.train import Run, train
from zero2all.train.data_loader import Batch, read_batch
from zero2all.train.plan import Plan

SEQ_LEN = 64


def conversation(rng: random.Random, turns: int) -> dict[str, Any]:
    words = ENGLISH.split() + CHINESE.split()
    messages = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.3 else []
    for _ in range(turns):
        messages.append({"role": "user", "content": " ".join(rng.choices(words, k=rng.randint(1, 3)))})
        messages.append({"role": "assistant", "content": " ".join(rng.choices(words, k=rng.randint(1, 4)))})
    return {"messages": messages}


@pytest.fixture(scope="module")
def base(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A pretrained model."""
    recipe = tiny_recipe(workspace, f"out={tmp_path_factory.mktemp('base')}", "train.steps=2", "train.seq_len=64")
    train(recipe)
    return Run.open(recipe.run_dir)


@pytest.fixture(scope="module")
def sft(workspace: Path, base: Run, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    out = tmp_path_factory.mktemp("sft")
    rng = random.Random(3)
    records = [conversation(rng, rng.choice([1, 1, 2])) for _ in range(80)]
    records.append(conversation(rng, 30))
    (out / "chat.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    sources = [{"name": "chat", "kind": "chat", "paths": [f"{out}/chat.jsonl"]}]
    recipe = tiny_recipe(
        workspace, f"out={out}", f"corpus.sources={json.dumps(sources)}", "corpus.dir=null", "tokens.dir=null",
        "corpus.holdout=0.1", f"train.init={base.directory}", "train.objective.name=sft", f"train.seq_len={SEQ_LEN}",
        "train.steps=3", "train.batch_tokens=512", "train.micro_batch_tokens=192", "train.optimizer.lr=1e-3",
    )  # fmt: skip
    build_corpus(recipe.corpus, recipe.documents_dir)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    return recipe


def documents_of(recipe: Recipe) -> dict[str, Conversation]:
    import pyarrow.parquet as pq

    return {
        row["gid"]: Conversation.from_json(json.loads(row["others"]))
        for path in (recipe.documents_dir / "train").glob("*.parquet")
        for row in pq.read_table(path).to_pylist()
    }


def make_plan(recipe: Recipe) -> Plan:
    return Plan(recipe, TokenStore(recipe.tokens_dir, "train"))


def inspect_command(recipe: Recipe, folder: Path, *options: str) -> Any:
    (folder / "recipe.yaml").write_text(recipe_yaml(recipe), encoding="utf-8")
    return CliRunner().invoke(app, ["tokens", "inspect", str(folder / "recipe.yaml"), *options])


def padded(recipe: Recipe) -> Recipe:
    objective = recipe.train.objective.model_copy(update={"packing": False})
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"objective": objective})})


def test_only_answers_and_the_tokens_that_end_them_are_targets(sft: Recipe) -> None:
    tokenizer, plan, chats = Tokenizer(sft.tokenizer_dir), make_plan(sft), documents_of(sft)
    end = tokenizer.special_ids["<|im_end|>"]
    batch = read_batch(plan, 0)
    answers = sorted(
        message.content
        for span in batch.stage.dataset.documents(*batch.sample_range)
        for message in chats[span.gid].messages
        if message.role == "assistant"
    )
    seen = []
    for row in batch.targets:
        edges = np.flatnonzero(np.diff([0, *(row != IGNORE_INDEX).tolist(), 0])).reshape(-1, 2)
        for begin, stop in edges:
            assert row[stop - 1] == end
            seen.append(tokenizer.decode(row[begin : stop - 1].tolist()))
    assert sorted(seen) == answers
    shifted = batch.inputs[:, 1:]
    valid = batch.targets[:, :-1] != IGNORE_INDEX
    assert torch.equal(batch.targets[:, :-1][valid], shifted[valid])


def test_no_conversation_is_cut_and_one_that_is_too_long_is_counted(sft: Recipe) -> None:
    dataset = make_plan(sft).stages[0].dataset
    rows, chats = dataset.conversation_rows["chat"], documents_of(sft)
    tokenizer = Tokenizer(sft.tokenizer_dir)
    lengths = [len(tokenizer.render_chat(**chat.to_json())) + 1 for chat in chats.values()]
    too_long = sum(length > SEQ_LEN + 1 for length in lengths)
    assert (rows.left_out.too_long, rows.left_out.without_answer) == (too_long, 0)
    assert too_long >= 1
    found = [span.gid for span in dataset.documents(0, dataset.samples_per_epoch)]
    assert len(found) == len(set(found)) == len(chats) - too_long
    for row in range(len(rows)):
        tokens, mask = rows.read(row)
        begin = 0
        for document in rows.documents(row):
            info = document.shard.document_info(document.number)
            ids = [*tokenizer.render_chat(**chats[info.gid].to_json()), tokenizer.eos_token_id]
            assert tokens[begin : begin + len(ids)].tolist() == ids
            begin += len(ids)
        assert (tokens[begin:] == tokenizer.eos_token_id).all()
        assert not mask[begin:].any()
        assert rows.count_targets(row) == mask[1:].sum()
    assert rows.fill > 0.8


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_rows_and_agree_on_the_number_of_targets(sft: Recipe, ranks: int) -> None:
    plan = make_plan(sft)
    whole = read_batch(plan, 1)
    parts = [read_batch(plan, 1, rank, ranks) for rank in range(ranks)]

    def rows(batch: Batch) -> list[tuple[int, ...]]:
        named = zip(batch.targets.tolist(), batch.sources, strict=True)
        return [tuple(targets) for targets, source in named if source]

    assert sorted(row for part in parts for row in rows(part)) == sorted(rows(whole))
    assert {part.global_valid_tokens for part in parts} == {whole.global_valid_tokens}
    valid = sum(int((part.targets != IGNORE_INDEX).sum()) for part in parts)
    assert valid == whole.global_valid_tokens == int((whole.targets != IGNORE_INDEX).sum())


@torch.inference_mode()
def losses_by_conversation(recipe: Recipe, base: Run) -> dict[str, float]:
    model, dataset = base.load_model(), make_plan(recipe).stages[0].dataset
    found = {}
    for sample in range(dataset.samples_per_epoch):
        one = dataset.read(sample, sample + 1)
        inputs, targets = torch.from_numpy(one.tokens[:, :-1]), torch.from_numpy(one.tokens[:, 1:]).clone()
        targets[~torch.from_numpy(one.mask[:, 1:])] = IGNORE_INDEX
        starts = document_starts(torch.from_numpy(one.is_first)[:, :-1])
        nats = model(ModelInputs(inputs, targets_BS=targets, doc_starts_BS=starts))[0]
        begin = 0
        for span in dataset.documents(sample, sample + 1):
            found[span.gid] = float(nats[max(0, begin - 1) : begin + span.tokens - 1].sum())
            begin += span.tokens
    return found


def test_packing_changes_no_loss_and_saves_most_of_the_rows(sft: Recipe, base: Run) -> None:
    packed, alone = losses_by_conversation(sft, base), losses_by_conversation(padded(sft), base)
    assert packed.keys() == alone.keys()
    assert max(abs(packed[gid] - alone[gid]) for gid in packed) < 1e-4
    rows = make_plan(sft).stages[0].dataset.samples_per_epoch
    assert rows <= 0.75 * make_plan(padded(sft)).stages[0].dataset.samples_per_epoch
    assert make_plan(sft).identity() != make_plan(padded(sft)).identity()


@torch.inference_mode()
def test_validation_scores_the_text_of_answers_alone(sft: Recipe, base: Run) -> None:
    model, tokenizer = base.load_model(), Tokenizer(sft.tokenizer_dir)
    evaluation = evaluate_bpb(model, tokenizer, sft)
    lengths = torch.tensor(tokenizer.token_byte_lengths)
    nats, tokens, size = 0.0, 0, 0
    for shard in TokenStore(sft.tokens_dir, "valid").sources["chat"]:
        for first, last in pairwise(shard.document_offsets.tolist()):
            if last - first > SEQ_LEN + 1:
                continue
            ids = torch.from_numpy(shard.read(first, last - 1))[None]
            targets = ids[:, 1:]
            scored = torch.from_numpy(shard.read_mask(first + 1, last - 1))[None] & (lengths[targets] > 0)
            nats += float(model(ids[:, :-1], targets_BS=targets)[scored].sum())
            tokens, size = tokens + int(scored.sum()), size + int(lengths[targets][scored].sum())
    assert evaluation.tokens == tokens > 20
    assert evaluation.bytes == size
    assert evaluation.loss == pytest.approx(nats / tokens, abs=1e-4)


def test_text_beside_conversations_is_trained_on_as_before(sft: Recipe, workspace: Path) -> None:
    store = TokenStore(workspace / "tokens", "train")
    assert set(store.kinds.values()) == {"text"}
    plan = Plan(sft.model_copy(update={"tokens": sft.tokens.model_copy(update={"dir": workspace / "tokens"})}), store)
    assert not plan.stages[0].dataset.conversation_rows
    batch = read_batch(plan, 0)
    assert all((row != IGNORE_INDEX).all() for row, source in zip(batch.targets, batch.sources, strict=True) if source)


def test_a_store_without_conversations_and_one_without_a_mask_are_refused(
    sft: Recipe, workspace: Path, tmp_path: Path
) -> None:
    text = sft.model_copy(
        update={"out": tmp_path, "tokens": sft.tokens.model_copy(update={"dir": workspace / "tokens"})}
    )
    with pytest.raises(Z2aError, match="set kind: chat on a source"):
        train(text)
    assert "set kind: chat on a source" in inspect_command(text, tmp_path).stderr
    shutil.copytree(sft.tokens_dir, tmp_path / "tokens")
    (mask,) = (tmp_path / "tokens" / "train").glob("*.mask")
    mask.unlink()
    damaged = sft.model_copy(update={"tokens": sft.tokens.model_copy(update={"dir": tmp_path / "tokens"})})
    with pytest.raises(Z2aError, match=r"\.mask is missing"):
        make_plan(damaged)


def test_the_inspected_conversations_show_what_is_learned(sft: Recipe, tmp_path: Path) -> None:
    dataset, chats = make_plan(sft).stages[0].dataset, documents_of(sft)
    found = inspect_conversations(dataset, Tokenizer(sft.tokenizer_dir), 5)
    for one in found:
        learned = [run.text for run in one.runs if run.learned]
        answers = [message.content for message in chats[one.gid].messages if message.role == "assistant"]
        assert learned == [f"{answer}<|im_end|>" for answer in answers]
    assert render_conversations(found, colour=False).count("⟦") == sum(run.learned for one in found for run in one.runs)
    shown = inspect_command(sft, tmp_path, "--count", "5")
    assert shown.stdout == render_conversations(found, colour=False)
    refused = inspect_command(sft, tmp_path, "train.objective.name=pretrain")
    assert refused.exit_code == 2
    assert "set it to sft" in refused.stderr, refused.stderr


def test_a_source_without_an_answer_has_no_rows(sft: Recipe) -> None:
    (shard,) = TokenStore(sft.tokens_dir, "train").sources["chat"]
    assert len(ConversationRows([shard], 4)) == 0


def test_best_fit_decreasing_puts_every_item_into_one_bin() -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 100, 2000)
    items, starts = best_fit_decreasing(lengths, 100)
    assert sorted(items.tolist()) == list(range(2000))
    sizes = np.add.reduceat(lengths[items], starts[:-1])
    assert sizes.max() <= 100
    assert lengths.sum() / (100 * len(sizes)) > 0.97
    assert best_fit_decreasing(np.empty(0, dtype=np.int64), 8)[1].tolist() == [0]


def expected_step(recipe: Recipe, base: Run, step: int) -> tuple[float, float]:
    """Loss and gradient norm: messages rendered by hand, one conversation at a time, without mask, template or packing
    of the trainer."""
    tokenizer, chats, model = Tokenizer(recipe.tokenizer_dir), documents_of(recipe), base.load_model()
    start, end = (tokenizer.special_ids[f"<|im_{name}|>"] for name in ("start", "end"))
    stage = make_plan(recipe).stage_of(step)
    total, count = torch.zeros(()), 0
    for span in stage.dataset.documents(*stage.sample_range(step)):
        ids: list[int] = []
        learned: list[int] = []
        for message in chats[span.gid].messages:
            ids += [start, *tokenizer.encode(f"{message.role}\n")]
            answer = [*tokenizer.encode(message.content), end]
            if message.role == "assistant":
                learned += range(len(ids), len(ids) + len(answer))
            ids += [*answer, *tokenizer.encode("\n")]
        row = torch.tensor([ids])
        nats = model(row[:, :-1], targets_BS=row[:, 1:]).flatten()
        total = total + nats[torch.tensor(learned) - 1].sum()
        count += len(learned)
    loss = total / count
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return loss.item(), float(torch.stack(gradients).norm())


def first_step_is_right(recipe: Recipe, base: Run, out: Path) -> bool:
    one = elsewhere(recipe, out, steps=1)
    train(one)
    recorded = read_steps(Run.open(one.run_dir).record_path)[0]
    right = pytest.approx(expected_step(recipe, base, 0), rel=2e-5)
    return bool((recorded["loss"], recorded["grad_norm"]) == right)


def test_the_first_step_is_that_of_the_plain_reference(sft: Recipe, base: Run, tmp_path: Path) -> None:
    """Eight rows in micro-batches of three: the last one is partial."""
    batch = read_batch(make_plan(sft), 0)
    assert len(batch.inputs) > sum(map(bool, batch.sources))
    assert first_step_is_right(sft, base, tmp_path)


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("for message in messages", "for message in messages[-1:]"),
        ("for message in messages", "for message in messages[:2]"),
        ("{{- open('system') + system -}}", "{{- open('system') -}}"),
    ],
)
def test_a_template_that_drops_a_turn_is_refused(sft: Recipe, written: str, instead: str, tmp_path: Path) -> None:
    shutil.copytree(sft.tokenizer_dir, tmp_path / "tokenizer")
    template = tmp_path / "tokenizer" / "chat_template.jinja"
    source = template.read_text(encoding="utf-8")
    assert written in source
    template.write_text(source.replace(written, instead), encoding="utf-8")
    with pytest.raises(Z2aError, match="drops"):
        build_tokens(sft.tokens, sft.documents_dir, tmp_path / "tokenizer", tmp_path / "tokens")
