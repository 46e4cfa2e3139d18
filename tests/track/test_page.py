"""The page in a real browser. Z2A_SCREENSHOTS=DIR keeps pictures; Z2A_SCREENSHOT_RUN=RUN takes them of another run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_recipe
from tests.experiments.helpers import experiment, mixture_search, variant
from tests.track.browser import browser, cleaned, complaints, watching
from tests.track.runs import opened, recording
from zero2all.base.io import write_record
from zero2all.track.eval_record import EvalLine, append_evals
from zero2all.track.html_report import report_html
from zero2all.train import train

pytestmark = pytest.mark.slow
NASTY = "<img src=x onerror=\"document.title='broken'\"> 床前明月光"
INK = """
const canvas = document.querySelector(`[data-chart="${arguments[0]}"] canvas`);
if (!canvas) return 0;
const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
let drawn = 0;
for (let at = 3; at < data.length; at += 4) if (data[at] > 0) drawn++;
return drawn;
"""
# Where the colour of the last line is in its chart: the mean place from 0 to 1, and how many pixels. No event has it.
PLACE = """
const chart = document.querySelector(`[data-chart="${arguments[0]}"]`), canvas = chart?.querySelector("canvas");
const mark = [...chart?.querySelectorAll(".legend i") ?? []].at(-1), over = chart?.querySelector(".u-over");
if (!canvas || !mark || !over) return null;
const [red, green, blue] = getComputedStyle(mark).backgroundColor.match(/\\d+/g).map(Number);
const scale = canvas.width / canvas.getBoundingClientRect().width;
const left = scale * (over.getBoundingClientRect().left - canvas.getBoundingClientRect().left);
const width = scale * over.getBoundingClientRect().width;
const { data } = canvas.getContext("2d").getImageData(left, 0, width, canvas.height);
let sum = 0, count = 0;
for (let at = 0; at < data.length; at += 4)
  if (Math.hypot(data[at] - red, data[at + 1] - green, data[at + 2] - blue) < 8 && data[at + 3] > 200) {
    sum += (at / 4) % Math.floor(width);
    count++;
  }
return count && [sum / count / width, count];
"""
OVERLAY = "[data-chart=loss] .u-over"  # of uPlot; a chart that is drawn again gets a new one
REDRAWN = f"const overlay = document.querySelector('{OVERLAY}'); return overlay && !overlay.dataset.before;"


def until(page: Any, script: str, *words: object, seconds: float = 20.0) -> Any:
    """The first true value of a script, or a failure that names it."""
    end = time.monotonic() + seconds
    while not (found := page.execute_script(script, *words)):
        assert time.monotonic() < end, f"never true: {script} {words}"
        time.sleep(0.05)
    return found


def mark_overlay(page: Any) -> Any:
    """After a change of the zoom: the address changes at once, the chart when its data has come."""
    overlay = page.find_element("css selector", OVERLAY)
    page.execute_script("arguments[0].dataset.before = 1", overlay)
    return overlay


@pytest.fixture(scope="module")
def trained(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page")
    train(tiny_recipe(workspace, f"out={out}", "train.steps=80"))
    return out


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as started:
        yield started


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    with cleaned(chromium) as clean:
        yield clean


@contextmanager
def shown(page: Any, directory: Path, state: str = "") -> Iterator[str]:
    """The page of a directory is open, and the browser has no complaint at the end. Yields the address."""
    with watching(directory) as (url, _):
        page.get(url + state)
        yield url
        assert complaints(page) == []
        page.get("about:blank")  # else it would complain that the server ends


def text_of(page: Any, selector: str) -> str:
    found: str = page.execute_script(f"return document.querySelector('{selector}').textContent")
    return found


def test_it_follows_a_run_within_two_seconds_and_text_stays_text(page: Any, tmp_path: Path) -> None:
    with recording(tmp_path / "run") as record:
        record.event("start", step=0, steps=100)
        for step in range(50):
            record.step(step, loss=8.0 - step / 20)
        record.flush()
        with shown(page, tmp_path / "run"):
            until(page, INK, "loss")
            record.sample(50, "zh", NASTY)
            record.step(50, **{"loss": 5.5, "loss/zh": 6.5, "loss/en": 4.5})
            begun = time.monotonic()
            until(page, "return document.querySelector('.metrics').textContent.includes('51 / 100')")
            taken = time.monotonic() - begun
            assert taken < 6, "2 s on a machine that is not loaded"
            until(page, INK, "loss/*")
            text = until(page, "return document.querySelector('.texts pre')?.textContent")
            assert text == NASTY
            assert page.title == "zero2all"
            record.event("resume", step=20)
            record.step(20, loss=4.0)
            until(page, "return document.querySelector('.metrics').textContent.includes('21 / 100')")


def test_the_parts_of_a_step_are_stacked_and_the_legend_has_their_own_values(page: Any, tmp_path: Path) -> None:
    parts = {"time/other": 0.5, "time/data": 1.0, "time/backward": 2.5, "time/communication": 1.0}
    with recording(tmp_path / "run") as record:
        record.event("start", step=0, steps=100)
        for step in range(50):
            record.step(step, loss=1.0, **parts)
        record.flush()
        with shown(page, tmp_path / "run", "#lang=en"):
            chart = "document.querySelector('[data-chart=\"time/*\"]')"
            until(page, f"{chart}?.scrollIntoView(); return Boolean({chart})")
            until(page, INK, "time/*")
            expected = "step 49data 1 (20%)backward 2.5 (50%)exposed communication 1 (20%)other 0.5 (10%)"
            assert page.execute_script(f"return {chart}.querySelector('.legend').textContent") == expected
            filled = until(page, INK, "time/*")
            record.step(50, loss=1.0, **{**parts, "time/data": 6.0})
            until(page, f"return {chart}.querySelector('.legend').textContent.includes('data 6 (60%)')")
            assert filled > 20000, "areas, not lines"


def test_curves_are_smooth_utilization_is_one_chart_and_a_single_point_has_the_axis_of_the_run(
    page: Any, tmp_path: Path
) -> None:
    with recording(tmp_path / "run") as record:
        record.event("start", step=0, steps=100)
        for step in range(100):
            utilization = {"mfu": 0.31, "mfu_palm": 0.32, "hfu": 0.33, "tflops": 1e12}
            validation = {"validation/en": 1.2, "validation/zh": 1.5} if step == 49 else {}
            record.step(step, loss=5.0 + step % 2, **utilization, **validation)
        record.flush()
        with shown(page, tmp_path / "run", "#lang=en"):
            until(page, INK, "loss")
            assert page.execute_script("return document.querySelector('input[type=range]').value") == "0.8"
            legend = "return document.querySelector('[data-chart=loss] .legend b').textContent"
            assert page.execute_script(legend) == "6", "what was recorded, behind the smoothed line"
            names = page.execute_script(
                "return [...document.querySelectorAll('[data-chart]')].map((one) => one.dataset.chart)"
            )
            assert "utilization/*" in names
            assert not {"mfu", "mfu_palm", "hfu", "tflops"} & set(names)
            chart = "document.querySelector('[data-chart=\"validation/*\"]')"
            until(page, f"{chart}?.scrollIntoView(); return Boolean({chart})")
            place, pixels = until(page, PLACE, "validation/*")
            assert pixels > 5
            assert place == pytest.approx(0.5, abs=0.05), "step 49 of 99"


def test_it_shows_probes_and_those_that_are_evaluated_while_it_is_open(page: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fields: dict[str, Any] = {"kind": "probes", "suite": "own", "metric": "probability", "better": "higher"}

    def evaluate(step: int) -> None:
        values = {"rising": step / 1000, NASTY.replace("/", ""): 0.5}
        lines = [EvalLine(**fields, name=name, step=step, value=values[name], time=4e9) for name in values]
        append_evals(run, lines)

    with recording(run) as record:
        record.event("start", step=0, steps=900)
        record.step(0, loss=8.0)
        record.flush()
        for step in range(100, 700, 100):
            evaluate(step)
        with shown(page, run):
            until(page, "document.querySelector('.probes')?.scrollIntoView(); return true")
            until(page, INK, "probes/own: probability")
            assert text_of(page, ".probes summary").startswith("1 of 2 probes")
            assert page.title == "zero2all"
            last = "return document.querySelector('.probes tr.best td:nth-child(6)')?.textContent"
            assert page.execute_script(last) == "0.6"
            evaluate(700)
            until(page, last + " === '0.7'")
            until(page, "return document.querySelector('.probes .legend').textContent.includes('0.7')")


def test_what_a_person_chooses_is_in_the_address_and_a_click_opens_the_documents(page: Any, trained: Path) -> None:
    from selenium.webdriver import ActionChains

    with shown(page, trained, "#smooth=0.6&x=tokens&logy=1&lang=zh&theme=dark"):
        until(page, INK, "loss")
        assert page.execute_script("return document.documentElement.dataset.theme") == "dark"
        assert text_of(page, "[data-chart=loss] h2") == "损失"
        assert page.execute_script("return document.querySelector('select').value") == "tokens"
        over = mark_overlay(page)
        page.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
        drag = ActionChains(page).move_to_element_with_offset(over, -60, 0).click_and_hold().move_by_offset(90, 0)
        drag.release().perform()
        hash_ = until(page, "return location.hash.includes('from=') && location.hash")
        assert "to=" in hash_
        assert "smooth=0.6" in hash_
        until(page, REDRAWN)
        mark_overlay(page)
        # As an event: two clicks of a driver on a loaded machine may lie too far apart to be a double click.
        double = "new MouseEvent('dblclick', {bubbles: true})"
        page.execute_script(f"document.querySelector('[data-chart=loss] .u-over').dispatchEvent({double})")
        until(page, "return !location.hash.includes('from=')")
        until(page, REDRAWN)
        ActionChains(page).click(page.find_element("css selector", OVERLAY)).perform()
        until(page, "return /step=0%3A(3[89]|4[01])/.test(location.hash)")  # the middle of 80 steps
        rows = until(page, "return document.querySelectorAll('dialog tr').length", seconds=60)
        assert rows > 2
        # Source and first words are there before the losses, which nobody has to ask for.
        cells = "return [...document.querySelectorAll('dialog tr:nth-child(2) td')].map((cell) => cell.textContent)"
        first = page.execute_script(cells)
        assert first[1] in ("en", "zh", "code")
        assert len(first[-1]) > 10
        assert not [cell for cell in first if len(cell) == 32 and cell.isalnum()], "a hash says nothing"
        loss = "return parseFloat(document.querySelector('dialog td')?.textContent)"
        worst = until(page, loss, seconds=90)
        assert worst > 0


def test_a_report_opens_without_a_server(page: Any, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(report_html([opened(trained / "run")]), encoding="utf-8")
    page.get((tmp_path / "report.html").as_uri())
    until(page, INK, "loss")
    assert "80 / 80" in text_of(page, ".metrics")
    assert complaints(page) == []


def write_run(directory: Path, loss: float, *sources: str) -> None:
    with recording(directory) as record:
        record.event("start", step=0, steps=20)
        for step in range(20):
            record.step(step, **{"loss": loss + 1 / (step + 1), **{f"loss/{name}": loss for name in sources}})


def test_the_loss_of_a_single_source_has_no_chart_of_its_own(page: Any, tmp_path: Path) -> None:
    for name, sources in (("one", ["zh"]), ("two", ["zh", "en"])):
        write_run(tmp_path / name, 2.0, *sources)
    with shown(page, tmp_path / "one"):
        until(page, INK, "loss")
        assert page.execute_script("return document.querySelector('[data-chart=\"loss/*\"]')") is None
    with shown(page, tmp_path):
        until(page, INK, "loss/*")


def test_an_experiment_has_a_table_and_a_plot_that_follow_its_record(page: Any, tmp_path: Path) -> None:
    directory, key = tmp_path / "experiments" / "lr", "train.optimizer.lr"
    bits = {("lr=1e-3", 0.001): (2.01, 2.0), ("lr=2e-3", 0.002): (1.9, 1.91), (NASTY, 0.004): (1.95, None)}
    runs = [variant(group, seed, value, {key: lr}, "done" if value else "failed", "" if value else NASTY)
            for (group, lr), values in bits.items() for seed, value in enumerate(values)]  # fmt: skip
    runs = [replace(one, name=f"run-{number}") for number, one in enumerate(runs)]
    for one in runs:
        write_run(directory / one.name, 2.0)
    unfinished = [replace(one, state="planned", result=None) for one in runs[4:]]
    write_record(directory / "experiment.json", experiment("sweep", *runs[:4], *unfinished, keys=[key]))
    rows = "return [...document.querySelectorAll('.experiment tr')].map((row) => row.textContent)"
    with shown(page, directory) as url:
        until(page, "return document.querySelectorAll('.run').length === 6")
        assert "4 of 6 runs done" in text_of(page, ".experiment")
        found = page.execute_script(rows)
        assert found[1].startswith("lr=2e-31.9050 ± 0.00711.90502 / 2")
        assert found[3].startswith(NASTY)
        write_record(directory / "experiment.json", experiment("sweep", *runs, keys=[key]))
        until(page, "return document.querySelector('.experiment').textContent.includes('5 of 6 runs done')")
        write_run(directory / "begun-later", 2.0)
        until(page, "return document.querySelectorAll('.run').length === 7")
        page.execute_script("document.querySelector('[data-chart=loss]').scrollIntoView()")
        until(page, INK, "loss")
        found = page.execute_script(rows)
        assert [row[:7] for row in found[1:]] == ["lr=2e-3", NASTY[:7], "lr=1e-3"]
        until(page, "return document.querySelector('.experiment canvas')?.width > 100")
        said = text_of(page, ".experiment")
        assert "lr=2e-3 is better than lr=1e-3 by 0.1000 ± 0.0304" in said
        assert f"seed 1: failed: {NASTY}" in said
        page.get(f"{url}#lang=zh")
        page.refresh()
        until(page, "return document.querySelector('.experiment')?.textContent.includes('lr=2e-3 优于 lr=1e-3')")
        assert page.title == "zero2all"


def test_a_mixture_search_has_a_table_of_its_sources(page: Any, tmp_path: Path) -> None:
    record = mixture_search({"zh": 0.3, "en": 0.1, NASTY: 0.0})
    assert record.fit is not None
    write_run(tmp_path / "mix" / record.variants[0].name, 2.0)
    write_record(tmp_path / "mix" / "experiment.json", record)
    rows = "return [...document.querySelectorAll('[data-table=sources] tr')].map((row) => row.children[0].textContent)"
    with shown(page, tmp_path / "mix"):
        until(page, "return document.querySelector('[data-table=sources]')")
        assert page.execute_script(rows) == ["source", "zh", "en", NASTY]
        said = text_of(page, ".experiment")
        assert f"leave-one-out error {record.fit.error:.4f} (the mean: {record.fit.mean_error:.4f})" in said
        assert "noise between seeds" not in said
        assert text_of(page, ".experiment tr.best td") == record.groups[0].group
        until(page, "return document.querySelector('.experiment canvas')?.width > 100")


def test_a_damaged_experiment_does_not_hide_the_runs(page: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "lr" / "run-1", 2.0)
    (tmp_path / "lr" / "experiment.json").write_text('{"format": 1, "name": "<b>lr</b>"}')
    with shown(page, tmp_path / "lr"):
        until(page, INK, "loss")
        said = text_of(page, ".experiment")
        assert "cannot be read: experiment.json: name: String should match pattern" in said


@pytest.fixture(scope="module")
def pictured(trained: Path) -> Iterator[str]:
    """The address of the page of the run that pictures show."""
    with watching(Path(os.environ.get("Z2A_SCREENSHOT_RUN", trained))) as (url, _):
        yield url


def take_picture(page: Any, address: str, charts: Sequence[str], path: Path) -> None:
    page.get(address)
    for chart in charts:  # a chart is drawn when it comes into view
        until(page, INK, chart)
    wide = page.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, "nothing sticks out"
    assert page.save_screenshot(str(Path(os.environ.get("Z2A_SCREENSHOTS", path.parent)) / path.name))
    assert complaints(page) == []


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("track-dark", "theme=dark&smooth=0.6"),
        ("track-light", "theme=light"),
        ("track-zh", "theme=light&lang=zh&x=tokens&smooth=0.8"),
    ],
)
def test_pictures(name: str, state: str, pictured: str, page: Any, tmp_path: Path) -> None:
    take_picture(page, f"{pictured}#{state}", ("loss", "lr"), tmp_path / f"{name}.png")


def test_a_picture_on_a_phone(pictured: str, tmp_path: Path) -> None:
    with browser(tmp_path / "profile", 390, 844, phone=True) as page:
        take_picture(page, f"{pictured}#theme=dark", ("loss",), tmp_path / "track-phone.png")
