from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from zero2all.cli.main import app
from zero2all.track import RunRecord
from zero2all.track.step_text import COLUMNS, detail_line, source_line, step_line

STEP = {"loss": 2.345678, "lr": 3e-4, "grad_norm": 0.1234, "tokens_per_second": 1.234e6, "mfu": 0.4532}


def test_a_step_of_a_large_run() -> None:
    line = step_line(1_234_567, 2_000_000, STEP, 12 * 86400 + 3 * 3600)
    assert line == ("step 1234567/2000000  loss 2.3457  lr 3.00e-04  grad 0.123  1.23M tok/s  MFU 45.3%  left 12d03h")
    assert len(line) <= COLUMNS


@pytest.mark.parametrize("grad_norm", [1.23e-5, 0.0, 3.08, 123456.0, float("inf")])
@pytest.mark.parametrize("loss", [0.0012, 12.345, 123456.7, float("nan")])
@pytest.mark.parametrize("tokens_per_second", [0.123456, 842.137, 99_999.0, 1.5e9])
def test_unusual_values_fit_too(loss: float, grad_norm: float, tokens_per_second: float) -> None:
    unusual = {**STEP, "loss": loss, "grad_norm": grad_norm, "tokens_per_second": tokens_per_second, "mfu": 1.0}
    assert len(step_line(1_999_999, 2_000_000, unusual, 99 * 86400)) <= COLUMNS


def test_metrics_that_are_missing_leave_no_gap() -> None:
    assert step_line(3, None, {"loss": 1.0, "tokens_per_second": 842.137}, None) == "step 3/?  loss 1.0000  842.1 tok/s"


def test_one_source_needs_no_line() -> None:
    assert source_line({"loss": 1.0, "loss/en": 1.0, "bpb/en": 2.0}) is None
    assert source_line({"loss": 1.0, "loss/en": 0.85, "loss/zh": 0.9614}) == "  loss by source:  en 0.850  zh 0.961"


@pytest.mark.parametrize(
    "name", ["web-crawl-of-{}", "中文网页与百科语料{}", "a-very-long-name-of-a-source-from-somewhere-{}"]
)
@pytest.mark.parametrize("count", range(2, 30))
def test_sources_fit_in_one_line_and_none_is_dropped_silently(name: str, count: int) -> None:
    line = source_line({f"loss/{name.format(number)}": 2.5 for number in range(count)})
    assert line is not None
    assert cell_len(line) <= COLUMNS
    shown = line.count(" 2.500")
    assert shown >= 2
    more = "" if shown == count else f"  and {count - shown} more"
    assert line.endswith(f" 2.500{more}")


def test_a_long_name_is_shortened_by_its_width_in_the_terminal() -> None:
    line = source_line({"loss/en": 1.0, "loss/" + "语料" * 7: 2.0})
    assert line is not None
    assert line.endswith("  语料语料语料语料语料语… 2.000")


def test_details_fit() -> None:
    details = {"tflops": 181.37, "mfu_palm": 0.4611, "hfu": 0.5871, "memory": 71.2e9, "data_wait": 0.0123}
    line = detail_line(details, "other programs used 53% of the CPU")
    assert line == (
        "  181 TFLOP/s  PaLM MFU 46.1%  HFU 58.7%  memory 71.20GB  data wait 1.2%  other programs used 53% of the CPU"
    )


def test_watch_prints_a_run_as_its_log_does(tmp_path: Path) -> None:
    with RunRecord(tmp_path / "a" / "record.jsonl", system_every=None) as record:
        record.event("start", step=0, steps=20)
        record.step(11, **STEP)
        record.event("stopped", step=12)
    done = CliRunner().invoke(app, ["watch", "--once", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("a: step 12/20  loss 2.3457  1.23M tok/s  MFU 45.3%  (stopped)\n")
