"""A made-up /sys: NUMA nodes, PCI devices below bridges, and InfiniBand cards."""

from __future__ import annotations

from pathlib import Path


class FakeSysfs:
    def __init__(self, root: Path, nodes: dict[int, str]) -> None:
        """``nodes``: the CPUs of each NUMA node, as 0-3."""
        self.root = root
        for node, cpus in nodes.items():
            place = self._directory(f"devices/system/node/node{node}")
            (place / "cpulist").write_text(f"{cpus}\n")
            (place / "distance").write_text(" ".join("10" if other == node else "21" for other in nodes) + "\n")
            (place / "meminfo").write_text(
                f"Node {node} MemTotal:       1048576 kB\nNode {node} MemFree:         524288 kB\n"
            )

    def _directory(self, path: str) -> Path:
        place = self.root / path
        place.mkdir(parents=True, exist_ok=True)
        return place

    def add_device(self, path: str, node: int) -> str:
        """``path``: bridges and device, as pci0000:00/0000:00:01.0/0000:17:00.0. The address of the device."""
        place = self._directory(f"devices/{path}")
        (place / "numa_node").write_text(f"{node}\n")
        link = self._directory("bus/pci/devices") / place.name
        link.symlink_to(place)
        return place.name

    def add_nic(self, name: str, path: str, node: int, state: str = "4: ACTIVE") -> None:
        self.add_device(path, node)
        place = self._directory(f"class/infiniband/{name}")
        (place / "device").symlink_to(self.root / "devices" / path)
        port = self._directory(f"class/infiniband/{name}/ports/1")
        for file, text in (("link_layer", "InfiniBand"), ("state", state), ("rate", "400 Gb/sec (4X NDR)")):
            (port / file).write_text(f"{text}\n")

    def share_cache(self, cpus: str, each: list[int]) -> None:
        for cpu in each:
            (self._directory(f"devices/system/cpu/cpu{cpu}/cache/index3") / "shared_cpu_list").write_text(f"{cpus}\n")

    def enable_acs(self, path: str, control: int) -> None:
        """ACS of a bridge, after one other extended capability."""
        config = bytearray(4096)
        config[0x100:0x104] = (0x0001 | 0x140 << 20).to_bytes(4, "little")
        config[0x140:0x144] = 0x000D.to_bytes(4, "little")
        config[0x146:0x148] = control.to_bytes(2, "little")
        (self._directory(f"devices/{path}") / "config").write_bytes(config)
