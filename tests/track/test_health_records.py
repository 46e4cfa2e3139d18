"""Health checks on records of real runs (``make_records``): no alarm on a healthy one, and each fault is found soon."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.track.make_records import FAULT_STEP, RECORDS
from zero2all.base.findings import Finding
from zero2all.track.health_checks import check_health
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView

FOUND_WITHIN = 40  # steps after the fault


def stored(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress((RECORDS / f"{name}.jsonl.gz").read_bytes()).splitlines()]


HEALTHY, FAULTY = stored("healthy"), stored("faulty")


def replayed(run: dict[str, Any], directory: Path) -> Iterator[tuple[int, list[Finding]]]:
    """The findings of level bad after each line of the record, as a live page computes them, with the last step."""
    (directory / "recipe.yaml").write_text(yaml.safe_dump(run["recipe"]))
    (directory / "identity.json").write_text(json.dumps({"model": {"vocab_size": run["vocab_size"]}}))
    view, ends = RunView(LocalRunLocation(directory)), time.time()
    last = run["lines"][-1]["time"]
    with open(directory / "record.jsonl", "w", encoding="utf-8") as record:
        for line in run["lines"]:
            record.write(json.dumps({**line, "time": ends - last + line["time"]}) + "\n")
            record.flush()
            view.refresh()
            findings = check_health(view, directory)
            # The whole run is a few minutes ago at most, so that no prefix of it is silent for long.
            yield line["step"], [one for one in findings if one.level == "bad" and one.what != "silence"]


@pytest.mark.parametrize("run", HEALTHY, ids=[run["run"] for run in HEALTHY])
def test_a_healthy_run_has_no_alarm_at_any_step(run: dict[str, Any], tmp_path: Path) -> None:
    alarms = [(step, found[0].text) for step, found in replayed(run, tmp_path) if found]
    assert not alarms, f"{len(alarms)} of {len(run['lines'])} prefixes, the first: {alarms[0]}"


@pytest.mark.parametrize("run", FAULTY, ids=[run["run"] for run in FAULTY])
def test_a_fault_is_found_soon_and_not_before(run: dict[str, Any], tmp_path: Path) -> None:
    first = next(((step, found) for step, found in replayed(run, tmp_path) if found), None)
    assert first is not None, "never found"
    assert FAULT_STEP <= first[0] <= FAULT_STEP + FOUND_WITHIN, first


def test_the_records_are_of_every_recipe_and_fault() -> None:
    recipes = {run["recipe"]["name"] for run in HEALTHY}
    assert recipes >= {"stories", "quickstart", "reference", "chat", "sft", "lora", "dpo", "kto", "grpo", "distill"}
    assert len(HEALTHY) >= 20
    faults = [run["fault"] for run in FAULTY]
    assert {fault: faults.count(fault) for fault in faults} == dict.fromkeys(
        ("lr", "nan", "dead", "repeated", "shuffled"), 5
    )
