"""Failure reports, one file for programs and one for people: ``RUN/failures/<time>.json`` and ``.txt``; and the logs of
ranks that they quote, whose size is limited.

The agent of every node writes a node report; at the next round, or the end of the job, one agent combines them.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from zero2all.base.errors import Z2aError
from zero2all.base.io import HISTORY_FILE, read_json, read_record, write_record, write_text
from zero2all.base.records import RestoreSummary, parse_record
from zero2all.base.units import show_seconds
from zero2all.cluster.launch.exit_reason import FailureKind
from zero2all.cluster.launch.hang_detection import HangCulprit, HungRank, find_hang_culprits
from zero2all.cluster.launch.worker import SCRIPT_MODULE

HEAD_BYTES, TAIL_BYTES = 1 << 20, 4 << 20  # bytes that are kept
MAX_LOG_BYTES = 16 << 20
_READ = 256 << 10  # bytes read from the end
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log; empty if there is no such file."""
    try:
        with open(log, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _READ))
            text = stream.read(_READ)
    except OSError:
        return []
    return text.decode("utf-8", errors="replace").splitlines()[-count:]


def trim_log(log: Path) -> bool:
    """Punch a hole into the middle of a log that has grown too large.

    The rank that has it open continues at its offset, so the file cannot be truncated or replaced; head and tail stay
    where they are. False if there was nothing to do, or if the file system cannot do it.
    """
    try:
        with open(log, "r+b") as stream:
            status = os.fstat(stream.fileno())
            if status.st_blocks * 512 <= MAX_LOG_BYTES:
                return False
            fallocate = ctypes.CDLL(None, use_errno=True).fallocate
            fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
            length = status.st_size - TAIL_BYTES - HEAD_BYTES
            return bool(fallocate(stream.fileno(), _PUNCH_HOLE_KEEP_SIZE, HEAD_BYTES, length) == 0)
    except (OSError, AttributeError):
        return False


LOG_LINES = 20
_NODE_REPORTS = ".accounts"
_SECONDARY_KINDS = ("cut off", "ended by the agent", "stopped")


@dataclass(frozen=True)
class RankFailure:
    """How one rank exited."""

    rank: int
    node: str
    pid: int
    status: int
    kind: FailureKind
    words: str
    time: float
    step: int
    message: str = ""
    traceback: str = ""
    log: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class NodeReport:
    """What the agent of one node observed."""

    node: str
    nodes: int
    """Number of nodes in the round."""
    time: float
    """When it was detected."""
    kind: FailureKind
    step: int
    """Steps done when it happened; -1 if none."""
    since: float
    """Seconds from the last heartbeat of any rank to detection."""
    decision: str
    """What the agent does about it."""
    command: list[str]
    deaths: list[RankFailure] = field(default_factory=list)
    stuck: list[HungRank] = field(default_factory=list)
    gpu_faults: list[str] = field(default_factory=list)
    excluded: str | None = None
    """Why this node leaves the job, if so."""


@dataclass(frozen=True)
class RecoveryCost:
    """Seconds from the last step before a failure to the first step after it, by phase."""

    detect: float
    tear_down: float
    back_off: float
    rendezvous: float
    start: float
    join: float
    load: float
    first_step: float
    steps_again: int
    """Steps that had to be recomputed."""

    def __str__(self) -> str:
        parts: dict[str, float] = {name: value for name, value in asdict(self).items() if name != "steps_again"}
        itemised = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in parts.items())
        return f"{sum(parts.values()):.1f} s ({itemised}) and {self.steps_again} steps recomputed"


@dataclass(frozen=True)
class FailureReport:
    """``RUN/failures/<time>.json``: the node reports of one failure, combined."""

    time: float
    kind: FailureKind
    step: int
    nodes: int
    nodes_heard: list[str]
    first: RankFailure | None
    """The failure that the others follow from."""
    odd: list[HangCulprit]
    seen_after: float
    decision: str
    command: list[str]
    gpu_faults: list[str]
    excluded: list[str]
    """Nodes that leave the job because of it, and why."""
    ranks: list[RankFailure]
    stuck: list[HungRank]


@dataclass(frozen=True)
class RecoveredFailureReport(FailureReport):
    """The same once the job makes steps again."""

    restored: RestoreSummary | None
    cost: RecoveryCost
    cost_in_words: str


def write_node_report(run: Path, node_report: NodeReport) -> None:
    name = f"{node_report.time:.3f}-{node_report.node}-{os.getpid()}.json"
    write_record(run / "failures" / _NODE_REPORTS / name, node_report)


def write_failure_report(run: Path) -> Path | None:
    """Combine the pending node reports; None if there are none, or another agent was faster."""
    pending, claimed = run / "failures" / _NODE_REPORTS, run / "failures" / f".claimed-{secrets.token_hex(4)}"
    try:
        pending.rename(claimed)
    except OSError:
        return None
    reports = [read_record(NodeReport, path) for path in sorted(claimed.glob("*.json"))]
    if not reports:
        return None
    stamp = datetime.fromtimestamp(reports[0].time, UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
    path = run / "failures" / f"{stamp}.json"
    _write(path, combine_node_reports(reports))
    shutil.rmtree(claimed, ignore_errors=True)
    return path


def add_recovery_cost(path: Path, cost: RecoveryCost) -> None:
    """Add the cost, and which state was restored and why, which the ranks have written to the run directory."""
    restored: RestoreSummary | None = None
    with suppress(OSError, Z2aError):
        found = read_json(path.parents[1] / HISTORY_FILE).get("restored")
        restored = None if found is None else parse_record(RestoreSummary, found, HISTORY_FILE)
    report = read_record(FailureReport, path)
    _write(path, RecoveredFailureReport(**vars(report), restored=restored, cost=cost, cost_in_words=str(cost)))


def combine_node_reports(node_reports: list[NodeReport]) -> FailureReport:
    """The node reports of one failure: what failed first, then the details of each rank."""
    rank_failures = sorted(
        (failure for report in node_reports for failure in report.deaths), key=lambda failure: failure.time
    )
    stuck = sorted((one for report in node_reports for one in report.stuck), key=lambda one: one.rank)
    causes = [failure for failure in rank_failures if failure.kind not in _SECONDARY_KINDS] or rank_failures
    culprits = find_hang_culprits(stuck, heard_all=len(node_reports) >= node_reports[0].nodes)
    kinds = [report.kind for report in node_reports]
    kind = next((known for known in kinds if known not in _SECONDARY_KINDS), kinds[0])
    if kind == "hang" and kinds[0] == "cut off" and not culprits:
        kind = "cut off"  # the node that was lost waits for the others
    return FailureReport(
        time=node_reports[0].time,
        kind=kind,
        step=max(report.step for report in node_reports),
        nodes=node_reports[0].nodes,
        nodes_heard=sorted({report.node for report in node_reports}),
        first=causes[0] if causes else None,
        odd=culprits,
        seen_after=min(report.since for report in node_reports),
        decision=node_reports[0].decision,
        command=node_reports[0].command,
        gpu_faults=sorted({fault for report in node_reports for fault in report.gpu_faults}),
        excluded=[report.excluded for report in node_reports if report.excluded is not None],
        ranks=rank_failures,
        stuck=stuck,
    )


def render_text(report: FailureReport) -> str:
    """The report for a person."""
    when = datetime.fromtimestamp(report.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    where = f" after step {report.step}" if report.step >= 0 else " before the first step"
    if report.step < 0 and SCRIPT_MODULE in report.command:
        where = ""  # a script need not tell its steps
    lines = [f"{report.kind}{where}, {when}"]
    missing = report.nodes - len(report.nodes_heard)
    if missing > 0:
        lines.append(f"  {missing} of {report.nodes} nodes sent no report: their agents are gone")
    if report.stuck and report.kind == "hang":
        lines += _hang_lines(report)
    elif report.first is not None:
        lines += _failure_lines(report.first, report.ranks)
    lines += [f"  GPU {fault}" for fault in report.gpu_faults]
    lines += [f"  excluded: {node}" for node in report.excluded]
    lines.append(f"  {report.decision}")
    if isinstance(report, RecoveredFailureReport):
        if report.restored is not None:
            lines.append(f"  restored {report.restored.reason}")
            lines += [f"    {line}" for line in report.restored.rejected[:8]]
        lines.append(f"  recovery took {report.cost_in_words}")
    return "\n".join(lines)


def _hang_lines(report: FailureReport) -> list[str]:
    lines = [f"  no progress for {show_seconds(report.seen_after)}; where the ranks are:"]
    odd = {culprit.rank for culprit in report.odd}
    for one in report.stuck:
        last = f"; last collective {one.collective}" if one.collective else ""
        device = f"; its GPU is in {one.device}" if one.device is not None else ""
        lines.append(f"  {'>' if one.rank in odd else ' '} rank {one.rank}: {one.line}{last}{device}")
    lines += [f"  rank {culprit.rank} {culprit.why}" for culprit in report.odd]
    if not odd:
        lines.append("  all ranks wait in the same place: check the network between the nodes, or ranks of other nodes")
    return lines


def _failure_lines(first: RankFailure, failures: list[RankFailure]) -> list[str]:
    lines = [f"  first to fail: rank {first.rank} on {first.node} (pid {first.pid}): {first.words}"]
    lines += [f"    {line}" for line in first.traceback.strip().splitlines()[-12:]]
    if first.message and not first.traceback:
        lines.append(f"    {first.message}")
    if first.log:
        lines.append("  its last log lines:")
        lines += [f"    {line}" for line in first.log[-8:]]
    others = [failure for failure in failures if failure.rank != first.rank]
    lines += [f"  rank {failure.rank} on {failure.node}: {failure.words}" for failure in others[:8]]
    if len(others) > 8:
        lines.append(f"  and {len(others) - 8} more")
    return lines


def _write(path: Path, report: FailureReport) -> None:
    write_record(path, report)
    write_text(path.with_suffix(".txt"), render_text(report) + "\n")
