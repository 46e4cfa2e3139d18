from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero2all.hardware import PeakFlops, measure_peak_again, peak_at_least
from zero2all.model.cost.flops import flops_per_token, palm_flops_per_token
from zero2all.model.cost.model_size import count_parameters
from zero2all.recipe import ModelConfig
from zero2all.train.throughput import ThroughputMeter

SHEET = PeakFlops(1e12, "a data sheet")


def meter(device: str, peak: PeakFlops = SHEET) -> ThroughputMeter:
    """Of a plan with ten steps of one sample."""
    stage = SimpleNamespace(recipe=SimpleNamespace(seq_len=32), sample_range=lambda step: (step, step + 1))
    plan: Any = SimpleNamespace(stage_of=lambda step: stage, total_steps=10, tokens_before=lambda step: 32 * step)
    made = ThroughputMeter(plan, ModelConfig(vocab_size=320), torch.device(device), peak, torch.float32)
    made.update(0, 0.0)
    made.tokens_per_second = 1e4
    return made


@pytest.mark.parametrize(("share", "note"), [(0.45, " (other programs used 45% of the CPU)"), (0.1, ""), (None, "")])
def test_the_log_line_says_that_the_machine_was_busy(
    monkeypatch: pytest.MonkeyPatch, share: float | None, note: str
) -> None:
    monkeypatch.setattr("zero2all.cpu_use.OtherCpuUse.share", lambda self: share)
    on_cpu, on_gpu = meter("cpu"), meter("meta")
    monkeypatch.setattr("zero2all.train.throughput.peak_memory_bytes", lambda device: 1000)
    [part] = [part for part in on_cpu.step_line(0, 1.0, 1e-3, 1.0, {}).split("  ") if part.startswith("MFU")]
    assert part.endswith(f"%{note}")
    assert "other programs" not in on_gpu.step_line(0, 1.0, 1e-3, 1.0, {})


def test_tflops_are_of_one_device_and_both_utilizations_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.cpu_use.OtherCpuUse.share", lambda self: None)
    one, four = meter("cpu"), meter("cpu")
    four.world_size = 4
    one.tokens_per_second, four.tokens_per_second = 1e4, 4e4
    config, measured = one.config, one.metrics(0)
    assert measured["tflops"] == pytest.approx(1e4 * flops_per_token(config, 32).model / 1e12, abs=1e-4)
    palm = palm_flops_per_token(config, count_parameters(config).active, 32)
    assert measured["mfu_palm"] == pytest.approx(1e4 * palm / 1e12, abs=1e-4)
    assert measured["mfu_palm"] > measured["mfu"] > 0
    names = ("tflops", "mfu", "mfu_palm", "hfu")
    assert [four.metrics(0)[name] for name in names] == [measured[name] for name in names]
    line = one.step_line(0, 1.0, 1e-3, 1.0, {})
    assert f"{measured['tflops']:.3g} TFLOP/s  MFU {100 * measured['mfu']:.1f}% (PaLM" in line


def measured(flops: float, busy: bool = False) -> PeakFlops:
    return PeakFlops(flops, "matrix products", is_measured=True, was_busy=busy)


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[PeakFlops]:
    """What further measurements of the peak give; each takes a minute."""
    found: list[PeakFlops] = []
    minutes = iter(range(1000))
    monkeypatch.setattr("zero2all.hardware.peak_flops", lambda device, dtype: found.pop(0))
    monkeypatch.setattr("zero2all.hardware.peak_flops.cache_clear", lambda: None, raising=False)
    monkeypatch.setattr("zero2all.train.throughput.time.monotonic", lambda: 60.0 * next(minutes))
    monkeypatch.setattr("zero2all.cpu_use.OtherCpuUse.share", lambda self: 0.0)
    return found


def test_utilization_never_exceeds_100_percent(peaks: list[PeakFlops]) -> None:
    slow = meter("cpu", measured(1e9))
    slow.tokens_per_second = 1e5  # many times that peak
    peaks += [measured(5e8), measured(1e13)]  # still busy, then quiet
    slow.check_peak(0)
    assert not {"mfu", "mfu_palm", "hfu"} & set(slow.metrics(0))
    line = slow.step_line(0, 1.0, 1e-3, 1.0, {})
    assert "TFLOP/s" in line
    assert "%" not in line.split("TFLOP/s")[1].split("wait")[0]
    slow.check_peak(1)
    assert slow.peak.flops == 1e13
    assert 0 < slow.metrics(1)["mfu"] <= slow.metrics(1)["mfu_palm"] <= 1
    assert "MFU" in slow.step_line(1, 1.0, 1e-3, 1.0, {})


def test_a_peak_of_a_busy_machine_is_measured_again_when_it_is_quiet(peaks: list[PeakFlops]) -> None:
    busy = meter("cpu", measured(1e12, busy=True))
    busy.tokens_per_second = 1e4
    peaks.append(measured(3e12))
    busy.check_peak(0)
    assert busy.peak.flops == 1e12  # nobody knows yet whether it is quiet
    busy.step_line(0, 1.0, 1e-3, 1.0, {})
    busy.check_peak(1)
    assert busy.peak.flops == 3e12
    for step in range(2, 9):
        busy.check_peak(step)  # the list of measurements is empty: another would fail


def test_a_data_sheet_is_not_measured_and_a_second_look_takes_the_higher_peak(peaks: list[PeakFlops]) -> None:
    device, sheet = torch.device("cpu"), PeakFlops(1e9, "data sheet")
    assert measure_peak_again(sheet, device, torch.float32) is sheet
    peaks += [measured(5.0), measured(20.0), measured(20.0)]
    assert measure_peak_again(measured(10.0), device, torch.float32).flops == 10.0
    assert peak_at_least(15.0, measured(10.0), device, torch.float32).flops == 20.0
    assert peak_at_least(50.0, measured(10.0), device, torch.float32).flops == 50.0
    assert peak_at_least(5.0, sheet, device, torch.float32) is sheet


def test_reserved_memory_is_recorded_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "memory_reserved" not in meter("cpu").metrics(0)
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda device: 7_000_000)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: 5_000_000)
    metrics = meter("cuda").metrics(0)
    assert (metrics["memory"], metrics["memory_reserved"]) == (5_000_000, 7_000_000)
