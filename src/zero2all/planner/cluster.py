"""The GPUs of a run and the links between them: how long a collective takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero2all.base.machine.gpu_specs import Gpu
from zero2all.parallel.gradient_sync import Collective, sent_bytes

LINK_EFFICIENCY = 0.8  # of the nominal bandwidth: what NCCL's tests report for large messages
NODE_LATENCY, NETWORK_LATENCY = 3e-6, 1e-5  # seconds of one hop, inside a node and between nodes
PCIE_BANDWIDTH = 25e9  # bytes per second between a GPU and the memory of its host, PCIe 4 x16


@dataclass(frozen=True)
class Cluster:
    """``gpus`` GPUs of one kind, in nodes of ``gpus_per_node``."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int
    network_bandwidth: float
    """Bytes per second that one GPU sends to other nodes."""

    @classmethod
    def of(
        cls, gpu: Gpu, gpus: int, network_bandwidth: float | None = None, gpus_per_node: int | None = None
    ) -> Cluster:
        per_node = min(gpus, gpus_per_node or gpu.gpus_per_node)
        return cls(gpu, gpus, per_node, network_bandwidth or gpu.network_bandwidth)

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    def group(self, size: int, stride: int) -> CommunicationGroup:
        """``size`` ranks, each ``stride`` after the one before, as a dimension of the mesh has them."""
        in_node = size if size * stride <= self.gpus_per_node else max(1, self.gpus_per_node // stride)
        link = self.gpu.link_bandwidth
        if in_node == size:
            bandwidth = link * LINK_EFFICIENCY
            return CommunicationGroup(size, self.gpu.link, bandwidth, NODE_LATENCY, size, bandwidth)
        # Every GPU of the group in a node has a network card of its own, and NCCL uses all of them.
        network = min(link, in_node * self.network_bandwidth)
        card = min(link, self.network_bandwidth)
        return CommunicationGroup(
            size, "network", network * LINK_EFFICIENCY, NETWORK_LATENCY, in_node, card * LINK_EFFICIENCY
        )


@dataclass(frozen=True)
class CommunicationGroup:
    """Ranks that communicate, and the slowest link between them."""

    size: int
    link: str
    bandwidth: float
    """Bytes per second that a rank sends in a ring or a tree, whose share of a node uses all its network cards."""
    latency: float
    in_node: int
    """Ranks of the group in one node."""
    card: float
    """Bytes per second that a rank sends by itself: between nodes through its own network card."""

    def seconds(self, collective: Collective, size: float) -> float:
        """``size`` is the bytes of the full tensor: gathered, reduced, or sent by one rank. NCCL takes the faster of
        ring and tree for an all-reduce."""
        if self.size == 1 or not size:
            return 0.0
        if collective == "all-reduce":
            return min(self.ring_seconds(size, 2), self.tree_seconds(size))
        if collective == "send":
            return self.latency + size / self.card
        if collective == "all-to-all":  # every rank has data of its own for each other rank
            outside = size * (self.size - self.in_node) / self.size / self.card
            inside = size * (self.in_node - 1) / self.size / self.bandwidth
            return (self.size - 1) * self.latency + max(outside, inside)
        return self.ring_seconds(size, 1)

    def ring_seconds(self, size: float, rounds: int) -> float:
        """Every rank sends (p - 1) / p of the tensor in a round of p - 1 hops; an all-reduce has two rounds."""
        return rounds * (self.size - 1) * (self.latency + size / self.size / self.bandwidth)

    def tree_seconds(self, size: float) -> float:
        """An all-reduce up and down two binary trees: log2 p hops instead of p, and the full tensor over each link."""
        return 2 * (math.ceil(math.log2(self.size)) * self.latency + size / self.bandwidth)

    def sent_bytes(self, collective: Collective, size: float) -> float:
        """What one rank sends."""
        return sent_bytes(collective, size, self.size)
