"""Failure reports, one file for programs and one for people: ``RUN/failures/<time>.json`` and ``.txt``.

The agent of every node writes a node report; at the next round, or the end of the job, one agent combines them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zero2all.elastic.exit_reason import FailureKind
from zero2all.elastic.hang_detection import HungRank, find_hang_culprits
from zero2all.errors import Z2aError
from zero2all.io import HISTORY_FILE, read_json, write_json, write_text
from zero2all.units import show_seconds

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


def write_node_report(run: Path, node_report: NodeReport) -> None:
    name = f"{node_report.time:.3f}-{node_report.node}-{os.getpid()}.json"
    write_json(run / "failures" / _NODE_REPORTS / name, asdict(node_report))


def write_failure_report(run: Path) -> Path | None:
    """Combine the pending node reports; None if there are none, or another agent was faster."""
    pending, claimed = run / "failures" / _NODE_REPORTS, run / "failures" / f".claimed-{secrets.token_hex(4)}"
    try:
        pending.rename(claimed)
    except OSError:
        return None
    reports = [_read_node_report(path) for path in sorted(claimed.glob("*.json"))]
    if not reports:
        return None
    stamp = datetime.fromtimestamp(reports[0].time, UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
    path = run / "failures" / f"{stamp}.json"
    _write(path, combine_node_reports(reports))
    shutil.rmtree(claimed, ignore_errors=True)
    return path


def add_recovery_cost(path: Path, cost: RecoveryCost) -> None:
    """Add the cost, and which state was restored and why, which the ranks have written to the run directory."""
    restored: dict[str, Any] | None = None
    with suppress(OSError, Z2aError):
        restored = read_json(path.parents[1] / HISTORY_FILE).get("restored")
    report = {**json.loads(path.read_text(encoding="utf-8")), "restored": restored}
    _write(path, {**report, "cost": asdict(cost), "cost_in_words": str(cost)})


def combine_node_reports(node_reports: list[NodeReport]) -> dict[str, Any]:
    """The node reports of one failure: what failed first, then the details of each rank."""
    rank_failures = sorted(
        (failure for report in node_reports for failure in report.deaths), key=lambda failure: failure.time
    )
    stuck = sorted((one for report in node_reports for one in report.stuck), key=lambda one: one.rank)
    causes = [failure for failure in rank_failures if failure.kind not in _SECONDARY_KINDS] or rank_failures
    culprits = [(one, why) for one, why in find_hang_culprits(stuck)]
    kinds = [report.kind for report in node_reports]
    kind = next((known for known in kinds if known not in _SECONDARY_KINDS), kinds[0])
    return {
        "time": node_reports[0].time,
        "kind": kind,
        "step": max(report.step for report in node_reports),
        "nodes": node_reports[0].nodes,
        "nodes_heard": sorted({report.node for report in node_reports}),
        "first": asdict(causes[0]) if causes else None,
        "odd": [{"rank": one.rank, "why": why, "line": one.line} for one, why in culprits],
        "seen_after": min(report.since for report in node_reports),
        "decision": node_reports[0].decision,
        "command": node_reports[0].command,
        "gpu_faults": sorted({fault for report in node_reports for fault in report.gpu_faults}),
        "ranks": [asdict(failure) for failure in rank_failures],
        "stuck": [asdict(one) for one in stuck],
    }


def render_text(report: dict[str, Any]) -> str:
    """The report for a person."""
    when = datetime.fromtimestamp(report["time"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    where = f"after step {report['step']}" if report["step"] >= 0 else "before the first step"
    lines = [f"{report['kind']} {where}, {when}"]
    missing = report["nodes"] - len(report["nodes_heard"])
    if missing > 0:
        lines.append(f"  {missing} of {report['nodes']} nodes sent no report: their agents are gone")
    first = report["first"]
    if report["stuck"]:
        lines.append(f"  no progress for {show_seconds(report['seen_after'])}; where the ranks are:")
        odd = {entry["rank"]: entry["why"] for entry in report["odd"]}
        for one in report["stuck"]:
            last = f"; last collective {one['collective']}" if one["collective"] else ""
            lines.append(f"  {'>' if one['rank'] in odd else ' '} rank {one['rank']}: {one['line']}{last}")
        lines += [f"  rank {entry['rank']} {entry['why']}" for entry in report["odd"]]
        if not odd:
            lines.append(
                "  all ranks wait in the same place: check the network between the nodes, or ranks of other nodes"
            )
    elif first is not None:
        lines.append(f"  first to fail: rank {first['rank']} on {first['node']} (pid {first['pid']}): {first['words']}")
        lines += [f"    {line}" for line in first["traceback"].strip().splitlines()[-12:]]
        if first["message"] and not first["traceback"]:
            lines.append(f"    {first['message']}")
        if first["log"]:
            lines.append("  its last log lines:")
            lines += [f"    {line}" for line in first["log"][-8:]]
        others = [entry for entry in report["ranks"] if entry["rank"] != first["rank"]]
        lines += [f"  rank {entry['rank']} on {entry['node']}: {entry['words']}" for entry in others[:8]]
        if len(others) > 8:
            lines.append(f"  and {len(others) - 8} more")
    lines += [f"  GPU {fault}" for fault in report["gpu_faults"]]
    lines.append(f"  {report['decision']}")
    if (restored := report.get("restored")) is not None:
        lines.append(f"  restored {restored['reason']}")
        lines += [f"    {line}" for line in restored["rejected"][:8]]
    if "cost_in_words" in report:
        lines.append(f"  recovery took {report['cost_in_words']}")
    return "\n".join(lines)


def _write(path: Path, report: dict[str, Any]) -> None:
    write_json(path, report)
    write_text(path.with_suffix(".txt"), render_text(report) + "\n")


def _read_node_report(path: Path) -> NodeReport:
    values = json.loads(path.read_text(encoding="utf-8"))
    deaths = [RankFailure(**failure) for failure in values.pop("deaths")]
    stuck = [HungRank(**one) for one in values.pop("stuck")]
    return NodeReport(**values, deaths=deaths, stuck=stuck)
