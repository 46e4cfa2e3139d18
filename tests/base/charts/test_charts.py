from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zero2all.base.charts.plot import COLOURS, Axis, Curve, Plot, log_ticks, round_ticks
from zero2all.base.charts.svg import Bar, GanttSpan, bar_svg, gantt_svg, line_svg, sankey_svg
from zero2all.base.charts.table import markdown_table, text_table
from zero2all.base.charts.terminal import bar_text, column_lines, line_text, sparkline
from zero2all.base.units import show_number

ROOT = Path(__file__).parents[3]


def elements(svg: str, name: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall(f".//{{*}}{name}")


def test_the_live_page_has_the_same_palette() -> None:
    page = (ROOT / "web" / "src" / "chart.js").read_text("utf-8")
    [listed] = re.findall(r"export const COLOURS = \[(.*?)\]", page, re.DOTALL)
    assert tuple(re.findall(r"#[0-9a-f]{6}", listed)) == COLOURS


def test_no_other_module_has_a_palette() -> None:
    colours = re.compile(r"#[0-9a-f]{6}\b")
    source = ROOT / "src" / "zero2all"
    modules = [path for path in source.rglob("*.py") if len(colours.findall(path.read_text("utf-8"))) > 2]
    assert modules == [source / "base" / "charts" / "plot.py"]


def test_ticks_are_round() -> None:
    assert round_ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert round_ticks(1234.0, 5678.0) == [2000.0, 3000.0, 4000.0, 5000.0]
    assert round_ticks(2.0, 2.0) == [2.0]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(1e-4, 0.2, [1e-4, 1e-3, 0.01, 0.1]), (3, 30, [5, 10, 20]), (40, 41, [40, 40.2, 40.4, 40.6, 40.8, 41])],
)
def test_ticks_of_a_log_axis_are_powers_if_there_are_enough(low: float, high: float, ticks: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("number", "digits", "shown"),
    [
        (0.0003, 6, "0.0003"),
        (65536, 6, "65536"),
        (1.5e6, 6, "1.5M"),
        (2e5, 6, "200K"),
        (10400, 4, "10.4K"),
        (0, 4, "0"),
    ],
)
def test_numbers_of_an_axis_are_short(number: float, digits: int, shown: str) -> None:
    assert show_number(number, digits) == shown


def test_an_axis_places_values_between_its_ends() -> None:
    assert Axis.over([2.0, 4.0, 3.0]).share(2.5) == 0.25
    assert Axis.over([1.0, 100.0], log=True).share(10.0) == pytest.approx(0.5)
    assert Axis.over([7.0]).share(7.0) == 0.5
    assert Axis.over([0.0, 1.0], margin=0.5).share(0.0) == 0.25
    assert Axis.over([1.0, 100.0], log=True, margin=0.5).low == pytest.approx(0.1)


@pytest.mark.parametrize(("share", "bar"), [(-1, "    "), (0.3, "█▎  "), (0.5, "██  "), (1, "████"), (9, "████")])
def test_a_bar_is_as_long_as_its_share(share: float, bar: str) -> None:
    assert bar_text(share, 4) == bar


def test_a_sparkline_marks_values_that_are_not_numbers() -> None:
    assert sparkline([1.0, float("nan"), 2.0]) == "▁?█"
    assert sparkline([]) == ""
    assert sparkline([5.0]) == "▁"


def test_columns_reach_over_rows_and_the_first_ones_are_marked() -> None:
    assert column_lines([1.0, 0.75, 0.25, 0.0], 2) == ["█▄  ", "██▄ "]
    assert column_lines([1.0, 0.75, 0.25], 2, marked=1) == ["▒▄ ", "▒█▄"]


def test_a_line_is_drawn_without_gaps_between_its_ends() -> None:
    text = line_text(Plot("a\x1b[31m", "step", "loss", [Curve("", [(0, 4), (1, 1)])]), width=10, height=4).plain
    title, *rows, rule, axis = text.splitlines()
    assert "\x1b" not in title
    assert [row[:11] for row in rows] == ["        4 │", "          │", "          │", "        1 │"]
    drawn = [row[11:] for row in rows]
    assert all(any(row[column] != "⠀" for row in drawn) for column in range(10))
    assert (drawn[0][0], drawn[3][9]) != ("⠀", "⠀")
    assert rule.endswith("─" * 10)
    assert axis.split() == ["0", "step", "1"]


def test_a_chart_of_lines_has_ticks_labels_points_and_a_legend() -> None:
    curves = [Curve("a & b", [(1, 2), (1000, 3)]), Curve("c", [], [(10, 2.5)], colour=3)]
    svg = line_svg(Plot("<title>", "FLOPs", "rate", curves, log_x=True, log_y=True))
    words = [element.text for element in elements(svg, "text")]
    assert {"<title>", "FLOPs (log scale)", "rate (log scale)", "a & b", "c", "1", "10", "1000"} <= set(words)
    [point] = elements(svg, "circle")
    assert point.get("fill") == COLOURS[3]
    [line, _] = elements(svg, "polyline")
    (x0, y0), (x1, y1) = (map(float, corner.split(",")) for corner in line.get("points", "").split())
    assert x0 < float(point.get("cx", 0)) < x1
    assert y1 < float(point.get("cy", 0)) < y0


def test_values_are_ticks_if_their_names_do_not_overlap() -> None:
    for xs, names in (
        ([0.0003, 0.001, 0.003], ["0.0003", "0.001", "0.003"]),
        ([1, 900, 950, 1e4], ["1", "10", "100", "1000", "10000"]),
    ):
        plot = Plot("", "x", "y", [Curve("", [(x, x) for x in xs])], log_x=True)
        assert [name for _, name in plot.x_ticks()] == names


def test_bars_of_a_group_share_a_label_and_a_limit_is_a_line() -> None:
    bars = [Bar(domain, value, str(value), colour) for domain in ("en", "中文") for colour, value in ((0, 2), (1, 4))]
    svg = bar_svg("bytes", bars, series=["mine", "theirs"], limit=8)
    words = [element.text for element in elements(svg, "text")]
    assert words == ["bytes", "en", "2", "4", "中文", "2", "4", "mine", "theirs"]
    widths = [float(box.get("width", 0)) for box in elements(svg, "rect")[1:5]]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    assert len(elements(svg, "path")) == 1
    assert elements(bar_svg("none yet", [Bar("a", 0, "0")], inline=True), "rect")[0].get("width") == "0.0"


def test_a_gantt_chart_has_a_box_for_each_span_in_its_row() -> None:
    spans = [GanttSpan(0, 0, 2, COLOURS[0], "first"), GanttSpan(1, 2, 4, COLOURS[2], "second")]
    first, second = elements(gantt_svg("passes", ["rank 0", "rank 1"], spans), "rect")[1:]
    assert float(first.get("y", 0)) < float(second.get("y", 0))
    assert float(first.get("x", 0)) + float(first.get("width", 0)) < float(second.get("x", 0))
    assert [box[0].text for box in (first, second)] == ["first", "second"]


def test_bands_of_a_sankey_diagram_are_as_wide_as_their_flow() -> None:
    bands = elements(sankey_svg([("web", "kept", 300), ("web", "dropped", 100)]), "path")
    wide, thin = (float(re.findall(r"v([\d.]+)", band.get("d", ""))[0]) for band in bands)
    assert wide == pytest.approx(3 * thin, abs=0.2)


def test_no_label_of_a_sankey_diagram_is_cut_off() -> None:
    drawn = sankey_svg([("web", f"reason {number}", 1000 if number == 0 else 10) for number in range(40)])
    tall = float(ElementTree.fromstring(drawn).get("height", 0))
    lines = [float(text.get("y", 0)) for text in elements(drawn, "text") if text.get("text-anchor") == "start"]
    assert len(lines) == 40
    assert lines == sorted(lines)
    assert max(lines) < tall


def test_a_text_table_aligns_by_the_width_on_a_terminal() -> None:
    rows = [["", "loss", "n"], ["中文", "1.25", "7"], ["more rows"]]
    assert text_table(rows) == "           loss  n\n中文       1.25  7\nmore rows"
    assert text_table(rows[:2], right=False) == "      loss  n\n中文  1.25  7"


def test_a_markdown_table_aligns_its_columns() -> None:
    assert markdown_table(("a", "b"), [(1, "x")], "lr") == "| a | b |\n|---|---:|\n| 1 | x |"
