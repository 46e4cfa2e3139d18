from __future__ import annotations

import threading
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from tests.planner.commands import plan_json, plan_text
from zero2all.cli.main import app

PLAN = ["1.1b", "--gpus", "64", "--gpu", "a800-80g", "--net", "200Gbps", "--tokens", "300B", "--price", "2.1"]


def test_a_recipe_is_planned_without_any_corpus(tmp_path: Path) -> None:
    shown = plan_text(*PLAN, "--svg", tmp_path, "parallel.pp=2")
    for words in ("memory of a rank", "fits", "CUDA context", "GPU-hours", "pipeline: the bubble", "by 6N + 12LHQT"):
        assert words in shown
    for name in ("memory.svg", "roofline.svg", "pipeline.svg"):
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")


def test_json_has_the_same_numbers() -> None:
    plan = plan_json(*PLAN)["plan"]
    assert plan["fits"] is True
    assert plan["cluster"]["network_bandwidth"] == 25e9
    assert plan["memory"]["total"] == sum(part["bytes"] for part in plan["memory"]["parts"])
    assert plan["run"]["tokens"] == 300_000_000_000
    assert plan["run"]["money"] == pytest.approx(2.1 * plan["run"]["gpu_hours"] / plan["run"]["goodput"])


def test_what_does_not_fit_says_what_to_change() -> None:
    shown = plan_text("1.1b", "--gpus", 8, "--gpu", "4090", "train.micro_batch_tokens=128Ki")
    assert "does not fit" in shown
    assert shown.count("it fits with") == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing-like-it"], "is no recipe and no preset"),
        (["z2all-3m", "--gpu", "GTX"], "no data sheet of 'GTX'"),
        (["z2all-3m", "--net", "fast"], "is not a bandwidth such as 200Gbps"),
        (["z2all-3m", "--tokens", "many"], "--tokens: 'many' is not a count"),
        (["z2all-1.1b", "--gpus", "6", "parallel.tp=4"], "but there are 6"),
        (["z2all-3m", "--search", "--svg", "x"], "draws nothing"),
        (["7b", "--gpus", "8,x"], "is not a number of GPUs"),
        (["7b", "--gpus", "0"], "is not a number of GPUs"),
        (["7b", "--gpus", "8,16", "--trace"], "--trace is for one plan"),
        (["7b", "--gpus", "8,16", "--search"], "--search is for one number of GPUs"),
    ],
)
def test_mistakes(words: list[str], message: str) -> None:
    found = CliRunner().invoke(app, ["plan", *words])
    assert found.exit_code == 2
    assert message in found.output


def test_a_preset_is_planned_with_a_batch_that_suits_it() -> None:
    plan = plan_json("7b", "--gpus", 8, "--gpu", "a100-80g")["plan"]
    assert plan["fits"] is True
    assert plan["layout"]["micro_batches"] == 16
    assert plan["layout"]["padding_samples"] == 0
    assert 0.4 < plan["speed"]["mfu"] < 0.6


@pytest.mark.parametrize("options", [[], ["--search"]])
def test_a_plan_that_takes_long_shows_progress(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    printed = threading.Event()
    lines: list[str] = []
    monkeypatch.setattr("zero2all.cli.plan.PROGRESS_DELAY", 0.001)
    monkeypatch.setattr("zero2all.base.console.LOG_INTERVAL", 0.001)
    monkeypatch.setattr("zero2all.base.console.say", lambda line: (lines.append(line), printed.set()))

    def wait_for_line(*words: object, **options: object) -> str:
        printed.clear()
        assert printed.wait(60)
        return ""

    for name in ("plan_text", "search_text"):  # the last thing that a plan computes
        monkeypatch.setattr(f"zero2all.planner.plan_text.{name}", wait_for_line)
    plan_text("z2all-3m", "--gpus", 4, *options)
    assert lines[-1].startswith("searching layouts: 100%" if options else "planning: ")


def test_several_numbers_of_gpus_are_compared(tmp_path: Path) -> None:
    words = ["70b-1024", "--gpus", "1024,256,100,2048", "--svg", tmp_path]
    few, some, many, more = plan_json(*words)["scaling"]
    assert "there are 100" in few["problem"]
    assert (some["gpus"], some["efficiency"]) == (256, 1.0)
    assert many["memory"] <= some["memory"]
    assert 1 > many["efficiency"] > more["efficiency"] > 0.5, "the same batch on more GPUs"
    assert more["tokens_per_second"] > many["tokens_per_second"]
    assert "linear" in (tmp_path / "scaling.svg").read_text()
    [line] = [line for line in plan_text(*words).splitlines() if line.startswith("  1024")]
    assert f"{many['efficiency']:.0%}" in line
