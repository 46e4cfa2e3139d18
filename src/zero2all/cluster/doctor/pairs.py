"""What exchanges between pairs of nodes say about each node. Pure decisions, for programs that do not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.base.findings import Finding

MIN_ROUNDS, MAX_ROUNDS = 2, 5
PAIR_TIMEOUT = 6.0  # seconds for a pair to do what takes milliseconds
SLOW_FACTOR = 4.0  # times as long as the quickest pair
MIN_SLOW_SECONDS = 0.08  # seconds more, so that a busy machine is not taken for a slow link; one of 100 Mbit/s is
MAX_CLOCK_SKEW = 1.0  # seconds between two clocks


@dataclass(frozen=True)
class DeviceCheck:
    """Result of one device for a matrix product that is the same on all devices."""

    device: str
    seconds: float
    digest: str
    steady: bool
    """Whether it computed the same bits every time."""


@dataclass(frozen=True)
class PairMeasurement:
    """What one node of a pair measured. ``seconds`` is None if the exchange failed."""

    here: int
    there: int
    seconds: float | None
    skew: float = 0.0
    """How far the clock of the other is ahead."""

    @property
    def pair(self) -> tuple[int, int]:
        return min(self.here, self.there), max(self.here, self.there)


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
    """Every node has two partners in two rounds; three nodes need three, since one may be in both pairs."""
    return MIN_ROUNDS if count > 3 else count


def bad_pairs(measurements: list[PairMeasurement]) -> dict[tuple[int, int], str]:
    """Pairs whose exchange failed or was slow, and how."""
    took: dict[tuple[int, int], list[float | None]] = {}
    for measurement in measurements:
        took.setdefault(measurement.pair, []).append(measurement.seconds)
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
    pairs = {measurement.pair for measurement in measurements}
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
        why = "no good exchange with anybody, and too few good nodes to compare with"
        remedy = "it or its partners: check the network, and run again with more nodes"
        findings.append(Finding("bad", f"node {names[number]}", why, remedy))
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
