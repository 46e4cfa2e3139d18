from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
