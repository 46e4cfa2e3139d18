from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from tests.conftest import tiny_recipe
from zero2all.errors import UsageError
from zero2all.train import Run, trace_step, train


def test_a_step_is_traced_to_the_documents_that_the_trainer_saw(world: Path, tmp_path: Path) -> None:
    stages = "[{name: first, steps: 5, mixture: {en: 1, zh: 2}}, {name: long, steps: 3, seq_len: 64}]"
    recipe = tiny_recipe(world, f"out={tmp_path}", "train.steps=null", f"train.stages={stages}")
    batches: dict[int, torch.Tensor] = {}
    train(
        recipe, on_batch=lambda batch: batches.update({batch.step: torch.cat([batch.inputs, batch.targets[:, -1:]], 1)})
    )
    run = Run.open(tmp_path)
    tokenizer = run.tokenizer()
    # Straight from the Parquet files: the trace must hold against the text itself, not against the token store.
    documents = {
        row["gid"]: row
        for path in (world / "documents" / "train").glob("*.parquet")
        for row in pq.read_table(path).to_pylist()
    }
    for step, batch in batches.items():
        traced = trace_step(run, step)
        assert traced["samples"] == ([step * 8, step * 8 + 8] if step < 5 else [(step - 5) * 4, (step - 5) * 4 + 4])
        for row, sample in enumerate(range(*traced["samples"])):
            parts = [part for part in traced["documents"] if part["sample"] == sample]
            seen = batch[row].tolist()
            at = 0
            for part in parts:
                document = documents[part["gid"]]
                assert (part["source"], part["title"]) == (document["data_src"], document["title"])
                ids = [*tokenizer.encode(document["content"]), tokenizer.end_of_text]
                stretch = ids[part["first_token"] : part["first_token"] + part["tokens"]]
                assert stretch == seen[at : at + part["tokens"]]
                at += part["tokens"]
            assert at == len(seen)


@pytest.mark.parametrize("step", [-1, 1])
def test_a_step_outside_the_run_is_refused(step: int, world: Path, tmp_path: Path) -> None:
    train(tiny_recipe(world, f"out={tmp_path}", "train.steps=1"))
    with pytest.raises(UsageError, match="steps 0 to 0"):
        trace_step(Run.open(tmp_path), step)
