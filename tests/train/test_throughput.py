from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero2all.model.cost.flops import flops_per_token, palm_flops_per_token
from zero2all.model.cost.model_size import count_parameters
from zero2all.recipe import ModelConfig
from zero2all.train.throughput import ThroughputMeter


def meter(device: str) -> ThroughputMeter:
    """Of a plan with ten steps of one sample."""
    stage = SimpleNamespace(recipe=SimpleNamespace(seq_len=32), sample_range=lambda step: (step, step + 1))
    plan: Any = SimpleNamespace(stage_of=lambda step: stage, total_steps=10, tokens_before=lambda step: 32 * step)
    made = ThroughputMeter(plan, ModelConfig(vocab_size=320), torch.device(device), peak_flops=1e12)
    made.update(0, 0.0)
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
