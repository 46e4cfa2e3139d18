"""What a step was trained on: its documents, from raw files to the batches of the trainer, and their losses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from tests.corpus.test_chat_source import many
from zero2all.base.conversation import Conversation
from zero2all.base.errors import UsageError, Z2aError
from zero2all.cli.main import app
from zero2all.corpus import build_corpus
from zero2all.recipe import Recipe
from zero2all.tokens import build_tokens
from zero2all.train import Run, TrainerHooks, blame_step, trace_step, train
from zero2all.train.blame import trace_text


def trained_on(recipe: Recipe) -> dict[int, torch.Tensor]:
    """The rows that the trainer saw at each step, with their last target."""
    rows: dict[int, torch.Tensor] = {}
    hooks = TrainerHooks(on_batch=lambda one: rows.update({one.step: torch.cat([one.inputs, one.targets[:, -1:]], 1)}))
    train(recipe, hooks=hooks)
    return rows


def documents_in(directory: Path) -> dict[str, dict[str, Any]]:
    """Straight from the Parquet files: a trace must match the text itself, not the token store."""
    paths = (directory / "documents" / "train").glob("*.parquet")
    return {row["gid"]: row for path in paths for row in pq.read_table(path).to_pylist()}


def traced_tokens(run: Run, step: int, rows: torch.Tensor) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Each span of the trace, with the tokens that the trainer saw in its place."""
    traced = trace_step(run, step)
    for row, sample in zip(rows.tolist(), range(*traced["samples"]), strict=True):
        offset = 0
        for span in traced["documents"]:
            if span["sample"] == sample:
                yield span, row[offset : offset + span["tokens"]]
                offset += span["tokens"]
        assert offset == len(row)


def test_a_step_is_traced_to_the_documents_that_the_trainer_saw(workspace: Path, tmp_path: Path) -> None:
    stages = "[{name: first, steps: 5, mixture: {en: 1, zh: 2}}, {name: long, steps: 3, seq_len: 64}]"
    rows = trained_on(tiny_recipe(workspace, f"out={tmp_path}", "train.steps=null", f"train.stages={stages}"))
    run, documents = Run.open(tmp_path), documents_in(workspace)
    tokenizer = run.tokenizer()
    for step, batch in rows.items():
        assert not any("\ufffd" in span["text"] for span in trace_text(run, step)["documents"]), "whole characters"
        first, size = (step, 8) if step < 5 else (step - 5, 4)
        assert trace_step(run, step)["samples"] == [first * size, (first + 1) * size]
        for span, seen in traced_tokens(run, step, batch):
            document = documents[span["gid"]]
            assert (span["source"], span["title"]) == (document["data_src"], document["title"])
            ids = [*tokenizer.encode(document["content"]), tokenizer.eos_token_id]
            assert seen == ids[span["first_token"] : span["first_token"] + span["tokens"]]
    for step in (-1, 8):
        with pytest.raises(UsageError, match="steps 0 to 7"):
            trace_step(run, step)


def test_an_anneal_stage_trains_on_rendered_conversations(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps(record) for record in many(150)))
    sources = [
        {"name": "en", "paths": [f"{workspace}/raw/en.jsonl"]},
        {"name": "chat", "kind": "chat", "paths": [f"{tmp_path}/chat.jsonl"]},
    ]
    stages = "[{name: main, steps: 3, mixture: {en: 1}}, {name: anneal, steps: 4, mixture: {en: 1, chat: 3}}]"
    recipe = tiny_recipe(
        workspace, f"out={tmp_path}", f"corpus.sources={json.dumps(sources)}", "train.steps=null",
        f"train.stages={stages}", "corpus.dir=null", "tokens.dir=null", "evals.every=7 steps",
    )  # fmt: skip
    build_corpus(recipe.corpus, recipe.documents_dir)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    rows = trained_on(recipe)
    run, documents = Run.open(tmp_path), documents_in(tmp_path)
    tokenizer = run.tokenizer()
    start = tokenizer.special_ids["<|im_start|>"]
    assert not any((rows[step] == start).any() for step in range(3))
    whole, shares = 0, []
    for step in range(3, 7):
        for span, seen in traced_tokens(run, step, rows[step]):
            shares.append(span["source"])
            if span["source"] == "chat":
                chat = Conversation.from_json(json.loads(documents[span["gid"]]["others"]))
                ids = [*tokenizer.render_chat(**chat.to_json()), tokenizer.eos_token_id]
                assert seen == ids[span["first_token"] : span["first_token"] + span["tokens"]]
                whole += len(seen) > 20
    assert whole > 10
    assert shares.count("chat") > shares.count("en") > 0
    blamed = [span for span in blame_step(run, 5)["documents"] if span["source"] == "chat"]
    assert any("<|im_start|>user\nWhat is" in span["text"] for span in blamed)


def test_losses_of_documents_add_up_to_the_loss_of_the_step(workspace: Path, tmp_path: Path) -> None:
    train(tiny_recipe(workspace, f"out={tmp_path}", "checkpoint.keep_latest=9"))
    run = Run.open(tmp_path)
    blamed = blame_step(run, 8)
    assert blamed["checkpoint"] == 8
    losses = [span["loss"] for span in blamed["documents"]]
    assert losses == sorted(losses, reverse=True)
    assert [span["loss"] for span in blame_step(run, 8, lowest=True)["documents"]] == sorted(losses)
    printed = CliRunner().invoke(app, ["blame", str(tmp_path), "--step", "8", "--lowest"]).stdout
    assert printed.splitlines()[1].split()[0] == f"{min(losses):.4f}"
    # The weights before step 8 are those of checkpoint 8, so the loss is the one in the record.
    first, last = blamed["samples"]
    batch = torch.from_numpy(run.plan().stage_of(8).dataset.tokens(first, last))
    with torch.inference_mode():
        expected = run.load_model(8)(batch[:, :-1], targets_BS=batch[:, 1:]).mean().item()
    assert blamed["loss"] == pytest.approx(expected, abs=1e-4)
    # Each target belongs to one document: weighted by their targets, the losses add up to the loss of the step.
    targets = {(span["sample"], span["document"]): span["tokens"] for span in trace_step(run, 8)["documents"]}
    started: set[int] = set()
    for span in trace_step(run, 8)["documents"]:
        if span["sample"] not in started:  # the first token of a sample is not a target
            started.add(span["sample"])
            targets[span["sample"], span["document"]] -= 1
    total = sum(span["loss"] * targets[span["sample"], span["document"]] for span in blamed["documents"])
    assert total / batch[:, 1:].numel() == pytest.approx(expected, abs=1e-3)
    # The nearest checkpoint is used, and a missing one is reported.
    for step in run.checkpoints.steps()[:-1]:
        shutil.rmtree(run.checkpoints.path(step))
    assert blame_step(run, 2)["checkpoint"] == 12
    shutil.rmtree(run.checkpoints.path(12))
    with pytest.raises(Z2aError, match="--no-loss"):
        blame_step(run, 2)
