"""Which rank keeps a replica of which rank's states: always one on another node."""

from __future__ import annotations

import socket
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path


def plan_replicas(node_of_rank: Sequence[Hashable], copies: int) -> list[tuple[int, ...]]:
    """For each rank, the ranks that keep a replica of its states, each on another node; none if there is one node.

    Replica k of a rank on node n is on node n + k, at the same local index, modulo the ranks of that node.

    >>> plan_replicas("AABB", copies=1)
    [(2,), (3,), (0,), (1,)]
    """
    members: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(node_of_rank):
        members.setdefault(node, []).append(rank)
    nodes = list(members.values())
    holders: list[tuple[int, ...]] = [()] * len(node_of_rank)
    for number, ranks in enumerate(nodes):
        others = [nodes[(number + copy) % len(nodes)] for copy in range(1, min(copies, len(nodes) - 1) + 1)]
        for index, rank in enumerate(ranks):
            holders[rank] = tuple(other[index % len(other)] for other in others)
    return holders


def memory_id(place: Path) -> str:
    """Identifies the memory behind ``place``: ranks that share it are one node, and are lost together.

    Not the host name: containers with different names may share a tmpfs, and simulated nodes of one machine do not.
    """
    machine = socket.gethostname()
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{machine}-{place.stat().st_dev}"
