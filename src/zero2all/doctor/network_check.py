"""Which node or link is bad: nodes exchange data in changing pairs, until each node is healthy or identified as bad.

Pairs are independent process groups, so a broken pair does not block the others. Results go through the store, which
every node reaches.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch

from zero2all.doctor.findings import Finding
from zero2all.environment import collective_backend
from zero2all.torch_private import PrefixStore, Store, gloo_group, nccl_group

CPU_PROBE_BYTES, GPU_PROBE_BYTES = 1 << 20, 1 << 26
REPEATS = 5  # of which the fastest counts: a busy machine is not a slow network
MIN_ROUNDS, MAX_ROUNDS = 2, 5
PAIR_TIMEOUT = 6.0  # seconds for a pair to do what takes milliseconds
TOTAL_TIMEOUT = 10 * PAIR_TIMEOUT  # for all of them: gloo tries five times to reach a partner
SLOW_FACTOR = 4.0  # times as long as the quickest pair
MIN_SLOW_SECONDS = 0.08  # seconds more, so that a busy machine is not taken for a slow link; one of 100 Mbit/s is
MAX_CLOCK_SKEW = 1.0  # seconds between two clocks


@dataclass(frozen=True)
class PairMeasurement:
    """What one node of a pair measured. ``seconds`` is None if the exchange failed."""

    here: int
    there: int
    seconds: float | None
    skew: float = 0.0
    """How far the clock of the other is ahead."""


def round_robin_rounds(count: int, limit: int | None = None) -> list[list[tuple[int, int]]]:
    """Every node meets every other once, in rounds of concurrent pairs (a round-robin tournament); the first ``limit``
    of them."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1 if limit is None else min(limit, len(seats) - 1)):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def min_rounds(count: int) -> int:
    """Two, so that every node has two partners; with three nodes all three rounds, since one may be in both pairs."""
    return MIN_ROUNDS if count > 3 else count


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


def bad_pairs(measurements: list[PairMeasurement]) -> dict[tuple[int, int], str]:
    """Pairs whose exchange failed or was slow, and how."""
    took: dict[tuple[int, int], list[float | None]] = {}
    for measurement in measurements:
        took.setdefault(
            (min(measurement.here, measurement.there), max(measurement.here, measurement.there)), []
        ).append(measurement.seconds)
    known_seconds = {pair: [seconds for seconds in found if seconds is not None] for pair, found in took.items()}
    quickest = min((max(known) for pair, known in known_seconds.items() if len(known) == len(took[pair])), default=0.0)
    bad = {}
    for pair, known in known_seconds.items():
        if len(known) < len(took[pair]):
            bad[pair] = "nothing comes through"
        elif max(known) > SLOW_FACTOR * quickest and max(known) > quickest + MIN_SLOW_SECONDS:
            bad[pair] = f"{max(known) / quickest:.0f} times as slow as others ({max(known):.2g} s for one exchange)"
    return bad


def healthy_nodes(measurements: list[PairMeasurement]) -> set[int]:
    """Nodes with a good exchange with some other."""
    bad = bad_pairs(measurements)
    pairs = {
        (min(measurement.here, measurement.there), max(measurement.here, measurement.there))
        for measurement in measurements
    }
    return {number for pair in pairs if pair not in bad for number in pair}


def undecided_nodes(measurements: list[PairMeasurement], count: int) -> set[int]:
    """Nodes without a good exchange that met fewer than two healthy nodes: their partners may be the cause."""
    good, enough = healthy_nodes(measurements), min(2, count - 1)
    met = {
        number: {measurement.there for measurement in measurements if measurement.here == number}
        for number in range(count)
    }
    return {number for number in range(count) if number not in good and len(met[number] & good) < enough}


def bad_nodes(measurements: list[PairMeasurement], count: int) -> dict[int, str]:
    """Nodes without a good exchange although they met two healthy ones, and how their exchanges went."""
    bad, good = bad_pairs(measurements), healthy_nodes(measurements)
    numbers = {number for pair in bad for number in pair} - good - undecided_nodes(measurements, count)
    how = {
        number: next(text for pair, text in bad.items() if number in pair and not good.isdisjoint(pair))
        for number in sorted(numbers)
    }
    return {number: f"{text} between it and every other that it was paired with" for number, text in how.items()}


def diagnose_pairs(measurements: list[PairMeasurement], names: dict[int, str], count: int) -> list[Finding]:
    """Findings that name the bad node or link."""
    bad, good, unclear = bad_pairs(measurements), healthy_nodes(measurements), undecided_nodes(measurements, count)
    fix = "check its network card, cable and switch port; exclude it until then"
    findings = [
        Finding("bad", f"node {names[number]}", text, fix) for number, text in bad_nodes(measurements, count).items()
    ]
    for pair, how in bad.items():
        if set(pair) <= good:
            one, other = (names[number] for number in pair)
            text = f"{how}, and both are healthy with others"
            findings.append(Finding("bad", f"link {one} to {other}", text, "check the route between them"))
    for number in sorted(unclear):
        findings.append(
            Finding(
                "bad",
                f"node {names[number]}",
                "no good exchange with anybody, and too few good nodes to compare with",
                "it or its partners: check the network, and run again with more nodes",
            )
        )
    skewed = {
        measurement.there: measurement.skew
        for measurement in measurements
        if measurement.seconds is not None and abs(measurement.skew) > MAX_CLOCK_SKEW
    }
    findings += [
        Finding("bad", f"clock of {names[number]}", f"{skew:+.1f} s from another node's", "run chrony or ntpd on all")
        for number, skew in skewed.items()
        if number > 0
    ]
    if not findings:
        findings.append(Finding("good", "network", f"{count} nodes: every exchange succeeded"))
    return findings
