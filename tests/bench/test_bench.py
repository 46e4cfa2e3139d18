from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from zero2all.bench import bench_ops, bench_shapes, ops_markdown, shapes_markdown, write_report
from zero2all.bench.ops import FailedOpsRow, OpsRow
from zero2all.bench.shapes import Timing, best_size, candidate_sizes
from zero2all.bench.step import BenchStep, StepMeasurement, measure_in_process
from zero2all.errors import UsageError, Z2aError
from zero2all.recipe import Recipe, load_recipe_or_preset
from zero2all.records import to_json

TINY = [
    "model={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2, "
    "max_position_embeddings: 32, vocab_size: 512}",
    "tokenizer.vocab_size=512", "train.seq_len=32", "train.batch_tokens=128", "train.micro_batch_tokens=64",
    "train.device=cpu", "train.precision=fp32",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_time_for_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.hardware.measure_matmul_flops", lambda *args: 1e11)
    monkeypatch.setattr("zero2all.cpu_use.OtherCpuUse.share", lambda self: None)


def tiny(*overrides: str) -> Recipe:
    return load_recipe_or_preset("z2all-3m", [*TINY, *overrides])


def test_a_preset_or_a_recipe_file_gives_a_model_that_can_be_built(tmp_path: Path) -> None:
    preset = load_recipe_or_preset("z2all-25m")
    assert (preset.train.seq_len, preset.train.batch_tokens, preset.model.vocab_size) == (1024, 2048, 8192)
    (tmp_path / "a.yaml").write_text("{tokenizer: {vocab_size: 640}, train: {steps: 3}}")
    assert load_recipe_or_preset(str(tmp_path / "a.yaml"), ["model.num_hidden_layers=2"]).model.vocab_size == 640
    with pytest.raises(UsageError, match="z2all-9000 is no recipe and no preset; presets: z2all-3m"):
        load_recipe_or_preset("z2all-9000")


def test_candidates_are_around_eight_thirds() -> None:
    sizes = candidate_sizes(512)
    assert 1365 in sizes
    assert all(size % 16 == 0 for size in sizes if size != 1365)
    assert 1365 * 0.94 <= min(sizes) <= max(sizes) <= 1365 * 1.06
    assert candidate_sizes(4096, step=128) == [
        10368,
        10496,
        10624,
        10752,
        10880,
        10923,
        11008,
        11136,
        11264,
        11392,
        11520,
    ]


def test_the_nearest_of_those_as_good_as_the_fastest_is_best() -> None:
    def timing(size: int, speed: float) -> Timing:
        return Timing(size, 1.0, speed, 0)

    assert best_size([timing(1300, 100.0), timing(1360, 99.0), timing(1400, 90.0)], 1365) == 1360
    assert best_size([timing(1300, 100.0), timing(1360, 90.0), timing(1400, 90.0)], 1365) == 1300


def test_shapes_are_timed_and_the_best_is_named(tmp_path: Path) -> None:
    report = bench_shapes(tiny(), rounds=1)
    assert report.centre == 85
    assert report.best in [row.intermediate_size for row in report.sizes]
    for row in report.sizes:
        assert row.flops == pytest.approx(18 * 64 * 32 * row.intermediate_size / row.seconds)
    markdown = shapes_markdown(report)
    assert f"**model.intermediate_size={report.best}**" in markdown
    write_report(tmp_path, "bench-shapes", report, markdown)
    assert json.loads((tmp_path / "bench-shapes.json").read_text()) == asdict(report)
    assert (tmp_path / "bench-shapes.md").read_text() == markdown


def test_every_row_of_the_table_computes_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which is quicker; the loss after a step shows whether kernels agree."""

    def here(recipe: Recipe, steps: int, plain_adamw: bool, timeout: float) -> StepMeasurement:
        step = BenchStep(
            recipe.model_copy(update={"train": recipe.train.model_copy(update={"compile": False})}), plain_adamw
        )
        step.run()
        return StepMeasurement(0.0, [step.time_run()], step.peak_bytes(), step.run())

    monkeypatch.setattr("zero2all.bench.ops.measure_in_process", here)
    report = bench_ops(tiny(), rounds=1, steps=1)
    rows = [row for row in report.rows if isinstance(row, OpsRow)]
    names = [row.name for row in rows]
    assert names[:2] == ["naive", "all fused"]
    assert {"all but attention", "all but norm", "all but cross_entropy", "all but adamw"} <= set(names)
    assert len(report.rows) == len(names) == 2 * len(set(names))  # eager and compiled
    assert [row.plain_adamw for row in rows[:2]] == [True, False]
    assert set(rows[0].ops.model_dump().values()) == {"reference"}
    losses = [row.loss for row in rows]
    assert max(losses) - min(losses) < 1e-4
    for row in rows:
        assert row.tokens_per_second == pytest.approx(128 / row.seconds_per_step)
        assert row.mfu == pytest.approx(row.tokens_per_second * report.flops_per_token / report.peak.flops)
    markdown = ops_markdown(report)
    assert "**eager**" in markdown
    assert "**torch.compile, block by block**" in markdown
    assert "(fp32 matrix products of 2048 measured here)" in markdown


def test_a_row_that_fails_is_reported_and_the_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def sometimes(recipe: Recipe, steps: int, plain_adamw: bool, timeout: float) -> StepMeasurement:
        calls.append(recipe.model.ops.attention)
        if recipe.model.ops.attention == "reference":
            raise Z2aError("out of memory")
        return StepMeasurement(3.0, [2.0, 1.0, 9.0], peak_bytes=10, loss=1.0)

    monkeypatch.setattr("zero2all.bench.ops.measure_in_process", sometimes)
    report = bench_ops(tiny(), rounds=2, steps=3, compiled=False)
    naive, fused = report.rows[:2]
    assert isinstance(naive, FailedOpsRow)
    assert (naive.name, naive.failed) == ("naive", "out of memory")
    assert isinstance(fused, OpsRow)
    assert (fused.name, fused.seconds_per_step, fused.turns) == ("all fused", 2.0, [2.0, 2.0])
    as_json = to_json(report)
    assert list(as_json["rows"][0]) == ["name", "compile", "ops", "plain_adamw", "failed"]
    assert "ops" not in as_json["model"]
    assert calls.count("reference") == 2  # naive and "all but attention", tried once each
    assert "| naive | failed: out of memory |" in ops_markdown(report)


@pytest.mark.slow
def test_a_row_runs_in_a_process_of_its_own() -> None:
    measured = measure_in_process(tiny(), steps=2, plain_adamw=True, timeout=280)
    assert len(measured.seconds) == 2
    assert measured.peak_bytes > 0


def test_a_process_that_dies_reports_its_last_line_of_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho 'RuntimeError: out of memory' >&2\necho >&2\nexit 1\n")
    dying.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(dying))
    with pytest.raises(Z2aError, match=r"^RuntimeError: out of memory$"):
        measure_in_process(tiny(), steps=1, plain_adamw=False, timeout=60)


def test_peak_memory_holds_weights_states_gradients_and_activations() -> None:
    step = BenchStep(tiny())
    step.run()
    weights = sum(parameter.numel() for parameter in step.model.parameters())
    small = step.peak_bytes()
    assert small > 4 * 4 * weights
    large = BenchStep(tiny("train.batch_tokens=8192", "train.micro_batch_tokens=8192"))
    large.run()
    assert large.peak_bytes() > 5 * small
