from __future__ import annotations

import pytest
import torch

from zero2all.base.errors import UsageError
from zero2all.base.machine.devices import (
    compute_dtype,
    device_title,
    fp64_device,
    measure_matmul_flops,
    peak_flops,
    pick_device,
    pick_gpu,
    set_deterministic,
    synchronize,
)
from zero2all.base.machine.gpu_specs import lookup_gpu
from zero2all.train.throughput import peak_memory_bytes

CPU, MPS = torch.device("cpu"), torch.device("mps")


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
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_a_gpu_is_matched_by_the_words_of_its_name(device_name: str, sheet: str | None) -> None:
    gpu = lookup_gpu(device_name)
    assert (gpu.name if gpu else None) == sheet


def test_a_gpu_can_be_requested_that_is_not_installed() -> None:
    assert pick_gpu("h100").sms == 132
    with pytest.raises(UsageError, match="no data sheet of 'RTX 3090'; there are V100"):
        pick_gpu("RTX 3090")


def test_on_cpu_the_peak_is_measured_once_and_labelled() -> None:
    peak = peak_flops(CPU, torch.float32)
    assert peak.source.startswith("fp32 matrix products of 2048 measured here")
    assert peak.flops > 1e8
    assert peak_flops(CPU, torch.float32) is peak


def test_products_are_small_where_the_cpu_has_no_kernel_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 2048 in fp16 takes a minute on such a CPU."""
    monkeypatch.setattr("zero2all.base.machine.devices.time_matmul", lambda left, right, out: 1e-8 * left.shape[0] ** 3)
    peak = peak_flops.__wrapped__(CPU, torch.float16)
    assert peak.source.startswith("fp16 matrix products of 256 measured here")
    assert peak.flops == pytest.approx(2e8)


@pytest.mark.parametrize(("share", "is_said"), [(None, False), (0.1, False), (0.45, True)])
def test_a_peak_that_was_measured_on_a_busy_machine_says_so(
    monkeypatch: pytest.MonkeyPatch, share: float | None, is_said: bool
) -> None:
    monkeypatch.setattr("zero2all.base.machine.devices.measure_matmul_flops", lambda *args: 1e11)
    monkeypatch.setattr("zero2all.base.machine.cpus.OtherCpuUse.share", lambda self: share)
    note = " while other programs used 45% of the CPU, so MFU and HFU are too high" if is_said else ""
    source = peak_flops.__wrapped__(CPU, torch.float32).source
    assert source == f"fp32 matrix products of 2048 measured here{note}"


def test_a_known_gpu_has_the_peak_of_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A800-SXM4-80GB")
    peak = peak_flops.__wrapped__(torch.device("cuda"), torch.bfloat16)
    assert (peak.flops, peak.source) == (312e12, "data sheet of A800")


def test_measured_flops_count_a_multiply_and_an_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.base.machine.devices.time_matmul", lambda left, right, out: 0.5)
    assert measure_matmul_flops(CPU, torch.float32, 64, seconds=0.0) == 2 * 64**3 / 0.5


@pytest.mark.parametrize("native", [True, False])
def test_bf16_where_it_is_requested_or_native(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs without it compute in fp16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": native})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert compute_dtype("bf16", CPU) == torch.bfloat16
    assert compute_dtype("fp32", CPU) == torch.float32
    assert compute_dtype("auto", CPU) == (torch.bfloat16 if native else torch.float32)
    assert compute_dtype("auto", torch.device("cuda")) == (torch.bfloat16 if native else torch.float16)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose torch sees the GPU of a Mac and no other."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M3")


@pytest.mark.usefixtures("mac")
def test_the_gpu_of_a_mac_is_used_only_if_it_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [pick_device(wanted).type for wanted in ("auto", "cpu", "mps")] == ["cpu", "cpu", "mps"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one process"):
        pick_device("mps")


def test_the_gpu_of_a_mac_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"no GPU of a Mac here; use train\.device=auto"):
        pick_device("mps")


def test_on_the_gpu_of_a_mac_fp32_is_the_default_and_fp64_is_computed_on_the_cpu() -> None:
    expected = {"auto": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert {precision: compute_dtype(precision, MPS) for precision in expected} == expected
    assert fp64_device(MPS) == CPU
    assert fp64_device(torch.device("cuda", 1)) == torch.device("cuda", 1)


def test_deterministic_is_refused_on_the_gpu_of_a_mac() -> None:
    with pytest.raises(UsageError, match=r"not possible on mps.*train\.device=cpu"):
        set_deterministic(on=True, wanted="mps")
    set_deterministic(on=False, wanted="mps")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("mac")
def test_the_gpu_of_a_mac_is_measured_with_its_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append(True))
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3 << 30)
    monkeypatch.setattr("zero2all.base.machine.devices.measure_matmul_flops", lambda device, dtype, size: size)
    synchronize(CPU)
    synchronize(MPS)
    assert waited == [True]
    assert device_title(MPS) == "Apple M3"
    assert peak_memory_bytes(MPS) == 3 << 30
    assert peak_flops.__wrapped__(MPS, torch.float32).source == "fp32 matrix products of 4096 measured here"


def test_products_of_fp32_are_not_rounded_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment had set before a device is chosen, as containers for GPUs do."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert torch.backends.cuda.matmul.allow_tf32
        assert pick_device("cuda").type == "cuda"
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cuda.matmul.fp32_precision in ("ieee", "none")
    finally:
        torch.set_float32_matmul_precision(before)
