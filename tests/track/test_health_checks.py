"""Each rule fires on the run made for it, and a normal run has only good findings."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from benchmarks.reference_curve import reference_curve

from tests.track.runs import opened
from zero2all.base.findings import Level
from zero2all.base.io import read_record
from zero2all.recipe import builtin_recipe_path
from zero2all.track.health_checks import (
    MESSAGES,
    RULES,
    ReferenceCurve,
    check_health,
    health_finding,
)
from zero2all.track.run_view import RunView

Rows = list[dict[str, float]]
Change = Callable[[Rows], object]
STEPS = 600
VOCABULARY = 4096
LOSSES = ("loss", "loss/zh", "loss/en")


def make_run(directory: Path, change: Change = lambda rows: None, begun: float | None = None) -> RunView:
    """A run of 600 steps with a normal loss curve, modified by ``change``."""
    rng = np.random.default_rng(1)
    begun = time.time() - STEPS * 0.3 if begun is None else begun
    rows: Rows = []
    for step in range(STEPS):
        loss = 3.0 + (math.log(VOCABULARY) - 3.0) * math.exp(-step / 150) - 0.0005 * step + rng.normal(0, 0.02)
        speed = 6000 + rng.normal(0, 50)
        rows.append({"step": step, "time": begun + step * 0.3, "loss": loss, "loss/zh": loss + 0.1,
                     "loss/en": loss - 0.1, "tokens_per_second": speed})  # fmt: skip
    change(rows)
    directory.mkdir(parents=True, exist_ok=True)
    lines = [{"event": "start", "step": 0, "steps": STEPS + 10, "time": begun}, *rows]
    (directory / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "recipe.yaml").write_text(
        "name: quickstart\ncorpus: {sources: [{name: books}]}\ntrain: {batch_tokens: 2048}\n"
    )
    (directory / "identity.json").write_text(json.dumps({"model": {"vocab_size": VOCABULARY}}))
    return opened(directory)


def from_step(first: int, change: Callable[[dict[str, float]], object]) -> Change:
    return lambda rows: [change(row) for row in rows[first:]]


def rises(row: dict[str, float]) -> None:
    row.update({name: row[name] + 0.02 * (row["step"] - 450) for name in LOSSES})


def shares_the_cpu(rows: Rows) -> None:
    for row in rows[::30]:
        row["system/other_cpu"] = 0.45


FAULTS: dict[str, tuple[Change, str, int | None]] = {
    "starts high": (lambda rows: rows[0].update(loss=12.0), "initial loss", 0),
    "starts low": (lambda rows: rows[0].update(loss=4.0), "initial loss", 0),
    "diverges": (from_step(450, rises), "divergence", None),
    "plateaus": (from_step(200, lambda row: row.update(loss=4.0 + 0.001 * math.sin(row["step"]))), "plateau", None),
    "jumps": (lambda rows: rows[333].update(loss=rows[333]["loss"] + 2.0), "spike", 333),
    "repeats": (
        from_step(400, lambda row: row.update({name: 0.7 * row[name] for name in LOSSES})), "sudden drop", None,
    ),
    "loses a source": (from_step(300, lambda row: row.pop("loss/zh")), "dead source", None),
    "a source freezes": (from_step(300, lambda row: row.update({"loss/zh": 0.0})), "dead source", None),
    "slows": (
        from_step(500, lambda row: row.update(tokens_per_second=0.6 * row["tokens_per_second"])), "throughput drop",
        None,
    ),
    "shares the CPU": (shares_the_cpu, "busy machine", None),
}  # fmt: skip


@pytest.mark.parametrize(("change", "rule", "step"), FAULTS.values(), ids=FAULTS)
def test_each_rule_sees_its_own_fault_and_no_other(tmp_path: Path, change: Change, rule: str, step: int | None) -> None:
    found = [finding for finding in check_health(make_run(tmp_path, change), tmp_path) if finding.level != "good"]
    assert [finding.what for finding in found] == [rule]
    assert step is None or found[0].step == step
    assert found[0].chinese


def test_a_normal_run_is_reported_as_good(tmp_path: Path) -> None:
    findings = check_health(make_run(tmp_path), tmp_path)
    assert [(finding.what, finding.level) for finding in findings] == [("initial loss", "good")]


def test_a_machine_that_was_busy_for_a_moment_or_has_a_gpu_is_not_reported(tmp_path: Path) -> None:
    def for_a_moment(rows: Rows) -> None:
        for number, row in enumerate(rows[::30]):
            row["system/other_cpu"] = 0.9 if number < 5 else 0.05

    def with_a_gpu(rows: Rows) -> None:
        shares_the_cpu(rows)
        rows[0]["gpu0/busy_percent"] = 99.0

    for name, change in (("moment", for_a_moment), ("gpu", with_a_gpu)):
        findings = check_health(make_run(tmp_path / name, change), tmp_path)
        assert [finding.what for finding in findings] == ["initial loss"]


def test_a_reference_curve_has_a_loss_at_every_point(tmp_path: Path) -> None:
    curve = reference_curve(make_run(tmp_path, lambda rows: [row.pop("loss") for row in rows[100:110]]))
    shipped = [read_record(ReferenceCurve, path) for path in builtin_recipe_path("reference").glob("*.json")]
    assert shipped
    for one in (curve, *shipped):
        assert all(math.isfinite(loss) for loss in one.loss)
        assert one.tokens == sorted(set(one.tokens))


def test_against_a_reference_curve(tmp_path: Path) -> None:
    good = make_run(tmp_path / "good")
    (tmp_path / "quickstart.json").write_text(json.dumps(asdict(reference_curve(good))))

    worse = from_step(1, lambda row: row.update(loss=8.3 - 0.85 * (8.3 - row["loss"])))
    assert "good" in {finding.level for finding in check_health(good, tmp_path) if finding.what == "reference"}
    bad = [
        finding for finding in check_health(make_run(tmp_path / "bad", worse), tmp_path) if finding.what == "reference"
    ]
    assert [finding.level for finding in bad] == ["bad"]
    assert "above the reference" in bad[0].text
    other = replace(reference_curve(good), sources=["other text"])
    (tmp_path / "quickstart.json").write_text(json.dumps(asdict(other)))
    assert not [finding for finding in check_health(good, tmp_path) if finding.what == "reference"]


def test_a_run_that_fell_silent(tmp_path: Path) -> None:
    run = make_run(tmp_path, begun=time.time() - 3600)
    assert [finding.what for finding in check_health(run, tmp_path) if finding.level == "bad"] == ["silence"]


def test_every_rule_is_explained() -> None:
    assert all(rule.__doc__ for rule in RULES)


def test_every_message_has_the_same_values_in_both_languages() -> None:
    assert {key.partition(" ")[0] for key in MESSAGES} == set(get_args(Level))
    for key, texts in MESSAGES.items():
        assert {"en", "zh"} <= texts.keys() <= {"en", "remedy", "zh"}
        values = [set(re.findall(r"\{(\w+)", one)) for one in (texts["en"] + texts.get("remedy", ""), texts["zh"])]
        assert values[0] == values[1], key


def test_names_in_a_record_are_no_templates() -> None:
    found = health_finding("bad dead source: missing", 7, name="loss/{step}")
    assert (found.what, found.why, found.step) == ("dead source", "loss/{step}: no value since step 7", 7)


def aligned(directory: Path, objective: str, change: Change) -> list[str]:
    """The findings on a run of another objective, as level and rule."""
    make_run(directory, change)
    (directory / "recipe.yaml").write_text(f"name: aligned\ntrain: {{batch_tokens: 2048, objective: {objective}}}\n")
    run = opened(directory)
    return [f"{finding.level} {finding.what}" for finding in check_health(run) if finding.what != "busy machine"]


def preference(first: float, chosen: float, rejected: float) -> Change:
    """A loss that begins at ``first``, and log-probabilities that move by so much."""

    def change(rows: Rows) -> None:
        for step, row in enumerate(rows):
            row["loss"] = first * math.exp(-step / 200)
            row["logps/chosen"], row["logps/rejected"] = -80 + chosen * step / STEPS, -90 + rejected * step / STEPS

    return change


@pytest.mark.parametrize(
    ("objective", "change", "expected"),
    [
        ("{name: dpo}", preference(math.log(2), 1, -30), ["good first loss"]),
        ("{name: dpo}", preference(0.9, 1, -30), ["bad first loss"]),
        ("{name: dpo, dpo: {loss: hinge}}", preference(1.0, 1, -30), ["good first loss"]),
        ("{name: dpo, dpo: {sft_weight: 0.5}}", preference(2.9, 1, -30), []),
        ("{name: dpo}", preference(math.log(2), -20, -30), ["good first loss", "bad chosen falls"]),
        ("{name: kto}", preference(0.5, 1, -30), ["good first loss"]),
    ],
)
def test_the_first_loss_of_preferences_is_known_and_a_falling_probability_is_seen(
    objective: str, change: Change, expected: list[str], tmp_path: Path
) -> None:
    assert aligned(tmp_path / "run", objective, change) == expected


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [
        ("truncated_answers", 0.9, ["bad truncated answers"]),
        ("groups_without_spread", 0.95, ["note groups without spread"]),
        ("sampler_gap", 0.2, ["bad sampler gap"]),
        ("sampler_gap", 1e-6, []),
    ],
)
def test_rollouts_that_teach_nothing_are_seen(metric: str, value: float, expected: list[str], tmp_path: Path) -> None:
    change = from_step(0, lambda row: row.update({"loss": 0.0, metric: value}))
    assert aligned(tmp_path / "run", "{name: grpo}", change) == expected
