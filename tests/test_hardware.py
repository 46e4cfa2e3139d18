from __future__ import annotations

import pytest
import torch

from zero2all.errors import UsageError
from zero2all.hardware import compute_dtype, lookup_gpu, measure_matmul_flops, peak_flops, pick_gpu

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device_name", "sheet"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200", "H200"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_gpu_is_matched_by_the_words_of_its_name(device_name: str, sheet: str | None) -> None:
    gpu = lookup_gpu(device_name)
    assert (gpu.name if gpu else None) == sheet


def test_a_gpu_can_be_requested_that_is_not_installed() -> None:
    assert pick_gpu("h100").sms == 132
    with pytest.raises(UsageError, match="no data sheet of 'RTX 4090'; there are V100"):
        pick_gpu("RTX 4090")


def test_on_cpu_the_peak_is_measured_once_and_labelled() -> None:
    peak = peak_flops(CPU, torch.float32)
    assert peak.source.startswith("fp32 matrix products of 2048 measured here")
    assert peak.flops > 1e8
    assert peak_flops(CPU, torch.float32) is peak


@pytest.mark.parametrize(("share", "is_said"), [(None, False), (0.1, False), (0.45, True)])
def test_a_peak_that_was_measured_on_a_busy_machine_says_so(
    monkeypatch: pytest.MonkeyPatch, share: float | None, is_said: bool
) -> None:
    monkeypatch.setattr("zero2all.hardware.measure_matmul_flops", lambda *args: 1e11)
    monkeypatch.setattr("zero2all.cpu_use.OtherCpuUse.share", lambda self: share)
    note = " while other programs used 45% of the CPU, so MFU and HFU are too high" if is_said else ""
    source = peak_flops.__wrapped__(CPU, torch.float32).source
    assert source == f"fp32 matrix products of 2048 measured here{note}"


def test_a_known_gpu_has_the_peak_of_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A800-SXM4-80GB")
    peak = peak_flops.__wrapped__(torch.device("cuda"), torch.bfloat16)
    assert (peak.flops, peak.source) == (312e12, "data sheet of A800")


def test_measured_flops_count_a_multiply_and_an_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.hardware.time_matmul", lambda left, right, out: 0.5)
    assert measure_matmul_flops(CPU, torch.float32, 64, seconds=0.0) == 2 * 64**3 / 0.5


def test_bf16_where_it_is_requested_or_native(monkeypatch: pytest.MonkeyPatch) -> None:
    for native in (True, False):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda native=native: {"amx_tile": native})
        assert compute_dtype("bf16", CPU) == torch.bfloat16
        assert compute_dtype("fp32", CPU) == torch.float32
        assert compute_dtype("auto", CPU) == (torch.bfloat16 if native else torch.float32)


def test_gpus_without_bf16_compute_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    for native in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, native=native: native)
        assert compute_dtype("auto", torch.device("cuda")) == (torch.bfloat16 if native else torch.float16)
