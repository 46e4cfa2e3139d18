"""GPUs, network cards and NUMA nodes, from recorded matrices of nvidia-smi and a made-up /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sysfs import FakeSysfs
from zero2all.cluster.doctor.topology import (
    Placement,
    SmiTopology,
    Topology,
    check_topology,
    parse_topo_matrix,
    read_topology,
    topology_findings,
)

A800, RTX4090, H100 = (
    (Path(__file__).parent / "nvidia_smi" / f"{name}.txt").read_text() for name in ("a800", "rtx4090", "h100")
)
LEFT, RIGHT = "pci0000:15/0000:15:01.0/0000:16:00.0", "pci0000:97/0000:97:01.0/0000:98:00.0"  # ports of two switches


def _two_sockets(root: Path) -> tuple[FakeSysfs, list[str]]:
    fake = FakeSysfs(root, {0: "0-3", 1: "4-7"})
    addresses = [fake.add_device(f"{LEFT}/0000:17:00.0/0000:18:00.0", 0)]
    addresses += [fake.add_device(f"{RIGHT}/0000:99:00.0/0000:9a:00.0", 1)]
    return fake, addresses


def _levels(topology: Topology, allowed: range = range(8), peers: bool = True) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"good": [], "note": [], "bad": []}
    for one in topology_findings(Placement(topology, frozenset(allowed), lambda a, b: peers)):
        found[one.level].append(str(one))
    return found


def test_matrices_of_nvidia_smi_are_read_with_the_names_of_network_cards() -> None:
    nvlinks, paths, cards = map(parse_topo_matrix, (A800, RTX4090, H100))
    assert (len(nvlinks), set(nvlinks.values())) == (56, {"NV8"})
    assert (paths["GPU0", "GPU1"], paths["GPU1", "GPU2"], len(paths)) == ("PHB", "SYS", 12)
    assert (cards["GPU0", "mlx5_0"], cards["GPU1", "mlx5_0"], cards["GPU0", "mlx5_bond_0"]) == ("PIX", "SYS", "NODE")
    assert cards["mlx5_4", "GPU1"] == "PIX"


@pytest.mark.parametrize("text", ["", "GPU0", "GPU0 GPU1\nGPU0", "no devices were found", "GPU0\nGPU0 X\n\x00"])
def test_a_matrix_that_is_none_has_no_links(text: str) -> None:
    assert parse_topo_matrix(text) == {}


def test_gpus_are_numbered_as_cuda_sees_them() -> None:
    smi = SmiTopology(RTX4090, [f"0000:0{at}:00.0" for at in range(1, 5)])
    visible = ["0000:03:00.0", "0000:04:00.0", "0000:01:00.0"]  # CUDA_VISIBLE_DEVICES=2,3,0
    links = smi.links(visible)
    assert (links["GPU0", "GPU1"], links["GPU0", "GPU2"]) == ("PHB", "SYS")
    assert not any("GPU3" in pair for pair in links)


def test_sysfs_alone_gives_the_paths_of_pcie(tmp_path: Path) -> None:
    fake, addresses = _two_sockets(tmp_path)
    fake.add_nic("mlx5_0", f"{LEFT}/0000:17:01.0/0000:19:00.0", 0)
    fake.add_nic("mlx5_4", f"{RIGHT}/0000:99:01.0/0000:9b:00.0", 1)
    topology = read_topology(addresses, None, tmp_path)
    assert topology.links["GPU0", "mlx5_0"] == "PIX"
    assert topology.links["GPU0", "GPU1"] == topology.links["GPU0", "mlx5_4"] == "SYS"
    assert [gpu.numa_node for gpu in topology.gpus] == [0, 1]
    found = _levels(topology)
    assert any("GPU 1" in line and "nearest network card mlx5_4 through one PCIe switch" in line
               for line in found["good"])  # fmt: skip
    assert any("NUMA node 1: CPUs 4-7" in line and "distance 21 to node 0" in line for line in found["good"])
    assert [line for line in found["note"] if "cross the link between CPU sockets" in line]


def test_nvlink_of_nvidia_smi_goes_before_sysfs(tmp_path: Path) -> None:
    _, addresses = _two_sockets(tmp_path)
    topology = read_topology(addresses, SmiTopology(H100, addresses), tmp_path)
    assert topology.gpu_pairs() == [(0, 1, "NV18")]
    assert not _levels(topology)["note"]


def test_what_is_wrong_is_said_with_a_fix(tmp_path: Path) -> None:
    fake, addresses = _two_sockets(tmp_path)
    addresses.append(fake.add_device("pci0000:b0/0000:b0:01.0/0000:b1:00.0", -1))
    fake.add_nic("mlx5_0", f"{LEFT}/0000:17:01.0/0000:19:00.0", 0, state="1: DOWN")
    fake.enable_acs(f"{LEFT}/0000:17:00.0", 0b11101)
    fake.enable_acs(f"{RIGHT}/0000:99:00.0", 0b00001)  # source validation alone redirects nothing
    notes = "\n".join(_levels(read_topology(addresses, None, tmp_path), range(4), peers=False)["note"])
    for part in (
        "GPU 1: 0000:9a:00.0, NUMA node 1, but this process may only use CPUs 0-3 of another",
        "GPU 2: 0000:b1:00.0: the firmware does not say",
        "peer access: missing for 3 pairs of GPUs (0-1, 0-2, 1-2)",
        "ACS: sends traffic between PCIe devices through the CPU at 0000:17:00.0\n",
        "network card mlx5_0: InfiniBand 400 Gb/sec (4X NDR), NUMA node 0, DOWN",
        "GPU 1: reaches every network card only through the link between CPU sockets",
    ):
        assert part in notes, notes


def test_this_machine_has_a_node() -> None:
    assert all(finding.level != "bad" for finding in check_topology())
