"""Where the time of a step goes: the parts add up, each gets what belongs to it, and reading them waits for nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conftest import tiny_recipe
from tests.parallel.helpers import make_model, small_config
from zero2all.bench.rank_harness import run_ranks
from zero2all.cluster.launch.heartbeat import Heartbeat
from zero2all.model import ModelInputs
from zero2all.model.blocks import LMHead
from zero2all.model.z2all import Block
from zero2all.parallel import ParallelModel
from zero2all.train import TrainerHooks, train
from zero2all.train.components import Checkpointing, StepMetrics
from zero2all.train.data_loader import DataLoader, HostCopy
from zero2all.train.step_timer import PARTS, HostClock, Part, StepTime, StepTimer


class FakeClock:
    """Each look at it takes as long as the test says."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def steps_of(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    name = "record.jsonl" if rank == 0 else f"record.rank{rank}.jsonl"
    lines = [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "step_time" in line]


def test_a_part_inside_another_is_taken_out_of_it_and_a_pause_out_of_all() -> None:
    clock = FakeClock()
    timer = StepTimer(clock)
    timer.restart()
    clock.time += 1  # other
    with timer.part("backward"):
        clock.time += 2
        with timer.part("forward"):
            clock.time += 4
            with timer.part("communication"):
                clock.time += 8
        clock.time += 16
    with timer.paused():
        clock.time += 32
        with timer.part("forward"):
            clock.time += 64
    with timer.part("logging"):
        clock.time += 128
        marks = timer.finish_step()
        clock.time += 256  # of the next step
    times = marks.read()
    assert times.parts == dict.fromkeys(PARTS, 0.0) | {
        "other": 1, "backward": 18, "forward": 4, "communication": 8, "logging": 128
    }  # fmt: skip
    assert times.seconds == sum(times.parts.values()) == 159
    assert timer.finish_step().read().parts["logging"] == 256


def test_a_forward_pass_that_fails_leaves_no_part_open() -> None:
    timer = StepTimer(FakeClock())
    with suppress(MemoryError), timer.part("backward"):
        timer.begin("forward")
        raise MemoryError
    assert timer.current == "other"


def test_the_parts_add_up_to_the_time_of_a_step(workspace: Path, tmp_path: Path) -> None:
    """Against a clock of the test: within 2%, or a millisecond for the hook itself."""
    moments: list[float] = []
    times: list[StepTime] = []
    hooks = TrainerHooks(
        on_gradients=lambda _: moments.append(time.perf_counter()), on_step=lambda _, own: times.append(own)
    )
    train(tiny_recipe(workspace, f"out={tmp_path}", "train.steps=20", "checkpoint.every=100 steps"), hooks)
    passed, counted = moments[-1] - moments[2], sum(own.seconds for own in times[3:])
    assert counted == pytest.approx(passed, rel=0.02, abs=1e-3)
    lines = steps_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(20))
    for line in lines:
        parts = {name: value for name, value in line.items() if name.startswith("time/")}
        assert set(parts) == {f"time/{part}" for part in PARTS}
        assert sum(parts.values()) == pytest.approx(line["step_time"], abs=1e-5)
        assert all(line[f"time/{part}"] > 0 for part in ("forward", "loss", "backward"))
        assert line["time/communication"] == 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The clock of the trainer: only what the test slows down takes time."""
    fake = FakeClock()
    monkeypatch.setattr(StepTimer, "for_device", lambda _: StepTimer(fake))
    return fake


def slowed(original: Any, clock: FakeClock, seconds: float = 1.0) -> Any:
    def slow(*args: Any, **kwargs: Any) -> Any:
        clock.time += seconds
        return original(*args, **kwargs)

    return slow


def slow_batches(original: Any, clock: FakeClock, seconds: float) -> Any:
    def slow(self: Any) -> Iterator[Any]:
        for batch in original(self):
            clock.time += seconds
            yield batch

    return slow


TRAINED = ("train.steps=6", "checkpoint.every=100 steps", "track.log_every=1", "train.micro_batch_tokens=128")


SLOWED: list[tuple[Part, Any, str, int]] = [
    ("data", DataLoader, "__iter__", 1),
    ("forward", Block, "forward", 4),  # two layers, two micro-batches
    ("loss", LMHead, "forward", 2),
    ("backward", Tensor, "backward", 2),
    ("optimizer", ParallelModel, "clip_grad_norm_", 1),
    ("optimizer", torch.optim.AdamW, "step", 1),
    ("logging", StepMetrics, "record", 1),
    ("other", Heartbeat, "__call__", 1),
]


def test_what_is_slow_is_in_its_part(
    clock: FakeClock, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = dict.fromkeys(PARTS, 0.0)
    for number, (part, owner, name, calls) in enumerate(SLOWED):
        seconds = 8.0**number  # so that no call can stand for others
        slow = slow_batches if owner is DataLoader else slowed
        monkeypatch.setattr(owner, name, slow(getattr(owner, name), clock, seconds))
        expected[part] += calls * seconds
    times: list[StepTime] = []
    train(tiny_recipe(workspace, f"out={tmp_path}", *TRAINED), TrainerHooks(on_step=lambda _, own: times.append(own)))
    assert [own.parts for own in times[1:]] == 5 * [expected]


def test_validation_and_checkpoints_are_not_in_a_step(
    clock: FakeClock, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[StepTime] = []
    monkeypatch.setattr(Checkpointing, "save", slowed(Checkpointing.save, clock))
    train(tiny_recipe(workspace, f"out={tmp_path}"), TrainerHooks(on_step=lambda _, own: times.append(own)))
    assert [own.seconds for own in times] == 12 * [0.0]
    assert clock.time == 12


def test_a_gpu_is_read_only_after_the_metrics_of_the_step(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments of a stream: those before a copy are complete when the copy is, and reading others would be an error."""
    made, complete = 0, 0
    original_init, original_read = HostCopy.__init__, HostCopy.tolist

    class StreamClock(HostClock):
        def now(self) -> Any:
            nonlocal made
            made += 1
            return made, time.perf_counter()

        def seconds(self, begin: Any, end: Any) -> float:
            assert end[0] <= complete, "cudaErrorNotReady"
            return float(end[1] - begin[1])

    def init(self: Any, matrix: Tensor, vector: Tensor) -> None:
        original_init(self, matrix, vector)
        self.made = made

    def read(self: Any) -> Any:
        nonlocal complete
        complete = max(complete, self.made)
        return original_read(self)

    monkeypatch.setattr(HostCopy, "__init__", init)
    monkeypatch.setattr(HostCopy, "tolist", read)
    monkeypatch.setattr(StepTimer, "for_device", lambda _: StepTimer(StreamClock()))
    monkeypatch.setattr("zero2all.train.trainer.DEFERRING_DEVICES", ("cpu",))
    train(tiny_recipe(workspace, f"out={tmp_path}"))
    assert [line["step"] for line in steps_of(tmp_path / "run")] == list(range(12))


# Communication

SLOW = 0.3  # seconds
LAYOUTS = {"ddp": {"dp_replicate": 2}, "fsdp": {"dp_shard": 2}, "pp": {"pp": 2}}


@contextmanager
def waited_for(rank: int, model: ParallelModel) -> Iterator[None]:
    """Rank 1 begins each forward pass late."""
    first = next(iter(model.model_parts[0].layers.children()))
    handle = first.register_forward_pre_hook(lambda *_: time.sleep(SLOW) if rank == 1 else None)
    yield
    handle.remove()


def times_by_layout() -> dict[str, StepTime]:
    times = {}
    wait = dist.Work.wait
    for name, sizes in LAYOUTS.items():
        model = make_model(sizes, small_config())
        tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
        timer = StepTimer(HostClock())
        with timer.watching(model), waited_for(model.mesh.rank, model):
            for _ in range(2):
                timer.restart()
                with timer.part("backward"):
                    model.forward_backward(ModelInputs(tokens, tokens), divisor=64, micro_batch_size=2)
                with timer.part("optimizer"):
                    model.clip_grad_norm_(1.0)
            times[name] = timer.finish_step().read()
        assert timer.current == "other"
        assert dist.Work.wait is wait, "nothing is left behind"
    return times


@pytest.mark.long
def test_who_waits_for_a_slow_rank_shows_it_as_exposed_communication() -> None:
    fast, slow = run_ranks(2, times_by_layout)
    for name in LAYOUTS:  # two micro-batches each; another program may delay either rank
        waited = fast[name].parts["communication"] - slow[name].parts["communication"]
        assert waited == pytest.approx(2 * SLOW, rel=0.4), (name, fast[name], slow[name])
        assert slow[name].parts["forward"] > 1.9 * SLOW, (name, slow[name])
        assert fast[name].parts["forward"] < SLOW, (name, fast[name])
