"""Replicas of in-memory states on other nodes: what survives the loss of a node."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zero2all.base.console import warn
from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.base.errors import Z2aError
from zero2all.base.network.addresses import source_address_towards
from zero2all.base.network.connection import Address
from zero2all.base.units import show_bytes
from zero2all.checkpoint.flash import Slot
from zero2all.checkpoint.rank_group import RankGroup
from zero2all.checkpoint.replica_sender import RateLimit, ReplicaSender
from zero2all.checkpoint.replica_server import ReplicaRequest, ReplicaServer, ReplicaSlots, fetch_state
from zero2all.checkpoint.slot_directories import rank_directory, register_rank_directory
from zero2all.checkpoint.slot_format import padded_bytes
from zero2all.checkpoint.training_state import SentReplica

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ReplicaOptions:
    """The number of replicas of in-memory checkpoints on other nodes, and the rate at which they are sent."""

    copies: int
    """Number of other nodes that each keep one replica."""
    bytes_per_second: int | None = None
    """The most that a node sends; its ranks share it."""


@dataclass(frozen=True)
class _Room:
    """Memory for replicas."""

    sizes: dict[int, int]
    """Bytes of each state that this rank holds, by the rank that saves it."""
    largest_node: int
    """Bytes needed on the node that needs most."""


class Replicas:
    """Replicas of this rank's states on other nodes, and of other ranks' states here. Create it with ``connect``."""

    def __init__(
        self,
        options: ReplicaOptions,
        flash_directory: Path,
        rank_group: RankGroup,
        nodes: list[int],
        server: ReplicaServer,
        addresses: list[Address],
        secret: bytes,
    ) -> None:
        self.nodes = nodes
        """The node of each rank."""
        self._options, self._flash_directory, self._rank_group = options, flash_directory, rank_group
        self._server, self._addresses, self._secret = server, addresses, secret
        self._holders = plan_replicas(nodes, options.copies)
        self._sender: ReplicaSender | None = None

    @classmethod
    def connect(cls, options: ReplicaOptions, flash_directory: Path, rank_group: RankGroup) -> Replicas | None:
        """Connect all ranks. None if all are on one node, where a replica would be lost with the original."""
        if rank_group.world_size == 1:
            return None
        secret = os.environ.get(JOB_SECRET_VARIABLE, "").encode()

        def identify() -> tuple[str, bool]:
            flash_directory.parent.mkdir(parents=True, exist_ok=True)
            return memory_id(flash_directory.parent), bool(secret)

        try:
            nodes, has_secrets = rank_group.gather(identify, _number_nodes)
        except (OSError, Z2aError):
            return None  # nothing is kept in memory there: a warning follows at the first save
        if max(nodes) == 0:
            return None
        if not has_secrets:
            warn(
                f"no replicas of in-memory checkpoints: {JOB_SECRET_VARIABLE}, which authenticates the nodes, is not "
                "set on every node ('z2a launch' sets it)"
            )
            return None
        servers: list[ReplicaServer] = []
        try:
            rank_group.on_all_ranks(lambda: servers.append(ReplicaServer(_own_address(), secret, flash_directory)))
        except (OSError, Z2aError) as error:
            for server in servers:
                server.close()
            warn(f"no replicas of in-memory checkpoints: {error}")
            return None
        addresses = rank_group.gather(lambda: servers[0].address, list)  # a restore may copy from any of them
        return cls(options, flash_directory, rank_group, nodes, servers[0], addresses, secret)

    @property
    def copies(self) -> int:
        """The number of replicas of each state, on other nodes."""
        return len(self._holders[self._rank_group.rank])

    def register(self, history: str) -> None:
        """Keep the replicas that this rank holds; others are stale."""
        for rank in self._held_ranks():
            register_rank_directory(self._directory(rank), history)

    def open(self, state_bytes: int, on_sent: Callable[[SentReplica], None]) -> None:
        """Allocate memory for replicas, or turn them off. Called on all ranks, with the bytes of this rank's state."""
        rank, world_size = self._rank_group.rank, self._rank_group.world_size
        room = self._rank_group.scatter(lambda: padded_bytes(state_bytes), self._plan_room)
        held: dict[tuple[int, int], ReplicaSlots] = {}

        def allocate() -> None:
            for other, size in room.sizes.items():
                held[other, world_size] = ReplicaSlots(self._directory(other), size)

        try:
            self._rank_group.on_all_ranks(allocate)
        except (OSError, Z2aError) as error:
            held.clear()
            for other in self._held_ranks():
                shutil.rmtree(self._directory(other), ignore_errors=True)
            warn(
                f"not enough space for replicas of in-memory checkpoints in {self._flash_directory.parent}: {error}; "
                "the states of this rank stay in memory, but the loss of a node costs the steps since the last durable "
                f"checkpoint. With replicas a node needs {show_bytes(room.largest_node)} there (checkpoint.replicas: 0 "
                "turns them off)"
            )
            return
        self._server.hold(held)
        holders = [self._addresses[holder] for holder in self._holders[rank]]
        ranks_here, rate = self.nodes.count(self.nodes[rank]), self._options.bytes_per_second
        limit = RateLimit(None if rate is None else rate / ranks_here)
        self._sender = ReplicaSender(rank, world_size, holders, self._secret, limit, on_sent)
        self._rank_group.on_all_ranks(lambda: None)  # every holder is ready

    def send(self, slot: Slot) -> None:
        """Send a committed state, in the background."""
        if self._sender is not None:
            self._sender.offer(slot)

    def fetch(self, holder: int, request: ReplicaRequest, size: int, *, own: bool) -> None:
        """Copy a state from another rank's node into this node's memory; ``own``: it is a state of this rank."""
        directory = rank_directory(self._flash_directory, request.rank, request.world_size, replica=not own)
        fetch_state(self._addresses[holder], self._secret, request, directory, size)

    def wait(self, timeout: float) -> bool:
        """Return whether every replica of this rank has arrived, or was given up."""
        return self._sender is None or self._sender.wait(timeout)

    def stop_sending(self) -> None:
        """Send no more. Once every rank has called it, all may ``close``: then no peer misses this one."""
        if self._sender is not None:
            self._sender.close()

    def close(self) -> None:
        self.stop_sending()
        self._server.close()

    def _plan_room(self, sizes: list[int]) -> list[_Room]:
        """The room for two slots of each state that a node keeps: from its own ranks, and replicas of others."""
        by_node = dict.fromkeys(self.nodes, 0)
        for rank, size in enumerate(sizes):
            for holder in (rank, *self._holders[rank]):
                by_node[self.nodes[holder]] += 2 * size
        rooms = [_Room({}, max(by_node.values())) for _ in sizes]
        for rank, holders in enumerate(self._holders):
            for holder in holders:
                rooms[holder].sizes[rank] = sizes[rank]
        return rooms

    def _held_ranks(self) -> list[int]:
        return [rank for rank, holders in enumerate(self._holders) if self._rank_group.rank in holders]

    def _directory(self, rank: int) -> Path:
        return rank_directory(self._flash_directory, rank, self._rank_group.world_size, replica=True)


def _number_nodes(identities: list[tuple[str, bool]]) -> tuple[list[int], bool]:
    """The node of each rank, and whether all have the secret."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in identities))}
    return [numbers[name] for name, _ in identities], all(has_secret for _, has_secret in identities)


def _own_address() -> str:
    """The address from which this node reaches the node of rank 0: other nodes reach it there."""
    if (master := os.environ.get("MASTER_ADDR")) is None:
        return LOOPBACK
    return source_address_towards(master)


def plan_replicas(node_of_rank: Sequence[Hashable], copies: int) -> list[tuple[int, ...]]:
    """The ranks that keep replicas of each rank's states, each on another node; none if there is one node.

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
