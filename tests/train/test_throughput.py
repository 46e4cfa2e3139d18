from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero2all.base.console import set_verbose
from zero2all.base.machine.devices import PeakFlops, measure_peak_again, peak_at_least
from zero2all.model.cost.flops import flops_per_token, palm_flops_per_token
from zero2all.model.cost.model_size import count_parameters
from zero2all.recipe import ModelConfig
from zero2all.train.throughput import FlopsCount, ThroughputMeter

SHEET = PeakFlops(1e12, "a data sheet")


def meter(device: str, peak: PeakFlops = SHEET) -> ThroughputMeter:
    """Of a plan with ten steps of one sample."""
    stage = SimpleNamespace(recipe=SimpleNamespace(seq_len=32), sample_range=lambda step: (step, step + 1))
    plan: Any = SimpleNamespace(stage_of=lambda step: stage, total_steps=10, tokens_before=lambda step: 32 * step)
    made = ThroughputMeter(plan, FlopsCount(ModelConfig(vocab_size=320)), torch.device(device), peak, torch.float32)
    made.update(0, 0.0)
    made.tokens_per_second = 1e4
    return made


@pytest.fixture
def verbose() -> Iterator[None]:
    set_verbose(on=True)
    yield
    set_verbose(on=False)


def said(meter: ThroughputMeter, step: int, capsys: pytest.CaptureFixture[str], **metrics: float) -> list[str]:
    """The log lines of a step."""
    capsys.readouterr()
    meter.say_step(step, {"loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, **metrics, **meter.metrics(step)})
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(("share", "is_said"), [(0.45, True), (0.1, False), (None, False)])
@pytest.mark.usefixtures("verbose")
def test_verbose_says_that_the_machine_was_busy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], share: float | None, is_said: bool
) -> None:
    monkeypatch.setattr("zero2all.base.machine.cpus.OtherCpuUse.share", lambda self: share)
    on_cpu, on_gpu = meter("cpu"), meter("meta")
    monkeypatch.setattr("zero2all.train.throughput.peak_memory_bytes", lambda device: 1000)
    assert said(on_cpu, 0, capsys)[-1].endswith("  other programs used 45% of the CPU") == is_said
    assert "other programs" not in said(on_gpu, 0, capsys)[-1]


def test_sources_have_a_line_of_their_own_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    on_cpu = meter("cpu")
    by_source = {"loss/en": 1.5, "loss/zh": 0.5}
    lines = [said(on_cpu, step, capsys, **by_source) for step in range(10)]
    assert lines[0][1] == "  loss by source:  en 1.500  zh 0.500"
    assert [len(one) for one in lines] == [2, *[1] * 8, 2]  # the last step of the run has it too
    set_verbose(on=True)
    try:
        lines = [said(on_cpu, step, capsys, **by_source) for step in range(3)]
    finally:
        set_verbose(on=False)
    assert [len(one) for one in lines] == [3, 3, 3]


def test_rewards_are_logged_with_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    on_cpu = meter("cpu")
    for step in range(3):
        assert said(on_cpu, step, capsys, reward=0.25)[1] == "  reward 0.250"


def test_tflops_are_of_one_device_and_both_utilizations_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.base.machine.cpus.OtherCpuUse.share", lambda self: None)
    one, four = meter("cpu"), meter("cpu")
    four.world_size = 4
    one.tokens_per_second, four.tokens_per_second = 1e4, 4e4
    config, measured = one.flops.config, one.metrics(0)
    assert measured["tflops"] == pytest.approx(1e4 * flops_per_token(config, 32).model / 1e12, abs=1e-4)
    palm = palm_flops_per_token(config, count_parameters(config).active, 32)
    assert measured["mfu_palm"] == pytest.approx(1e4 * palm / 1e12, abs=1e-4)
    assert measured["mfu_palm"] > measured["mfu"] > 0
    names = ("tflops", "mfu", "mfu_palm", "hfu")
    assert [four.metrics(0)[name] for name in names] == [measured[name] for name in names]


def measured(flops: float, busy: bool = False) -> PeakFlops:
    return PeakFlops(flops, "matrix products", is_measured=True, was_busy=busy)


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[PeakFlops]:
    """What further measurements of the peak give; each takes a minute."""
    found: list[PeakFlops] = []
    minutes = iter(range(1000))
    monkeypatch.setattr("zero2all.base.machine.devices.peak_flops", lambda device, dtype: found.pop(0))
    monkeypatch.setattr("zero2all.base.machine.devices.peak_flops.cache_clear", lambda: None, raising=False)
    monkeypatch.setattr("zero2all.train.throughput.time.monotonic", lambda: 60.0 * next(minutes))
    monkeypatch.setattr("zero2all.base.machine.cpus.OtherCpuUse.share", lambda self: 0.0)
    return found


@pytest.mark.usefixtures("verbose")
def test_utilization_never_exceeds_100_percent(peaks: list[PeakFlops], capsys: pytest.CaptureFixture[str]) -> None:
    slow = meter("cpu", measured(1e9))
    slow.tokens_per_second = 1e5  # many times that peak
    peaks += [measured(5e8), measured(1e13)]  # still busy, then quiet
    slow.check_peak(0)
    assert not {"mfu", "mfu_palm", "hfu"} & set(slow.metrics(0))
    line, details = said(slow, 0, capsys)
    assert "MFU" not in line
    assert details.split("  ")[1].endswith("TFLOP/s")
    assert not re.search("MFU|HFU", details)
    slow.check_peak(1)
    assert slow.peak.flops == 1e13
    assert 0 < slow.metrics(1)["mfu"] <= slow.metrics(1)["mfu_palm"] <= 1
    line, details = said(slow, 1, capsys)
    assert "  MFU " in line
    assert re.search(r"  PaLM MFU \S+%  HFU \S+%", details)


def test_a_peak_of_a_busy_machine_is_measured_again_when_it_is_quiet(peaks: list[PeakFlops]) -> None:
    busy = meter("cpu", measured(1e12, busy=True))
    busy.tokens_per_second = 1e4
    peaks.append(measured(3e12))
    busy.check_peak(0)
    assert busy.peak.flops == 1e12  # nobody knows yet whether it is quiet
    busy.say_step(0, {})
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
