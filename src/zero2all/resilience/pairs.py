"""Which node or link is bad: nodes exchange data in pairs, and in other pairs, until each is cleared or named.

The pairs know nothing of each other, so one that cannot talk does not keep the others from it. Results travel through
the store, which every node reaches.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from zero2all.resilience.findings import Finding

BYTES, GPU_BYTES = 1 << 20, 1 << 26
REPEATS = 5  # of which the quickest counts: a busy machine is not a slow network
ROUNDS, MOST_ROUNDS = 2, 5
PATIENCE = 6.0  # seconds for a pair to do what takes milliseconds
ALL = 10 * PATIENCE  # for all of them: gloo tries five times to reach a partner
SLOW = 4.0  # times as long as the quickest pair
SLOW_AT_LEAST = 0.08  # seconds more, so that a busy machine is not taken for a slow link; one of 100 Mbit/s is
SKEW = 1.0  # seconds between two clocks


@dataclass(frozen=True)
class Talk:
    """What one of a pair saw of the other. ``seconds`` is None if nothing came through."""

    here: int
    there: int
    seconds: float | None
    skew: float = 0.0
    """How far the other's clock is ahead."""


def rounds_of(count: int) -> list[list[tuple[int, int]]]:
    """Every node meets every other once, in rounds in which all talk at the same time (a round-robin tournament)."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def least_rounds(count: int) -> int:
    """Two, so that everybody has two partners; of three nodes one may be in both pairs of those, so all three."""
    return ROUNDS if count > 3 else count


def talk_in_pairs(store: Store, number: int, count: int, device: torch.device) -> list[Talk]:
    """Two rounds, and more while some node is neither cleared nor named. Every node gets all results."""
    talks: list[Talk] = []
    for turn, pairs in enumerate(rounds_of(count)[:MOST_ROUNDS]):
        if turn >= least_rounds(count) and not undecided(talks, count):
            break
        mine = next((pair for pair in pairs if number in pair), None)
        own = [] if mine is None else [_talk(PrefixStore(f"pair/{turn}/{mine}", store), number, mine, device)]
        told = exchange(store, f"talks/{turn}", number, count, [asdict(talk) for talk in own])
        talks += [Talk(**talk) for found in told.values() for talk in found]
    return talks


def exchange(store: Store, name: str, number: int, count: int, value: Any) -> dict[int, Any]:
    """What each node has to say, by number; one that says nothing in time is left out."""
    store.set(f"{name}/{number}", json.dumps(value))
    deadline, found = time.monotonic() + ALL, {}
    for other in range(count):
        left = max(0.1, deadline - time.monotonic())
        try:
            store.wait([f"{name}/{other}"], timedelta(seconds=left))
        except RuntimeError:
            continue
        found[other] = json.loads(store.get(f"{name}/{other}"))
    return found


def _talk(store: Store, number: int, pair: tuple[int, int], device: torch.device) -> Talk:
    other = pair[0] if number == pair[1] else pair[1]
    try:
        rank = pair.index(number)
        group = _group(store, rank, device)
        _gather(group, torch.zeros(1, device=device))  # connections are made here
        clocks = _gather(group, torch.tensor([time.time()], dtype=torch.float64, device=device))
        size = bytes_for(device)
        data = torch.full((size // 4,), float(rank), device=device)
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            parts = _gather(group, data)
            times.append(time.perf_counter() - begin)
        if any(not bool((part == place).all()) for place, part in enumerate(parts)):
            return Talk(number, other, None)
        return Talk(number, other, min(times), float(clocks[1 - rank] - clocks[rank]))
    except RuntimeError:
        return Talk(number, other, None)


def bytes_for(device: torch.device) -> int:
    return GPU_BYTES if device.type == "cuda" else BYTES


def _group(store: Store, rank: int, device: torch.device) -> Any:
    if device.type == "cuda":
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=PATIENCE)
        return ProcessGroupNCCL(store, rank, 2, options)
    return ProcessGroupGloo(store, rank, 2, timedelta(seconds=PATIENCE))


def _gather(group: Any, mine: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(mine) for _ in range(2)]
    group.allgather([parts], [mine]).wait()
    if mine.is_cuda:
        torch.cuda.synchronize()
    return parts


def bad_pairs(talks: list[Talk]) -> dict[tuple[int, int], str]:
    """Pairs that could not talk, or only slowly, and how."""
    took: dict[tuple[int, int], list[float | None]] = {}
    for talk in talks:
        took.setdefault((min(talk.here, talk.there), max(talk.here, talk.there)), []).append(talk.seconds)
    whole = {pair: [seconds for seconds in found if seconds is not None] for pair, found in took.items()}
    quickest = min((max(known) for pair, known in whole.items() if len(known) == len(took[pair])), default=0.0)
    bad = {}
    for pair, known in whole.items():
        if len(known) < len(took[pair]):
            bad[pair] = "nothing comes through"
        elif max(known) > SLOW * quickest and max(known) > quickest + SLOW_AT_LEAST:
            bad[pair] = f"{max(known) / quickest:.0f} times as slow as others ({max(known):.2g} s for one exchange)"
    return bad


def cleared(talks: list[Talk]) -> set[int]:
    """Nodes that talked well with some other."""
    bad = bad_pairs(talks)
    pairs = {(min(talk.here, talk.there), max(talk.here, talk.there)) for talk in talks}
    return {number for pair in pairs if pair not in bad for number in pair}


def undecided(talks: list[Talk], count: int) -> set[int]:
    """Nodes that talked well with nobody, and with fewer than two that are cleared: the others may be to blame."""
    good, enough = cleared(talks), min(2, count - 1)
    met = {number: {talk.there for talk in talks if talk.here == number} for number in range(count)}
    return {number for number in range(count) if number not in good and len(met[number] & good) < enough}


def judge_talks(talks: list[Talk], names: dict[int, str], count: int) -> list[Finding]:
    """Which node or which link it is."""
    bad, good, unclear = bad_pairs(talks), cleared(talks), undecided(talks, count)
    findings = []
    for number in sorted({number for pair in bad for number in pair} - good - unclear):
        how = next(text for pair, text in bad.items() if number in pair and not good.isdisjoint(pair))
        findings.append(
            Finding(
                "bad",
                f"node {names[number]}",
                f"{how} between it and every other that it was paired with",
                "check its network card, cable and switch port; leave it out until then",
            )
        )
    for pair, how in bad.items():
        if set(pair) <= good:
            one, other = (names[number] for number in pair)
            text = f"{how}, and both are well with others"
            findings.append(Finding("bad", f"link {one} to {other}", text, "check the way between them"))
    for number in sorted(unclear):
        findings.append(
            Finding(
                "bad",
                f"node {names[number]}",
                "no good exchange with anybody, and too few good nodes to compare with",
                "it or its partners: check the network, and run again with more nodes",
            )
        )
    skewed = {talk.there: talk.skew for talk in talks if talk.seconds is not None and abs(talk.skew) > SKEW}
    findings += [
        Finding("bad", f"clock of {names[number]}", f"{skew:+.1f} s from another node's", "run chrony or ntpd on all")
        for number, skew in skewed.items()
        if number > 0
    ]
    if not findings:
        findings.append(Finding("good", "network", f"{count} nodes talk well with each other"))
    return findings
