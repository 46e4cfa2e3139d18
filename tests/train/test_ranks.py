"""The same recipe on one process and on several: the same batches and losses, and checkpoints for any world size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from tests.conftest import tiny_recipe
from zero2all.base.errors import Interrupted
from zero2all.bench.rank_harness import run_ranks
from zero2all.evals import evaluate_bpb
from zero2all.recipe import Recipe
from zero2all.track import read_steps
from zero2all.track.record_lines import EventLine, HistogramLine, SampleLine
from zero2all.track.run_record import read_record_lines
from zero2all.train import Run, TrainerHooks, train
from zero2all.train.data_loader import PADDING_SOURCE, Batch

LOSS_TOLERANCE = 5e-6  # in fp32
Line = TypeVar("Line", HistogramLine, EventLine, SampleLine)


def losses(directory: Path) -> list[float]:
    """At every step: the loss, and loss and bits per byte of every source."""
    steps = read_steps(directory / "run" / "record.jsonl").values()
    return [values[name] for values in steps for name in sorted(values) if name.startswith(("loss", "bpb/"))]


def recorded(directory: Path, kind: type[Line]) -> list[Line]:
    return [line for line in read_record_lines(directory / "run" / "record.jsonl") if isinstance(line, kind)]


def layer_norms(directory: Path) -> list[tuple[int, list[float]]]:
    lines = recorded(directory, HistogramLine)
    return [(line.step, line.counts) for line in lines if line.histogram == "gradient norm by layer"]


def validations(directory: Path) -> list[float]:
    return [line.details["loss"] for line in recorded(directory, EventLine) if line.event == "evaluation"]


def samples(directory: Path) -> list[tuple[int, str, str]]:
    return [(line.step, line.sample, line.text) for line in recorded(directory, SampleLine)]


def trained(recipe: Recipe, stop_at: int | None = None) -> dict[int, list[str]]:
    """On one rank: train, and return a hash of every row that it read, by step. Only the last rank gets a SIGTERM."""
    import signal

    rows: dict[int, list[str]] = {}

    def record_rows(batch: Batch) -> None:
        real = [row for row, source in zip(batch.inputs, batch.sources, strict=True) if source != PADDING_SOURCE]
        rows[batch.step] = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in real]
        if batch.step == stop_at and dist.get_rank() == dist.get_world_size() - 1:
            signal.raise_signal(signal.SIGTERM)

    try:
        train(recipe, hooks=TrainerHooks(on_batch=record_rows), evaluate=evaluate_bpb)
    except Interrupted:
        assert stop_at is not None
    else:
        assert stop_at is None, "the stop request of one rank was ignored"
    return rows


@pytest.fixture(scope="module")
def single(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[str]]]:
    out = tmp_path_factory.mktemp("single")
    return out, trained(recipe_for(workspace, out))


def recipe_for(workspace: Path, out: Path, *overrides: str) -> Recipe:
    stages = (
        "[{name: first, steps: 5, mixture: {en: 2, zh: 1}}, {name: long, steps: 4, seq_len: 64, rope_theta: 50000}]"
    )
    return tiny_recipe(
        workspace, f"out={out}", "train.steps=null", f"train.stages={stages}", "model.num_key_value_heads=4",
        "model.num_hidden_layers=4",
        "train.batch_tokens=384", "evals.every=4 steps", "checkpoint.every=3 steps",
        "track.layer_norms_every=2", *overrides,
    )  # fmt: skip


# By the number of ranks, which are started once: how many of them read other samples, and the layout.
LAYOUTS = {
    2: [(2, "{dp_replicate: 2}"), (1, "{cp: 2}")],
    3: [(3, "{}")],  # 12 samples over 3 ranks, and 6 of the longer ones
    4: [(2, "{dp_shard: 2, tp: 2}"), (2, "{pp: 2, dp_shard: 2, schedule: interleaved}")],
}


def trained_one_after_another(recipes: list[Recipe]) -> list[dict[int, list[str]]]:
    return [trained(recipe) for recipe in recipes]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), 4])
def test_several_ranks_train_as_one_process(
    ranks: int, single: tuple[Path, dict[int, list[str]]], workspace: Path, tmp_path: Path
) -> None:
    recipes = [
        recipe_for(workspace, tmp_path / str(number), f"parallel={parallel}")
        for number, (_, parallel) in enumerate(LAYOUTS[ranks])
    ]
    by_rank = run_ranks(ranks, trained_one_after_another, recipes, seconds=240)
    for recipe, (readers, _), seen in zip(recipes, LAYOUTS[ranks], zip(*by_rank, strict=True), strict=True):
        assert_same_batches(seen, single[1], copies=ranks // readers)
        check_run(recipe, single[0])


def check_run(recipe: Recipe, single: Path) -> None:
    out = recipe.out
    assert losses(out) == pytest.approx(losses(single), abs=LOSS_TOLERANCE)
    others = read_steps(out / "run" / "record.rank1.jsonl")
    assert list(others) == list(range(9))
    assert {name for values in others.values() for name in values} & {"loss", "loss/en", "mfu", "memory"} == {"memory"}
    expected_norms = layer_norms(single)
    assert [step for step, _ in expected_norms] == [1, 3, 5, 7]
    for (step, norms), (_, expected) in zip(layer_norms(out), expected_norms, strict=True):
        assert norms == pytest.approx(expected, rel=1e-4), step
    measured, expected_measured = validations(out), validations(single)
    assert len(measured) == 2
    assert measured == pytest.approx(expected_measured, abs=LOSS_TOLERANCE)
    expected_samples = samples(single)
    assert len(expected_samples) == 2 * 3  # two validations, three prompts
    assert samples(out) == (expected_samples if recipe.parallel.dp_replicate == 2 else [])
    # One process loads what several ranks saved.
    models = [Run.open(directory).load_model() for directory in (single, out)]
    assert [model.config.rope_theta for model in models] == [50000, 50000]
    one, other = (evaluate_bpb(model, Run.open(out).tokenizer(), recipe) for model in models)
    assert one.bits_per_byte == pytest.approx(other.bits_per_byte, abs=1e-3)


def assert_same_batches(seen: Sequence[dict[int, list[str]]], expected: dict[int, list[str]], copies: int) -> None:
    """The union over ranks is the global batch: no gap, no overlap but between ranks that share their samples."""
    for step, rows in expected.items():
        read = sorted(row for rank in seen for row in rank[step])
        assert read == sorted(rows * copies)


@pytest.mark.slow
@pytest.mark.long
def test_the_world_size_may_change_on_resume(
    single: tuple[Path, dict[int, list[str]]], workspace: Path, tmp_path: Path
) -> None:
    run_ranks(4, trained, recipe_for(workspace, tmp_path, "parallel={dp_shard: 4}"), 2)
    run_ranks(2, trained, recipe_for(workspace, tmp_path, "parallel={tp: 2}"), 5)
    trained(recipe_for(workspace, tmp_path))
    assert losses(tmp_path) == pytest.approx(losses(single[0]), abs=1e-5)
    states: list[Any] = [Run.open(tmp_path).checkpoints.steps()]
    assert states == [[8, 9]] or states == [[6, 9]]
