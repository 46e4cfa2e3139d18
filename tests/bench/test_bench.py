from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.records import to_json
from zero2all.bench import bench_ops, bench_shapes, ops_markdown, shapes_markdown, write_report
from zero2all.bench.ops import FailedOpsRow, OpsRow
from zero2all.bench.shapes import Timing, best_size, candidate_sizes, shape_rules
from zero2all.bench.step import BenchStep, StepMeasurement, StepOptions, measure_in_process
from zero2all.bench.variants import SWEEPS, find_sweep, kernel_variants, sweep_variants
from zero2all.recipe import Recipe, load_recipe_or_preset

TINY = [
    "model={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2, "
    "max_position_embeddings: 32, vocab_size: 512}",
    "tokenizer.vocab_size=512", "train.seq_len=32", "train.batch_tokens=128", "train.micro_batch_tokens=64",
    "train.device=cpu", "train.precision=fp32",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_time_for_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.base.machine.devices.measure_matmul_flops", lambda *args: 1e11)
    monkeypatch.setattr("zero2all.base.machine.cpus.OtherCpuUse.share", lambda self: None)


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
    assert len(sizes) >= 10
    large = [10752, 10784, 10816, 10848, 10880, 10912, 10923, 10944, 10976, 11008, 11040, 11072, 11104]
    assert set(candidate_sizes(4096)) - set(large) == set()
    assert len(candidate_sizes(4096)) == 13
    assert [size for size in candidate_sizes(4096, tp=4) if size % 64] == [10923]


def timing(size: int, speed: float) -> Timing:
    return Timing(size, 1.0, speed, 0)


def test_the_nearest_of_those_as_good_as_the_fastest_is_best() -> None:
    assert best_size([timing(1300, 100.0), timing(1360, 99.6), timing(1400, 90.0)], 1365) == 1360
    assert best_size([timing(1300, 100.0), timing(1360, 90.0), timing(1400, 90.0)], 1365) == 1300


def test_10944_is_found_where_it_was_the_fastest() -> None:
    """TFLOP/s published for an H100 with a hidden size of 4096."""
    published = {10922: 272.73, 10944: 398.38, 10848: 395.62, 10880: 395.52, 10912: 395.16, 11008: 395.01}
    assert {10944, 10848, 10880, 10912, 11008} <= set(candidate_sizes(4096))
    assert best_size([timing(size, speed) for size, speed in published.items()], 8 * 4096 / 3) == 10944


ALIGNED = ["model.hidden_size=256", "model.num_attention_heads=4", "model.num_key_value_heads=4"]
BATCH = ["train.batch_tokens=256", "train.micro_batch_tokens=256"]


@pytest.mark.parametrize(
    ("overrides", "broken"),
    [
        ([], []),
        (["train.micro_batch_tokens=128"], ["micro-batch"]),
        (["model.num_attention_heads=8"], ["b*s"]),
        (["parallel.tp=2"], ["t as small"]),
        (["parallel.tp=4", "model.vocab_size=576"], ["vocabulary", "t as small"]),
        (["parallel.tp=4", "model.hidden_size=384", "model.num_attention_heads=6", "model.num_key_value_heads=1"],
         ["b*s", "t as small"]),
    ],
)  # fmt: skip
def test_rules_for_shapes(overrides: list[str], broken: list[str]) -> None:
    rules = shape_rules(tiny_unchecked([*ALIGNED, *BATCH, *overrides]))
    assert [rule.rule for rule in rules if not rule.holds] == [
        next(rule.rule for rule in rules if rule.rule.startswith(start)) for start in broken
    ]


def tiny_unchecked(overrides: list[str]) -> Recipe:
    """With a layout that the recipe may refuse: the rules say why it is a bad one."""
    tp = [item for item in overrides if item.startswith("parallel.tp=")]
    recipe = tiny(*(item for item in overrides if item not in tp))
    parallel = recipe.parallel.model_copy(update={"tp": int(tp[-1].partition("=")[2]) if tp else 1})
    return recipe.model_copy(update={"parallel": parallel})


def test_heads_that_tensor_parallelism_cannot_share_break_a_rule() -> None:
    recipe = tiny_unchecked([*ALIGNED, "train.batch_tokens=32", "train.micro_batch_tokens=32", "parallel.tp=8"])
    [rule] = [rule for rule in shape_rules(recipe) if rule.rule == "(b*a)/t whole"]
    assert (rule.here, rule.holds) == ("1 * 4 / 8 = 0.5", False)


def test_shapes_are_timed_and_the_best_is_named(tmp_path: Path) -> None:
    report = bench_shapes(tiny(), rounds=1)
    assert report.centre == 85
    assert report.best in [row.intermediate_size for row in report.sizes]
    for row in report.sizes:
        assert row.flops == pytest.approx(18 * 64 * 32 * row.intermediate_size / row.seconds)
    markdown = shapes_markdown(report)
    assert f"**model.intermediate_size={report.best}**" in markdown
    assert len(report.rules) == 6
    assert report.rules[-1].here.startswith("64, with ")
    assert "| (b*a)/t whole | 2 * 2 / 1 = 4 | yes |" in markdown
    write_report(tmp_path, "bench-shapes", report, markdown)
    assert json.loads((tmp_path / "bench-shapes.json").read_text()) == asdict(report)
    assert (tmp_path / "bench-shapes.md").read_text() == markdown


@pytest.fixture
def measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process and not compiled, which is quicker; the loss after a step shows whether kernels agree."""

    def here(recipe: Recipe, steps: int, options: StepOptions, timeout: float) -> StepMeasurement:
        step = BenchStep(
            recipe.model_copy(update={"train": recipe.train.model_copy(update={"compile": False})}), options
        )
        step.run()
        return StepMeasurement(step.clock, 0.0, [step.time_run()], step.peak_bytes(), step.run())

    monkeypatch.setattr("zero2all.bench.ops.measure_in_process", here)


@pytest.mark.usefixtures("measured_here")
def test_every_row_of_the_table_computes_the_same_step() -> None:
    report = bench_ops(tiny(), rounds=1, steps=1, compiled=True, subsets=[["norm", "rope"]])
    rows = [row for row in report.rows if isinstance(row, OpsRow)]
    names = [row.name for row in rows]
    assert names[:2] == ["naive", "all fused"]
    assert {"all but attention", "all but norm", "all but cross_entropy", "all but adamw"} <= set(names)
    assert {"cross_entropy chunked -> torch", "only attention, cross_entropy, adamw", "only norm, rope"} <= set(names)
    assert len(report.rows) == len(names) == 2 * len(set(names))  # eager and compiled
    assert [row.options.plain_adamw for row in rows[:2]] == [True, False]
    assert set(rows[0].ops.model_dump(exclude={"experts"}).values()) == {"reference"}
    losses = [row.loss for row in rows]
    assert max(losses) - min(losses) < 1e-4
    for row in rows:
        assert row.tokens_per_second == pytest.approx(128 / row.seconds_per_step)
        assert row.mfu == pytest.approx(row.tokens_per_second * report.flops_per_token / report.peak.flops)
        assert row.tflops == pytest.approx(row.mfu * report.peak.flops / 1e12)
        assert row.mfu_palm > 0
    markdown = ops_markdown(report)
    assert "**eager**" in markdown
    assert "**torch.compile, block by block**" in markdown
    assert "(fp32 matrix products of 2048 measured here" in markdown  # a busy machine has a remark here


def test_swaps_and_subsets_name_each_kernel() -> None:
    rows = {row.name: row for row in kernel_variants(tiny(), torch.device("cpu"), [["swiglu"]])}
    assert rows["cross_entropy chunked -> torch"].recipe.model.ops.cross_entropy == "torch"
    assert rows["cross_entropy chunked -> torch"].recipe.model.ops.attention == "sdpa"
    few = rows["only attention, cross_entropy, adamw"]
    assert few.recipe.model.ops.model_dump(exclude={"experts"}) == {
        "attention": "sdpa", "norm": "reference", "rope": "reference", "swiglu": "reference",
        "cross_entropy": "chunked",
    }  # fmt: skip
    assert not few.options.plain_adamw
    assert rows["only swiglu"].options.plain_adamw
    with pytest.raises(UsageError, match="no kernel of softmax; there are attention, norm"):
        list(kernel_variants(tiny(), torch.device("cpu"), [["softmax", "norm"]]))


@pytest.mark.usefixtures("measured_here")
def test_sweeps_change_one_size_each() -> None:
    report = bench_ops(tiny("model.num_key_value_heads=2"), rounds=1, steps=1, compiled=False, sweeps=SWEEPS)
    rows = {(row.table, row.name): row for row in report.rows if isinstance(row, OpsRow)}
    assert [name for _, name in rows] == [
        "512 rows", "513 rows", "513 tokens, padded to 576 rows",
        "32", "33", "40", "96",
        "2 heads of 16, 2 key-value heads", "1 heads of 32, 1 key-value heads",
        "1 x 32 tokens, 4 micro-batches", "2 x 32 tokens, 2 micro-batches", "4 x 32 tokens, 1 micro-batches",
        "BSHE", "BHSE", "SBHE",
    ]  # fmt: skip
    # The order of dimensions and the number of micro-batches change no loss.
    same = [row.loss for (table, _), row in rows.items() if table in ("layout", "micro-batch")]
    assert max(same) - min(same) < 1e-5
    markdown = ops_markdown(report)
    assert "**vocabulary, eager**" in markdown
    assert "| BHSE |" in markdown
    assert to_json(report)["rows"][-1]["options"]["layout"] == "SBHE"
    with pytest.raises(UsageError, match="no sweep 'depth'; there are vocabulary, hidden"):
        find_sweep("depth")


def test_one_row_more_than_a_multiple_of_64_is_not_padded() -> None:
    aligned, odd, padded = sweep_variants(tiny(), ["vocabulary"])
    rows = [BenchStep(row.recipe, row.options).model.lm_head.weight.shape[0] for row in (aligned, odd, padded)]
    assert rows == [512, 513, 576]


def test_one_thread_is_measured_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, clock in ((1, "CPU"), (2, "wall")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert BenchStep(tiny()).clock == clock


def test_a_row_that_fails_is_reported_and_the_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def sometimes(recipe: Recipe, steps: int, options: StepOptions, timeout: float) -> StepMeasurement:
        calls.append(recipe.model.ops.attention)
        if recipe.model.ops.attention == "reference":
            raise Z2aError("out of memory")
        return StepMeasurement("wall", 3.0, [2.0, 1.0, 9.0], peak_bytes=10, loss=1.0)

    monkeypatch.setattr("zero2all.bench.ops.measure_in_process", sometimes)
    report = bench_ops(tiny(), rounds=2, steps=3)
    naive, fused = report.rows[:2]
    assert isinstance(naive, FailedOpsRow)
    assert (naive.name, naive.failed) == ("naive", "out of memory")
    assert isinstance(fused, OpsRow)
    assert (fused.name, fused.seconds_per_step, fused.turns) == ("all fused", 2.0, [2.0, 2.0])
    assert not any(row.compile for row in report.rows)  # as training on a CPU
    as_json = to_json(report)
    assert list(as_json["rows"][0]) == ["table", "name", "compile", "ops", "options", "failed"]
    assert "ops" not in as_json["model"]
    assert calls.count("reference") == 2  # naive and "all but attention", tried once each
    assert "| naive | failed: out of memory |" in ops_markdown(report)


@pytest.mark.slow
def test_a_row_runs_in_a_process_of_its_own() -> None:
    measured = measure_in_process(tiny(), steps=2, options=StepOptions(plain_adamw=True, layout="SBHE"), timeout=280)
    assert len(measured.seconds) == 2
    assert measured.peak_bytes > 0


def test_a_process_that_dies_reports_its_last_line_of_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho 'RuntimeError: out of memory' >&2\necho >&2\nexit 1\n")
    dying.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(dying))
    with pytest.raises(Z2aError, match=r"^RuntimeError: out of memory$"):
        measure_in_process(tiny(), steps=1, options=StepOptions(), timeout=60)


def test_peak_memory_holds_weights_states_gradients_and_activations() -> None:
    step = BenchStep(tiny())
    step.run()
    weights = sum(parameter.numel() for parameter in step.model.parameters())
    small = step.peak_bytes()
    assert small > 4 * 4 * weights
    large = BenchStep(tiny("train.batch_tokens=8192", "train.micro_batch_tokens=8192"))
    large.run()
    assert large.peak_bytes() > 5 * small
