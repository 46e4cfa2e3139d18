"""``python -m benchmarks``: the list of scripts, and the commands that docs give."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from benchmarks import __main__ as runner
from benchmarks.common import median_ratio, take_turns

ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    runner.main()


def test_without_a_name_every_benchmark_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch)
    lines = capsys.readouterr().out.splitlines()[2:]
    listed = {name: text for name, _, text in (line.partition(" ") for line in lines)}
    assert listed.keys() == {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__main__", "common"}
    assert all(text.strip() for text in listed.values())


def test_a_benchmark_prints_its_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "chinchilla")
    assert capsys.readouterr().out.count("\n|") == 8 + 6 + 3  # their rows, and the lines of two headers


def test_an_unknown_name_suggests_a_close_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no benchmark zeros: did you mean zero"):
        run(monkeypatch, "zeros")


def test_every_documented_benchmark_exists() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py"), *ROOT.glob("*.md")]
    pages += [path for path in (ROOT / "benchmarks").rglob("*") if path.suffix in (".py", ".sh")]
    named = {name for page in pages for name in re.findall(r"-m benchmarks (\w+)", page.read_text(encoding="utf-8"))}
    assert named - {"NAME"} <= runner.benchmarks().keys()
    assert len(named) > 30


def test_contenders_take_turns() -> None:
    order: list[str] = []
    found = take_turns({name: lambda name=name: order.append(name) for name in "ab"}, 2, warm_up=1, alternate=True)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert found == {"a": [None, None], "b": [None, None]}


def test_a_ratio_is_the_median_over_rounds() -> None:
    assert median_ratio([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == 3.0
