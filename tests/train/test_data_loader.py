from __future__ import annotations

import hashlib
import math
import threading
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_recipe
from tests.ranks import on_ranks
from zero2all.model import IGNORE_INDEX
from zero2all.parallel import ParallelDims, ParallelMesh
from zero2all.recipe import ParallelRecipe
from zero2all.tokens import TokenStore
from zero2all.train.data_loader import PADDING_SOURCE, Batch, DataLoader, read_batch
from zero2all.train.objectives.step import SourceLosses
from zero2all.train.plan import Plan


@pytest.fixture
def plan(workspace: Path) -> Plan:
    return five_steps_of_ten(workspace)


def five_steps_of_ten(workspace: Path) -> Plan:
    recipe = tiny_recipe(workspace, "train.batch_tokens=320", "train.micro_batch_tokens=64", "train.steps=5")
    return Plan(recipe, TokenStore(recipe.tokens_dir, "train"))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
def test_any_number_of_ranks_shards_a_batch_without_gap_or_overlap(ranks: int, plan: Plan) -> None:
    for step in (0, 4):
        full = read_batch(plan, step)
        parts = [read_batch(plan, step, rank, ranks) for rank in range(ranks)]
        assert len({len(part.inputs) for part in parts}) == 1
        rows = [row for part in parts for row, source in enumerate(part.sources) if source != PADDING_SOURCE]
        assert len(rows) == 10
        real = [[source != PADDING_SOURCE for source in part.sources] for part in parts]
        inputs = torch.cat([part.inputs[keep] for part, keep in zip(parts, real, strict=True)])
        targets = torch.cat([part.targets[keep] for part, keep in zip(parts, real, strict=True)])
        assert torch.equal(inputs, full.inputs)
        assert torch.equal(targets, full.targets)
        valid = sum(int((part.targets != IGNORE_INDEX).sum()) for part in parts)
        assert valid == full.global_valid_tokens == 320


def test_padding_is_text_of_the_same_batch(plan: Plan) -> None:
    """Constant rows would all go to the same experts and distort load balancing."""
    text = {row.numpy().tobytes() for row in read_batch(plan, 0).inputs}
    for ranks in (4, 16):
        parts = [read_batch(plan, 0, rank, ranks) for rank in range(ranks)]
        padding = [row for part in parts for row, source in zip(part.inputs, part.sources, strict=True) if not source]
        assert padding
        assert {row.numpy().tobytes() for row in padding} <= text


def test_targets_are_the_inputs_shifted_by_one(plan: Plan) -> None:
    batch = read_batch(plan, 1)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert batch.sample_range == (10, 20)


def test_the_loader_yields_every_step_in_order_and_can_be_closed_early(plan: Plan) -> None:
    with DataLoader(plan, first_step=1) as loader:
        steps = [(batch.step, batch.inputs) for batch in loader]
    assert [step for step, _ in steps] == [1, 2, 3, 4]
    assert torch.equal(steps[2][1], read_batch(plan, 3).inputs)
    with DataLoader(plan, first_step=0) as loader:
        assert next(iter(loader)).step == 0
    assert not loader._thread.is_alive()


def test_an_error_while_reading_is_raised_in_the_consumer(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(start: int, stop: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(plan.stages[0].dataset, "read", broken)
    with DataLoader(plan, first_step=0) as loader, pytest.raises(OSError, match="the disk is gone"):
        next(iter(loader))


def test_source_losses_add_up_to_the_loss() -> None:
    torch.manual_seed(3)
    losses = torch.rand(6, 8)
    targets = torch.randint(0, 5, (6, 8))
    targets[5] = IGNORE_INDEX
    losses[5] = 0
    source_losses = SourceLosses(["en", "zh"], token_byte_lengths=[0, 1, 2, 3, 4], device=torch.device("cpu"))
    sums = source_losses.sums(losses, targets, ["en", "zh", "zh", "en", "zh", PADDING_SOURCE])[:-1]
    assert sums[:, 0].sum().item() / sums[:, 1].sum().item() == pytest.approx(losses.sum().item() / 40, abs=1e-6)
    assert sums[:, 1].tolist() == [16, 24]
    metrics = source_losses.metrics(sums.tolist())
    zh = [1, 2, 4]
    assert metrics["loss/zh"] == pytest.approx(losses[zh].mean().item(), abs=1e-6)
    text = targets[zh] > 0
    expected = losses[zh][text].sum().item() / math.log(2) / targets[zh].sum().item()
    assert metrics["bpb/zh"] == pytest.approx(expected, abs=1e-6)


def test_a_source_that_is_not_in_the_batch_has_no_metric() -> None:
    source_losses = SourceLosses(["en", "zh"], token_byte_lengths=[1, 1], device=torch.device("cpu"))
    sums = source_losses.sums(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int64), ["en"])
    assert not sums[-1].any()
    metrics = source_losses.metrics(sums[:-1].tolist())
    assert set(metrics) == {"loss/en", "bpb/en"}


LAYOUTS = [
    {"dp_replicate": "auto", "dp_shard": 1},
    {},
    {"dp_replicate": 2},
    {"tp": 2},
    {"tp": 4},
    {"pp": 2},
    {"pp": 2, "tp": 2},
    {"cp": 2},
    {"ep": 4},
]


def hashes(batch: Batch) -> list[str]:
    rows = zip(batch.inputs.numpy(), batch.sources, strict=True)
    return [hashlib.sha256(row.tobytes()).hexdigest() for row, source in rows if source != PADDING_SOURCE]


def read(workspace: Path) -> list[list[tuple[int, list[str]]]]:
    """For every parallel layout and step: the data-parallel rank, and the hashes of the rows it reads."""
    results, plan = [], five_steps_of_ten(workspace)
    for sizes in LAYOUTS:
        mesh = ParallelMesh(ParallelDims.from_recipe(ParallelRecipe(**sizes), 4), torch.device("cpu"))
        with DataLoader(plan, 0, mesh.dp_rank, mesh.dims.dp) as loader:
            results.append([(mesh.dp_rank, hashes(batch)) for batch in loader])
    return results


@pytest.mark.slow
def test_in_every_parallel_layout_the_ranks_read_the_global_order_and_nothing_twice(
    workspace: Path, plan: Plan
) -> None:
    by_rank = on_ranks(4, read, workspace)
    for number, sizes in enumerate(LAYOUTS):
        readers = ParallelDims.from_recipe(ParallelRecipe(**sizes), 4).dp
        for step in range(plan.total_steps):
            slices: dict[int, list[str]] = {}
            for rank in by_rank:
                slot, rows = rank[number][step]
                assert slices.setdefault(slot, rows) == rows, f"{sizes}: ranks of slice {slot} read different samples"
            assert sorted(slices) == list(range(readers))
            union = [row for slot in sorted(slices) for row in slices[slot]]
            assert union == hashes(read_batch(plan, step)), sizes
            assert len(set(union)) == 10


def test_batches_are_pinned_on_the_device_of_the_rank(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning creates a CUDA context on the current device of the thread, which a new thread has as 0."""
    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((device, threading.get_ident())))
    readers: list[int] = []
    monkeypatch.setattr(
        "zero2all.train.data_loader.read_batch",
        lambda *args: (readers.append(threading.get_ident()), read_batch(*args))[1],
    )
    with DataLoader(plan, first_step=3) as loader:
        assert len(list(loader)) == 2
        loader.seek(4)
        assert len(list(loader)) == 1
    assert chosen == [(3, readers[0]), (3, readers[-1])]
