"""Each new checkpoint is evaluated once, beside training; the record of the run is never touched."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.evals.bench.fakes import write_benchmarks
from zero2all.base.errors import UsageError
from zero2all.cli.main import app
from zero2all.evals import watch
from zero2all.evals.probe_suite import ProbeSuite, load_suite
from zero2all.evals.watch import WatchOptions, watch_run
from zero2all.track.eval_record import EvalCurve
from zero2all.track.eval_report import (
    ANSWER_BITS,
    BITS_PER_BYTE,
    CENTERED_ACCURACY,
    NATS_PER_TOKEN,
    read_evals,
    verdicts,
)
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView
from zero2all.train import Run


@pytest.fixture
def run(three_checkpoints: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(watch.os, "nice", lambda increment: 0)  # the process of the tests keeps its priority
    return Path(shutil.copytree(three_checkpoints.directory, tmp_path / "run"))


@pytest.fixture
def suite(tmp_path: Path) -> ProbeSuite:
    path = tmp_path / "small.yaml"
    path.write_text(
        "name: small\nprobes:\n"
        "  - {name: next, kind: continuation, language: en, category: words, prompt: small, continuation: ' steps'}\n",
        encoding="utf-8",
    )
    return load_suite(str(path))


def curves(run: Path) -> dict[tuple[str, str, str], EvalCurve]:
    view = RunView(LocalRunLocation(run))
    view.read_to_end()
    return {(curve.kind, curve.suite, curve.name): curve for curve in view.eval_curves()}


def test_every_checkpoint_is_evaluated_once(run: Path, suite: ProbeSuite, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run.glob("*.jsonl")}
    data = write_benchmarks(tmp_path)
    options = WatchOptions((suite,), data, ("arc_easy",), 3)
    report = watch_run(str(run), options)  # the run has ended, so it does
    assert report.evaluated == [1, 2, 3]
    assert report.failed == {}
    found = curves(run)
    assert found["loss", BITS_PER_BYTE, "all"].steps == [1, 2, 3]
    assert found["loss", NATS_PER_TOKEN, "zh"].steps == [1, 2, 3]
    assert found["bench", "arc_easy", ANSWER_BITS].steps == [1, 2, 3]
    assert found["probes", "small", "next"].steps == [1, 2, 3]
    assert any("tokenizer of" in verdict.why for verdict in report.verdicts)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert watch_run(str(run), options).evaluated == []
    recipe = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    recipe["evals"]["benchmarks"] = [{"name": "arc_easy"}, "gsm8k"]
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    more = replace(options, tasks=())  # those of the recipe
    lines = (run / "evals.jsonl").read_text("utf-8").splitlines()
    assert watch_run(str(run), more, once=True).evaluated == [1, 2, 3]
    added = (run / "evals.jsonl").read_text("utf-8").splitlines()[len(lines) :]
    assert {json.loads(line)["suite"] for line in added} == {"gsm8k"}  # nothing else is evaluated again


def test_runs_are_reported_side_by_side(run: Path, suite: ProbeSuite, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other|<b>run"))
    for one in (run, other):
        watch_run(str(one), WatchOptions((suite,)))
    done = CliRunner().invoke(app, ["eval", "report", str(run), str(other)])
    assert done.exit_code == 0, done.output
    last = curves(run)["loss", BITS_PER_BYTE, "all"].values[-1]
    assert done.stdout.count(f"| {last:.4g} ") == 2  # of both runs
    assert "|<b>run" not in done.stdout.replace("\\|", "")


def test_a_run_without_evaluations_has_no_report(run: Path) -> None:
    with pytest.raises(UsageError, match="z2a eval watch"):
        read_evals(str(run), run, 300)


def test_a_checkpoint_that_disappears_is_left_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = watch.find_target

    def remove_first(target: str, step: int | None = None) -> object:
        if step == 2:
            shutil.rmtree(Run.open(run).checkpoints.path(2))
        return find(target, step)

    monkeypatch.setattr(watch, "find_target", remove_first)
    report = watch_run(str(run), WatchOptions())
    assert report.evaluated == [1, 3]
    assert list(report.failed) == [2]


def test_a_watcher_waits_for_checkpoints_until_the_run_ends(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, waited = Run.open(run).checkpoints.path(3), []
    shutil.move(path, run / "later")
    ended = iter([False, False, True])
    monkeypatch.setattr(watch, "_has_ended", lambda run: next(ended))

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            shutil.move(run / "later", path)

    report = watch_run(str(run), WatchOptions(), 7.0, wait=wait)
    assert report.evaluated == [1, 2, 3]
    assert waited == [7.0, 7.0]


def test_a_directory_without_benchmarks_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no files of a known benchmark"):
        watch_run(str(run), WatchOptions(data=tmp_path))


def curve(
    kind: str, suite: str, name: str, values: list[float], error: float | None = None, **more: float
) -> EvalCurve:
    count = len(values)
    return EvalCurve(
        kind=kind, suite=suite, name=name, group="", metric=suite, better="lower", steps=list(range(count)),
        times=[0.0] * count, values=values, errors=[error] * count, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def test_verdicts_say_what_the_curves_show() -> None:
    found = verdicts(
        [
            curve("loss", NATS_PER_TOKEN, "wiki", [3.0, 1.9]),
            curve("loss", BITS_PER_BYTE, "all", [2.0, 2.5, 1.8, 1.7, 1.6]),
            curve("bench", "arc", CENTERED_ACCURACY, [0.01, 0.02], 0.05),
            curve("bench", "arc", ANSWER_BITS, [2.0, 1.0], 0.1, p=0.01),
            curve("bench", "lambada", CENTERED_ACCURACY, [0.1, 0.2], 0.05),
            curve("probes", "english", "capital", [0.1, 0.2], p=0.01),
            curve("probes", "english", "grammar", [0.1, 0.2], p=0.5),
        ],
        8000,
    )
    assert list(map(str, found)) == [
        "ok   wiki: 1.90 nats per token, below 2 (tokenizer of 8,000 tokens)",
        "ok   loss: steady: it fell in the last 3 evaluations",
        "note arc: at chance\n     look at the bits per byte of the right answer, which improves",
        "ok   lambada: above chance, centered accuracy 0.200 ± 0.050",
        "note probes english: 1 of 2 trend as expected",
    ]
    (unsteady,) = verdicts([curve("loss", BITS_PER_BYTE, "all", [2.0, 1.5, 1.6, 1.4])], 1)
    assert (unsteady.why, unsteady.step) == ("unsteady: bits per byte rose by 0.1000 to step 2", 2)
