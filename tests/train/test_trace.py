from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from tests.conftest import tiny_recipe
from zero2all.base.errors import UsageError
from zero2all.train import Run, TrainerHooks, trace_step, train
from zero2all.train.blame import trace_text


def test_a_step_is_traced_to_the_documents_that_the_trainer_saw(workspace: Path, tmp_path: Path) -> None:
    stages = "[{name: first, steps: 5, mixture: {en: 1, zh: 2}}, {name: long, steps: 3, seq_len: 64}]"
    recipe = tiny_recipe(workspace, f"out={tmp_path}", "train.steps=null", f"train.stages={stages}")
    batches: dict[int, torch.Tensor] = {}
    train(
        recipe,
        hooks=TrainerHooks(
            on_batch=lambda batch: batches.update({batch.step: torch.cat([batch.inputs, batch.targets[:, -1:]], 1)})
        ),
    )
    run = Run.open(tmp_path)
    tokenizer = run.tokenizer()
    # Straight from the Parquet files: the trace must match the text itself, not the token store.
    documents = {
        row["gid"]: row
        for path in (workspace / "documents" / "train").glob("*.parquet")
        for row in pq.read_table(path).to_pylist()
    }
    for step, batch in batches.items():
        assert not any("\ufffd" in span["text"] for span in trace_text(run, step)["documents"]), "whole characters"
        traced = trace_step(run, step)
        assert traced["samples"] == ([step * 8, step * 8 + 8] if step < 5 else [(step - 5) * 4, (step - 5) * 4 + 4])
        for row, sample in enumerate(range(*traced["samples"])):
            spans = [span for span in traced["documents"] if span["sample"] == sample]
            seen = batch[row].tolist()
            offset = 0
            for span in spans:
                document = documents[span["gid"]]
                assert (span["source"], span["title"]) == (document["data_src"], document["title"])
                ids = [*tokenizer.encode(document["content"]), tokenizer.eos_token_id]
                expected = ids[span["first_token"] : span["first_token"] + span["tokens"]]
                assert expected == seen[offset : offset + span["tokens"]]
                offset += span["tokens"]
            assert offset == len(seen)


@pytest.mark.parametrize("step", [-1, 1])
def test_a_step_outside_the_run_is_refused(step: int, workspace: Path, tmp_path: Path) -> None:
    train(tiny_recipe(workspace, f"out={tmp_path}", "train.steps=1"))
    with pytest.raises(UsageError, match="steps 0 to 0"):
        trace_step(Run.open(tmp_path), step)
