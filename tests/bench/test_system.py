"""z2a bench loader | comm | checkpoint, and their comparison with an earlier report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from zero2all.base.errors import UsageError
from zero2all.bench.checkpoint import bench_checkpoint
from zero2all.bench.comm import COLLECTIVES, CollectiveTime, bench_comm, measure_collectives
from zero2all.bench.loader import bench_loader
from zero2all.bench.measurements import (
    Measurement,
    MeasurementReport,
    read_report,
    regressions,
    report_markdown,
    speedups,
    this_machine,
    write_report,
)
from zero2all.bench.rank_harness import run_ranks
from zero2all.cli.main import app
from zero2all.recipe import load_recipe_or_preset

REPORT = MeasurementReport(
    "comm",
    "a title",
    this_machine(),
    [Measurement("fast", 2.0, "GB/s"), Measurement("stall", 10.0, "ms"), Measurement("only here", 1.0, "GB/s")],
)
SLOWER = replace(REPORT, measurements=[Measurement("fast", 1.5, "GB/s"), Measurement("stall", 20.0, "ms", "a note")])


def test_a_speedup_is_above_one_for_rates_and_for_times() -> None:
    assert speedups(REPORT, SLOWER) == {"fast": pytest.approx(4 / 3), "stall": 2.0}
    assert speedups(SLOWER, REPORT) == {"fast": 0.75, "stall": 0.5}


def test_regressions_beyond_the_tolerance_are_listed() -> None:
    assert regressions(REPORT, SLOWER) == []
    assert regressions(SLOWER, replace(REPORT, measurements=[Measurement("fast", 1.6, "GB/s")])) == []
    assert regressions(SLOWER, REPORT)[1] == "stall: 20 ms, was 10 (0.50x)"


def test_a_value_of_zero_is_no_speedup_and_no_crash() -> None:
    broken = replace(REPORT, measurements=[Measurement("fast", 0.0, "GB/s")])
    assert speedups(REPORT, broken) == speedups(broken, REPORT) == {}


def test_a_table_has_both_reports(tmp_path: Path) -> None:
    write_report(tmp_path, "bench-comm", SLOWER, report_markdown(SLOWER))
    earlier = read_report(tmp_path / "bench-comm.json", "comm")
    assert earlier == SLOWER
    lines = report_markdown(REPORT, earlier).splitlines()
    assert "| fast | 2 GB/s | 1.5 | 1.33x |  |" in lines
    assert "| only here | 1 GB/s |  |  |  |" in lines


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("{", "is not a report of 'z2a bench comm'"),
        ('{"benchmark": "comm"}', "is not a report of 'z2a bench comm'"),
        ("[1]", "is not a report of 'z2a bench comm'"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        read_report(tmp_path / "a.json", "comm")


def test_a_report_of_another_benchmark_is_refused(tmp_path: Path) -> None:
    write_report(tmp_path, "a", REPORT, "")
    with pytest.raises(UsageError, match="is a report of 'z2a bench comm', not of 'z2a bench loader'"):
        read_report(tmp_path / "a.json", "loader")


def test_the_bus_bandwidth_is_that_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = ([CollectiveTime("all-reduce", 4096, seconds)] for seconds in (1e-3, 2e-3))
    monkeypatch.setattr("zero2all.bench.comm.run_ranks", lambda *args, **kwargs: [fast, slow])
    [row] = bench_comm(2, [4096]).measurements
    assert (row.name, row.note) == ("all-reduce 4.10KB", "2 ms")
    assert row.value * 1e9 == pytest.approx(4096 / 2e-3)
    assert [kind.link_share(4) for kind in COLLECTIVES] == [1.5, 0.75, 0.75, 0.75, 1.0]  # as nccl-tests count


def _exchange() -> tuple[dict[str, list[float]], list[CollectiveTime]]:
    rank, found = dist.get_rank(), {}
    for kind in COLLECTIVES:
        data, buffer = torch.tensor([1.0, 2.0]) + 10 * rank, torch.zeros(2)
        part = torch.tensor([5.0 + rank])
        kind.run(data, buffer, part)
        found[kind.name] = [*data.tolist(), *buffer.tolist(), *part.tolist()]
    return found, measure_collectives([4096, 10], "gloo")


def test_the_collectives_are_what_they_are_called() -> None:
    (first, times), _ = run_ranks(2, _exchange)
    # A size that does not divide over the ranks is rounded down.
    assert [(time.collective, time.size) for time in times] == [
        (kind.name, size) for kind in COLLECTIVES for size in (4096, 8)
    ]
    assert all(time.seconds > 0 for time in times)
    assert first == {
        "all-reduce": [12.0, 14.0, 0.0, 0.0, 5.0],
        "all-gather": [1.0, 2.0, 5.0, 6.0, 5.0],
        "reduce-scatter": [1.0, 2.0, 0.0, 0.0, 12.0],
        "all-to-all": [1.0, 2.0, 1.0, 11.0, 5.0],
        "send and receive": [1.0, 2.0, 11.0, 12.0, 5.0],
    }


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="4 ranks need as many GPUs, and there are 2: set --gpus 2"):
        bench_comm(4)


def test_checkpoints_are_timed_and_nothing_is_left(tmp_path: Path) -> None:
    recipe = load_recipe_or_preset("z2all-3m", ["model.num_hidden_layers=1", "tokenizer.vocab_size=320"])
    report = bench_checkpoint(recipe, tmp_path / "storage", rounds=1)
    assert [row.name for row in report.measurements] == [
        "stall of training",
        "write in the background",
        "load from memory",
        "load from disk",
    ]
    assert all(row.value > 0 for row in report.measurements)
    assert list((tmp_path / "storage").iterdir()) == []


def test_the_loader_is_timed(workspace: Path) -> None:
    report = bench_loader(tiny_recipe(workspace, "train.steps=4"), batches=2, rounds=1)
    assert [row.name for row in report.measurements] == [
        "read, readers 1",
        "read, readers 2",
        "read, readers 4",
        "loader",
        "loader, copied to the device",
        "loader, copied to the device, with document starts",
    ]
    assert report.title.startswith("2 batches of ")
    assert all(row.value > 0 for row in report.measurements)


def test_a_regression_fails_the_command_and_shows_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.bench.comm.bench_comm", lambda ranks, sizes: SLOWER)
    write_report(tmp_path, "before", REPORT, "")
    arguments = ["bench", "comm", "--json", "--out", str(tmp_path / "out"), "--against", str(tmp_path / "before.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "stall: 20 ms, was 10 (0.50x)" in json.loads(result.stdout)["error"]
    assert (tmp_path / "out" / "bench-comm.json").exists()  # the new measurements are kept
