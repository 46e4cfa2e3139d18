"""Which node or link is bad: nodes exchange data in changing pairs, until each node is healthy or identified as bad.

Pairs are independent process groups, so a broken pair does not block the others. Results go through the store, which
every node reaches.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch

from zero2all.doctor.pairs import (
    MAX_ROUNDS,
    PAIR_TIMEOUT,
    PairMeasurement,
    min_rounds,
    round_robin_rounds,
    undecided_nodes,
)
from zero2all.environment import collective_backend
from zero2all.torch_private import PrefixStore, Store, gloo_group, nccl_group

CPU_PROBE_BYTES, GPU_PROBE_BYTES = 1 << 20, 1 << 26
REPEATS = 5  # of which the fastest counts: a busy machine is not a slow network
TOTAL_TIMEOUT = 10 * PAIR_TIMEOUT  # for all of them: gloo tries five times to reach a partner


def measure_pairs(store: Store, number: int, count: int, device: torch.device) -> list[PairMeasurement]:
    """Two rounds, and more while some node is undecided. Every node gets all results."""
    measurements: list[PairMeasurement] = []
    for turn, pairs in enumerate(round_robin_rounds(count, MAX_ROUNDS)):
        if turn >= min_rounds(count) and not undecided_nodes(measurements, count):
            break
        mine = next((pair for pair in pairs if number in pair), None)
        own = [] if mine is None else [measure_pair(PrefixStore(f"pair/{turn}/{mine}", store), number, mine, device)]
        results = exchange_through_store(
            store, f"talks/{turn}", number, count, [asdict(measurement) for measurement in own]
        )
        measurements += [PairMeasurement(**measurement) for found in results.values() for measurement in found]
    return measurements


def exchange_through_store(store: Store, name: str, number: int, count: int, value: Any) -> dict[int, Any]:
    """What each node has to say, by number; one that says nothing in time is left out."""
    store.set(f"{name}/{number}", json.dumps(value))
    deadline, found = time.monotonic() + TOTAL_TIMEOUT, {}
    for other in range(count):
        left = max(0.1, deadline - time.monotonic())
        try:
            store.wait([f"{name}/{other}"], timedelta(seconds=left))
        except RuntimeError:
            continue
        found[other] = json.loads(store.get(f"{name}/{other}"))
    return found


def measure_pair(store: Store, number: int, pair: tuple[int, int], device: torch.device) -> PairMeasurement:
    other = pair[0] if number == pair[1] else pair[1]
    try:
        rank = pair.index(number)
        group = _group(store, rank, device)
        _gather(group, torch.zeros(1, device=device))  # connects
        clocks = _gather(group, torch.tensor([time.time()], dtype=torch.float64, device=device))
        size = probe_bytes(device)
        data = torch.full((size // 4,), float(rank), device=device)
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            parts = _gather(group, data)
            times.append(time.perf_counter() - begin)
        if any(not bool((part == place).all()) for place, part in enumerate(parts)):
            return PairMeasurement(number, other, None)
        return PairMeasurement(number, other, min(times), float(clocks[1 - rank] - clocks[rank]))
    except RuntimeError:
        return PairMeasurement(number, other, None)


def probe_bytes(device: torch.device) -> int:
    return GPU_PROBE_BYTES if device.type == "cuda" else CPU_PROBE_BYTES


def _group(store: Store, rank: int, device: torch.device) -> Any:
    new_group = nccl_group if collective_backend(device.type).endswith("nccl") else gloo_group
    return new_group(store, rank, 2, timedelta(seconds=PAIR_TIMEOUT))


def _gather(group: Any, mine: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(mine) for _ in range(2)]
    group.allgather([parts], [mine]).wait()
    if mine.is_cuda:
        torch.cuda.synchronize()
    return parts
