"""Tables, remarks and plots of experiments that nobody has run, and records that nobody should trust."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.helpers import experiment, result, variant
from zero2all.base.charts.svg import line_svg
from zero2all.base.charts.terminal import line_text
from zero2all.base.errors import Z2aError
from zero2all.base.io import write_record
from zero2all.base.records import to_json
from zero2all.experiments import build_report, open_experiment, report_text
from zero2all.experiments.comparison import Comparison
from zero2all.experiments.summary import is_geometric, sweep_plot
from zero2all.track.experiment_record import EXPERIMENT_FILE, MAX_FILE_BYTES, ExperimentRecord, read_experiment

LR = "train.optimizer.lr"


def sweep(*values: tuple[float, list[float]], key: str = LR) -> ExperimentRecord:
    runs = [
        variant(f"lr={value:g}", seed, bits, {key: value})
        for value, measured in values
        for seed, bits in enumerate(measured)
    ]
    return experiment("sweep", *runs, keys=[key])


def text(record: ExperimentRecord) -> str:
    return report_text(build_report(Comparison(record, {})))


def test_a_sweep_is_sorted_with_the_best_marked() -> None:
    printed = text(sweep((0.001, [2.0, 2.01]), (0.002, [1.9, 1.91]), (0.004, [1.95, 1.96]))).splitlines()
    assert [line.split()[:2] for line in printed[1:4]] == [["*", "lr=0.002"], ["lr=0.004", "2"], ["lr=0.001", "2"]]
    assert "1.9050 ± 0.0071" in printed[1]
    assert "lr=0.002 is best, beyond the noise between seeds" in printed
    assert not any("that was tried" in line for line in printed)


def test_values_within_the_noise_of_the_best_are_named() -> None:
    printed = text(sweep((0.001, [2.0, 2.1]), (0.002, [1.9, 2.0]), (0.004, [3.0, 3.1])))
    assert "lr=0.002 is best; not distinguishable from it by the noise between seeds: lr=0.001 (+0.1000 ± " in printed
    assert "lr=0.004 (" not in printed


@pytest.mark.parametrize(("best", "end"), [(0.001, "smallest that was tried: try smaller ones"),
                                           (0.004, "largest that was tried: try larger ones")])  # fmt: skip
def test_the_best_at_the_edge_of_the_grid_is_remarked(best: float, end: str) -> None:
    values = {0.001: 2.0, 0.002: 2.0, 0.004: 2.0, best: 1.5}
    printed = text(sweep(*((value, [bits]) for value, bits in values.items())))
    assert f"the best {LR}, {best:g}, is the {end}" in printed
    assert "the noise between seeds is unknown: the same command with --seeds 3" in printed


def test_failures_are_listed_and_do_not_count() -> None:
    record = sweep((0.001, [2.0, 2.0]), (0.002, [1.9, 1.9]))
    failed = variant("lr=1", 1, None, {LR: 1.0}, "failed", "step 3: loss nan")
    record = experiment("sweep", *record.variants, failed, keys=[LR])
    printed = text(record)
    assert "lr=1, seed 1: failed, step 3: loss nan" in printed
    assert "lr=0.002 is best, beyond the noise between seeds" in printed


def test_a_comparison_says_how_each_recipe_differs_from_the_first() -> None:
    record = experiment("compare", *(variant(name, seed, 2.0 + number / 10 + seed / 1000)
                                     for number, name in enumerate("abc") for seed in range(2)))  # fmt: skip
    report = build_report(Comparison(record, {}))
    assert [line.split(" by ")[0] for line in report.verdicts] == ["a is better than b", "a is better than c"]
    assert report.remarks == []


def test_the_command_that_measures_the_noise_repeats_the_one_that_was_given() -> None:
    runs = [replace(variant(name, 1, 2.0), recipe=f"my {name}.yaml", overrides=["train.steps=3"]) for name in "ab"]
    record = replace(experiment("compare", *runs), budget="5m")
    [remark] = build_report(Comparison(record, {})).remarks
    expected = "z2a compare 'my a.yaml' 'my b.yaml' train.steps=3 --seeds 3 --budget 5m --name test"
    assert remark.endswith(f"this measures it: {expected}")


def test_tokenizers_must_have_been_measured_on_the_same_text() -> None:
    one, other = variant("a", 1, 2.0), variant("b", 1, 1.9)
    assert other.result is not None
    other = replace(other, result=replace(other.result, tokenizer="other"))
    remarks = build_report(Comparison(experiment("compare", one, other), {})).remarks
    assert remarks[0] == "the runs have different tokenizers: compare bits per byte, not losses"
    assert not any("evals.tokens" in remark for remark in remarks)
    assert other.result is not None
    less = replace(other, result=replace(other.result, validation_bytes=3000))
    remarks = build_report(Comparison(experiment("compare", one, less), {})).remarks
    assert "3000 to 6144 bytes of the same validation text: raise evals.tokens" in remarks[1]


def test_columns_are_aligned_in_chinese_too() -> None:
    lines = text(experiment("compare", variant("三国演义", 1, 2.0), variant("b", 1, 1.9))).splitlines()
    from rich.cells import cell_len

    ends = {cell_len(line[: line.index("2.0000" if "2.0000" in line else "1.9000")]) for line in lines[1:3]}
    assert len(ends) == 1


@pytest.mark.parametrize(
    ("values", "log"),
    [([1e-3, 2e-3, 4e-3], True), ([100, 200, 300, 400], False), ([3, 4], False), ([1, 10], True), ([0, 1, 10], False)],
)
def test_the_axis_is_logarithmic_if_the_values_are(values: list[float], log: bool) -> None:
    assert is_geometric(values) is log


def test_a_plot_has_the_mean_and_every_seed() -> None:
    plot = sweep_plot(sweep((0.004, [1.9, 2.0]), (0.001, [2.2, 2.3]), (0.002, [2.0])))
    assert plot is not None
    assert plot.log_x
    [curve] = plot.curves
    assert [(x, round(y, 9)) for x, y in curve.line] == [(0.001, 2.25), (0.002, 2.0), (0.004, 1.95)]
    assert len(curve.points) == 5
    picture = ElementTree.fromstring(line_svg(plot))
    assert len(picture.findall(".//{*}circle")) == 5
    assert len(picture.findall(".//{*}polyline")) == 1
    drawn = line_text(plot).plain
    assert drawn.count("●") == 5
    assert "0.001" in drawn.splitlines()[-1]
    assert "0.004" in drawn.splitlines()[-1]


def test_two_keys_give_a_curve_for_each_value_of_the_second() -> None:
    layers = "model.num_hidden_layers"
    runs = [
        variant(f"lr={lr} layers={depth}", 1, lr + depth, {LR: lr, layers: depth})
        for lr in (1.0, 2.0)
        for depth in (3, 4)
    ]
    plot = sweep_plot(experiment("sweep", *runs, keys=[LR, layers]))
    assert plot is not None
    assert [curve.label for curve in plot.curves] == ["num_hidden_layers 3", "num_hidden_layers 4"]
    assert "num_hidden_layers 4" in line_text(plot).plain


def test_values_that_are_not_numbers_are_categories() -> None:
    key = "train.optimizer.name"
    runs = [variant(f"name={name}", 1, bits, {key: name}) for name, bits in (("adamw", 2.0), ("<muon>", 1.9))]
    plot = sweep_plot(experiment("sweep", *runs, keys=[key]))
    assert plot is not None
    assert plot.categories == ["adamw", "<muon>"]
    assert "&lt;muon&gt;" in line_svg(plot)
    ElementTree.fromstring(line_svg(plot))


def test_one_value_can_be_drawn() -> None:
    plot = sweep_plot(sweep((0.001, [2.0])))
    assert plot is not None
    ElementTree.fromstring(line_svg(plot))
    assert "●" in line_text(plot).plain


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = sweep((0.001, [2.0, 2.01]), (0.002, [1.9, 1.91]))
    write_record(tmp_path / EXPERIMENT_FILE, record)
    assert read_experiment(tmp_path / EXPERIMENT_FILE) == record


def damaged(change: Any) -> bytes:
    value = to_json(sweep((0.001, [2.0]), (0.002, [1.9])))
    change(value)
    return json.dumps(value).encode()


HOSTILE = {
    "a path as a name": damaged(lambda value: value["variants"][0].update(name="../../etc")),
    "text as a number": damaged(lambda value: value["variants"][0]["result"].update(seconds="<script>")),
    "a number that is none": damaged(lambda value: value["variants"][0]["result"].update(seconds=math.nan)),
    "an infinite number": damaged(lambda value: value["variants"][0].update(values={LR: math.inf})),
    "another format": damaged(lambda value: value.update(format=2)),
    "too many variants": damaged(lambda value: value.update(variants=value["variants"] * 3000)),
    "nested without end": b"[" * 200_000,
    "a number of many digits": b'{"format": 1' + b"0" * 5000 + b"}",
    "no object": b"[]",
    "not JSON": b"\xff\xfe",
    "too large": b" " * (MAX_FILE_BYTES + 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_record_is_an_error_of_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / EXPERIMENT_FILE).write_bytes(HOSTILE[name])
    with pytest.raises(Z2aError) as error:
        open_experiment(tmp_path)
    assert len(str(error.value)) < 500


def test_a_record_with_strange_values_is_shown_and_prints_no_control_characters(tmp_path: Path) -> None:
    def change(value: Any) -> None:
        value["variants"][0]["result"]["metrics"]["bits_per_byte"] = 1e300
        value["variants"][0].update(state="failed", reason="\x1b[2Jgone\u202e")
        value["variants"][1]["values"] = {"other": 10**300}
        value["keys"] = [LR, "missing"]

    (tmp_path / EXPERIMENT_FILE).write_bytes(damaged(change))
    comparison = open_experiment(tmp_path)
    assert sweep_plot(comparison.record) is None
    printed = report_text(build_report(comparison))
    assert "\\x1b[2Jgone\\u202e" in printed
    assert "\x1b" not in printed


def test_a_result_without_bits_per_byte_has_none() -> None:
    empty = replace(variant("a", 1, 2.0), result=replace(result(2.0), metrics={}))
    assert empty.bits_per_byte({}) is None
