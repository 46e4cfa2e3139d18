"""Islands that train: plain training where they must be, the same weights on all, exact resume, lost islands."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import tiny_recipe
from tests.train.diloco.island_threads import IslandThread, ThreadIslands, thread_islands
from tests.train.runs import weights
from zero2all.base.errors import Interrupted, RecipeError, UsageError
from zero2all.recipe import Recipe, parse_recipe
from zero2all.track import read_steps
from zero2all.track.record_lines import EventLine
from zero2all.track.run_record import read_record_lines
from zero2all.train import Run, TrainerHooks, train
from zero2all.train.data_loader import Batch

DILOCO = ["parallel.sync.islands=2", "parallel.sync.every=4"]
STREAMING = ["parallel.sync.fragments=2", "parallel.sync.overlap=2"]


@pytest.fixture
def islands(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("zero2all.train.diloco.islands.START_PATIENCE", 60.0)
    with thread_islands() as found:
        yield found


def recipe_of(workspace: Path, out: Path, *options: str) -> Recipe:
    return tiny_recipe(workspace, f"out={out}", *DILOCO, *options)


def run_of(out: Path, island: int) -> Run:
    return Run.open(out / "run" / f"island-{island}")


def saved_tensors(run: Run, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint: weights, optimizer, outer optimizer."""
    reader = run.checkpoints.reader(step)
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in reader.entries().items()}
    reader.load(tensors)
    return tensors


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def events(run: Run, name: str) -> list[EventLine]:
    lines = read_record_lines(run.record_path)
    return [line for line in lines if isinstance(line, EventLine) and line.event == name]


def test_one_island_is_plain_training_bit_by_bit(workspace: Path, tmp_path: Path) -> None:
    train(tiny_recipe(workspace, f"out={tmp_path}/plain"))
    train(tiny_recipe(workspace, f"out={tmp_path}/one", "parallel.sync.every=2"))
    assert_equal(weights(Run.open(tmp_path / "plain")), weights(Run.open(tmp_path / "one")))


def test_plain_averages_after_every_step_are_plain_sgd(workspace: Path, tmp_path: Path, islands: ThreadIslands) -> None:
    """Both islands together train the batch that one process would, and SGD with momentum is linear."""
    options = ["train.optimizer.name=sgd", "train.optimizer.lr=0.3", "train.optimizer.max_grad_norm=1e6"]
    train(tiny_recipe(workspace, f"out={tmp_path}/plain", *options))
    plain = ["every=1", "exchange_dtype=fp32", "outer_lr=1", "outer_momentum=0"]
    islands.train(recipe_of(workspace, tmp_path / "islands", *options, *[f"parallel.sync.{word}" for word in plain]))
    expected, found = weights(Run.open(tmp_path / "plain")), weights(run_of(tmp_path / "islands", 0))
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name
    losses = [
        [step["loss"] for step in read_steps(run_of(tmp_path / "islands", n).record_path).values()] for n in (0, 1)
    ]
    plain_losses = [step["loss"] for step in read_steps(Run.open(tmp_path / "plain").record_path).values()]
    assert [(a + b) / 2 for a, b in zip(*losses, strict=True)] == pytest.approx(plain_losses, abs=1e-5)


@pytest.mark.parametrize("options", [[], STREAMING, ["parallel.sync.exchange_dtype=bf16", "train.steps=10"]])
def test_all_islands_end_with_the_same_weights_and_say_what_they_did(
    options: list[str], workspace: Path, tmp_path: Path, islands: ThreadIslands
) -> None:
    islands.train(recipe_of(workspace, tmp_path, *options))
    runs = [run_of(tmp_path, number) for number in range(2)]
    assert_equal(weights(runs[0]), weights(runs[1]))
    step = runs[0].checkpoints.newest()
    assert step is not None
    states = [saved_tensors(run, step) for run in runs]
    shared = [{name: tensor for name, tensor in state.items() if name.startswith("sync.outer")} for state in states]
    assert shared[0]
    assert_equal(*shared)
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0] if name.startswith("optimizer"))
    steps = [values for values in read_steps(runs[0].record_path).values() if "islands/bytes" in values]
    assert {values["islands/present"] for values in steps} == {2}
    assert all(values["islands/bytes"] > 0 and values["islands/delta_norm"] > 0 for values in steps)
    size = sum(tensor.numel() for tensor in weights(runs[0]).values())
    if not options:  # int8 there and back, with a scale for each 256 values
        assert steps[0]["islands/bytes"] == pytest.approx(2 * size * (1 + 4 / 256), rel=0.01)


class Killed(Exception):
    """Stands for SIGKILL: no state is saved, the connection is closed."""


def stopping(islands: ThreadIslands, recipe: Recipe, island: int, step: int) -> IslandThread:
    """Gets a Ctrl-C at a step."""

    def on_batch(batch: Batch) -> None:
        if batch.step == step:
            made.trainer.progress.stop_event.set()

    made = islands.make(recipe, island, TrainerHooks(on_batch=on_batch))
    return made


def stop_all(islands: ThreadIslands, recipe: Recipe, step: int) -> None:
    """At the same step."""
    made = [stopping(islands, recipe, number, step) for number in range(2)]
    for island in made:
        island.start()
    for island in made:
        with pytest.raises(Interrupted):
            island.end()


RESUMED = [*STREAMING, "parallel.sync.every=6", "checkpoint.every=50 steps"]


@pytest.fixture(scope="module")
def never_stopped(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("never")
    with thread_islands() as islands:
        islands.train(recipe_of(workspace, out, *RESUMED))
    return out


@pytest.mark.parametrize("when", [3, 5, 8])  # with an outstanding exchange, with none, as one is merged
def test_islands_that_all_stop_and_resume_are_bitwise_those_that_never_did(
    when: int, workspace: Path, tmp_path: Path, islands: ThreadIslands, never_stopped: Path
) -> None:
    recipe = recipe_of(workspace, tmp_path, *RESUMED)
    stop_all(islands, recipe, when)
    islands.train(recipe)
    for number in range(2):
        one, other = run_of(never_stopped, number), run_of(tmp_path, number)
        assert_equal(saved_tensors(one, 12), saved_tensors(other, 12))
        assert other.checkpoints.read_state(12).islands == one.checkpoints.read_state(12).islands


def test_fragments_may_change_while_an_exchange_is_outstanding(
    workspace: Path, tmp_path: Path, islands: ThreadIslands
) -> None:
    recipe = recipe_of(workspace, tmp_path, *RESUMED)
    stop_all(islands, recipe, 3)
    before = run_of(tmp_path, 0).checkpoints.read_state(4).islands
    assert before is not None
    assert before.merge_at == 5
    at_once = recipe_of(workspace, tmp_path, *RESUMED, "parallel.sync.overlap=0")
    with pytest.raises(UsageError, match=r"parallel\.sync\.overlap=2, not 0"):
        islands.make(at_once, 0)
    with pytest.raises(UsageError, match="overlap as it was"):
        islands.make(at_once, 0, extend="as-planned")
    islands.train(recipe_of(workspace, tmp_path, *RESUMED, "parallel.sync.fragments=1"), extend="as-planned")
    assert_equal(weights(run_of(tmp_path, 0)), weights(run_of(tmp_path, 1)))


def test_a_lost_island_is_not_waited_for_and_takes_over_the_state_when_it_is_back(
    workspace: Path, tmp_path: Path, islands: ThreadIslands
) -> None:
    recipe = recipe_of(workspace, tmp_path, "train.steps=40", "checkpoint.every=5 steps")
    is_back, done_alone = threading.Event(), threading.Event()

    def kill(batch: Batch) -> None:
        if batch.step == 7:
            raise Killed

    def wait_for_other(batch: Batch) -> None:
        if batch.step == 17:  # two exchanges later
            done_alone.set()
            assert is_back.wait(60)

    one = islands.make(recipe, 0, TrainerHooks(on_batch=wait_for_other)).start()
    other = islands.make(recipe, 1, TrainerHooks(on_batch=kill)).start()
    with pytest.raises(Killed):
        other.end()
    assert done_alone.wait(60)
    back = islands.make(recipe, 1).start()
    islands.wait_until(lambda quorum: any(island.start is not None for island in quorum.present.values()))
    is_back.set()
    one.end()
    back.end()
    assert_equal(weights(run_of(tmp_path, 0)), weights(run_of(tmp_path, 1)))
    present = [line.details["present"] for line in events(run_of(tmp_path, 0), "islands")]
    assert present == [[0, 1], [0], [0, 1]]
    [caught_up] = events(run_of(tmp_path, 1), "caught up")
    assert caught_up.details["island"] == 0
    assert caught_up.details["before"] == 5  # its own checkpoint
    assert caught_up.step == 20


def test_a_stop_is_that_of_one_island_and_the_others_train_on(
    workspace: Path, tmp_path: Path, islands: ThreadIslands
) -> None:
    recipe = recipe_of(workspace, tmp_path, "checkpoint.every=50 steps")
    may_end = threading.Event()

    def wait(batch: Batch) -> None:
        if batch.step == 9:
            assert may_end.wait(60)

    stopped = stopping(islands, recipe, 0, 5).start()
    other = islands.make(recipe, 1, TrainerHooks(on_batch=wait)).start()
    with pytest.raises(Interrupted):
        stopped.end()
    [training] = islands.server.islands.by_name.values()
    assert not training.quorum.is_done, "the steps are not all trained"
    may_end.set()
    assert other.end().steps == 12
    assert run_of(tmp_path, 0).checkpoints.newest() == 6, "saved after the step in which it was asked to stop"
    present = [line.details["present"] for line in events(run_of(tmp_path, 1), "islands")]
    assert present == [[0, 1], [1]]
    assert events(run_of(tmp_path, 1), "exchange missed") == []


def test_an_island_that_waits_for_another_can_be_stopped(
    workspace: Path, tmp_path: Path, islands: ThreadIslands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero2all.cluster.launch.islands.client.STOP_PATIENCE", 0.2)
    recipe, may_train = recipe_of(workspace, tmp_path, "checkpoint.every=50 steps"), threading.Event()

    def wait(batch: Batch) -> None:
        if batch.step == 5:
            assert may_train.wait(60)

    stopped = islands.make(recipe, 0).start()
    other = islands.make(recipe, 1, TrainerHooks(on_batch=wait)).start()
    islands.wait_until(lambda quorum: any(one.ready and one.ready.last > 0 for one in quorum.present.values()))
    stopped.trainer.progress.stop_event.set()
    with pytest.raises(Interrupted):
        stopped.end()
    assert [line.details["reason"] for line in events(run_of(tmp_path, 0), "exchange missed")] == ["given up"]
    may_train.set()
    other.end()
    assert [line.details["present"] for line in events(run_of(tmp_path, 1), "islands")] == [[0, 1], [1]]


@pytest.mark.parametrize(("fragments", "settled_at"), [(1, [6, 10, 12]), (2, [4, 6, 10, 12])])
def test_a_state_in_memory_does_not_undo_the_overlap_of_an_exchange(
    fragments: int, settled_at: list[int], workspace: Path, tmp_path: Path, islands: ThreadIslands
) -> None:
    """With two fragments an exchange is always outstanding, so a state waits for one of them and not without end: the
    exchange that begins where it is saved is waited for, and settled before its merge (6, not 8)."""
    sync = ["parallel.sync.every=4", "parallel.sync.overlap=2", f"parallel.sync.fragments={fragments}"]
    checkpoint = ["checkpoint.flash_every=4steps", "checkpoint.every=100steps"]
    islands.train(recipe_of(workspace, tmp_path, *sync, *checkpoint, "train.steps=12"))
    steps = read_steps(run_of(tmp_path, 0).record_path)
    settled = [step + 1 for step, metrics in steps.items() if "islands/wait" in metrics]
    saved = [step + 1 for step, metrics in steps.items() if "checkpoint_stall" in metrics]
    assert settled == settled_at, "when they are merged, not when the state is due"
    assert saved == [6, 10]


def test_islands_that_differ_are_refused(workspace: Path, tmp_path: Path, islands: ThreadIslands) -> None:
    one = islands.make(recipe_of(workspace, tmp_path), 0)
    one.start()
    other = islands.make(recipe_of(workspace, tmp_path, "seed=12", "model.num_hidden_layers=3"), 1).start()
    with pytest.raises(UsageError, match=r"island 1 differs from the others in parallel layout, model, data, seed"):
        other.end()
    islands.make(recipe_of(workspace, tmp_path), 1).start().end()
    one.end()


def test_a_recipe_with_islands_says_how_to_start_them(workspace: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="z2a launch --island NUMBER --islands-endpoint HOST:PORT"):
        train(recipe_of(workspace, tmp_path))
    with pytest.raises(RecipeError, match="cannot roll back"):
        recipe_of(workspace, tmp_path, "train.guard.policy=rollback")
    with pytest.raises(RecipeError, match="overlap to at most every / fragments"):
        parse_recipe("", ["parallel.sync.every=10", "parallel.sync.fragments=3", "parallel.sync.overlap=4"])
