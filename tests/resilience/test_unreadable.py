"""Storage that does not answer at a restart, or answers one rank only: no state is abandoned for it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero2all.resilience.checkpoint as checkpoint
import zero2all.resilience.condition as condition
import zero2all.resilience.keeper as keeper_module
from tests.resilience.threads import OneWriter, run_threads
from zero2all.errors import Z2aError
from zero2all.resilience import Keeper, Team
from zero2all.resilience.lineage import UNKNOWN, read_line
from zero2all.resilience.restore import Chosen, DurableReport, decide


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(condition, "RETRY_AFTER", (0.0, 0.0))


def a_keeper(root: Path, team: Team) -> Keeper:
    model = nn.Linear(4, 4, bias=False)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)]
    return Keeper(OneWriter(root / "checkpoints"), None, root, model, optimizers, team)


def trained(root: Path, *steps: int) -> None:
    keeper = a_keeper(root, Team())
    keeper.begin(None)
    for step in steps:
        keeper.save(step, {"skipped": []}, durable=True)
        keeper.wait()


def restored(root: Path, world: int = 1) -> list[int | None]:
    def rank(team: Team) -> int | None:
        found = a_keeper(root, team).newest()
        return None if found is None else found.step

    return run_threads(world, rank)


def failing(function: Callable[[Path], Any], name: str, times: int) -> Callable[[Path], Any]:
    """``function``, but files of the checkpoint of step 1000 called ``name`` fail this many times."""
    left = [times]

    def fail(path: Path) -> Any:
        if (path.parent.name, path.name) == ("step-00001000", name) and left[0] > 0:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return function(path)

    return fail


def test_one_failed_read_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, 900, 1000)
    monkeypatch.setattr(checkpoint, "read_json", failing(checkpoint.read_json, "state.json", 1))
    assert restored(tmp_path) == [1000]


def test_a_restart_does_not_fall_back_from_a_checkpoint_whose_state_is_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, 900, 1000)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "read_json", failing(checkpoint.read_json, "state.json", 10**9))
        with pytest.raises(Z2aError, match="step-00001000 cannot be read"):
            restored(tmp_path)
    assert restored(tmp_path) == [1000]


@pytest.mark.parametrize("shard", [".metadata", "__0_0.distcp"])
def test_one_rank_that_cannot_read_its_share_ends_the_attempt_of_all(
    shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, 900, 1000)
    failures: list[str] = []

    def rank(team: Team) -> None:
        with pytest.raises(Z2aError, match="step-00001000 cannot be read") as caught:
            a_keeper(tmp_path, team).newest()
        failures.append(str(caught.value))

    with monkeypatch.context() as patch:
        patch.setattr(condition, "sha256_file", failing(condition.sha256_file, shard, 10**9))
        run_threads(3, rank)
    assert len(failures) == 3
    assert len(set(failures)) == 1
    assert restored(tmp_path, 3) == [1000] * 3


def test_a_damaged_checkpoint_is_still_skipped(tmp_path: Path) -> None:
    trained(tmp_path, 900, 1000)
    (tmp_path / "checkpoints" / "step-00001000" / "state.json").write_text("{", encoding="utf-8")
    assert restored(tmp_path) == [900]
    trained(tmp_path, 1000)
    (tmp_path / "checkpoints" / "step-00001000" / "state.json").unlink()
    assert restored(tmp_path) == [900]


def test_an_unreadable_checkpoint_matters_only_if_nothing_newer_is_valid() -> None:
    lineage = UNKNOWN
    unreadable = DurableReport("x", 900, None, ("it cannot be read",), unreadable=True)
    found = decide([], [unreadable, DurableReport("y", 950, lineage)], lineage).chosen
    assert isinstance(found, Chosen)
    assert found.step == 950
    older = [DurableReport("y", 850, lineage), unreadable]
    with pytest.raises(Z2aError, match="x cannot be read"):
        decide([], older, lineage)
    with pytest.raises(Z2aError, match="x cannot be read"):
        decide([], [unreadable], None)
    assert decide([], older, lineage, at_most=899).chosen is not None


# What the run directory says


def test_a_lost_note_of_the_history_is_written_with_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """History B began at 900 and is noted; C began there too, and its note could not be written."""
    trained(tmp_path, 900)
    later = a_keeper(tmp_path, Team())
    found = later.newest()
    assert found is not None
    later.load(found)

    written, full = keeper_module.write_json, [True]

    def write_json(path: Path, value: Any) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        written(path, value)

    monkeypatch.setattr(keeper_module, "write_json", write_json)

    def rank(team: Team) -> None:
        keeper = a_keeper(tmp_path, team)
        found = keeper.newest()
        assert found is not None
        keeper.load(found)
        keeper.save(950, {"skipped": []}, durable=True)
        keeper.wait()  # the checkpoint is worth more than the note
        team.together(lambda: None)
        full[0] = False
        keeper.save(1000, {"skipped": []}, durable=True)
        keeper.wait()
        assert read_line(tmp_path) == keeper.lineage

    run_threads(2, rank)
    assert restored(tmp_path) == [1000]


# Rolling back


def test_checkpoints_that_cannot_be_removed_after_a_rollback_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, 900, 1000)

    def remove(self: object, step: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), f"step-{step}")

    monkeypatch.setattr(OneWriter, "remove", remove)

    def rank(team: Team) -> None:
        keeper = a_keeper(tmp_path, team)
        found = keeper.roll_back(950)
        assert found is not None
        assert found.step == 900

    run_threads(2, rank)
    assert "checkpoints after step 900 cannot be removed" in " ".join(capsys.readouterr().err.split())
    monkeypatch.undo()
    assert restored(tmp_path) == [900], "what was left is of an abandoned history"
