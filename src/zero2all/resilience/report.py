"""What went wrong, in one file and one screenful: ``RUN/failures/<time>.json`` and ``.txt``.

Every node's agent leaves its own account; when the nodes meet again, or the job ends, one agent makes a report of them.
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

from zero2all.errors import Z2aError
from zero2all.io import read_json, write_json, write_text
from zero2all.resilience.exits import Kind
from zero2all.resilience.hang import Stuck, odd_ones
from zero2all.resilience.lineage import HISTORY
from zero2all.units import show_seconds

LOG_LINES = 20
_ACCOUNTS = ".accounts"
_NOT_THE_CAUSE = ("cut off", "ended by the agent", "stopped")


@dataclass(frozen=True)
class Death:
    """How one rank ended."""

    rank: int
    node: str
    pid: int
    status: int
    kind: Kind
    words: str
    time: float
    step: int
    message: str = ""
    traceback: str = ""
    log: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Account:
    """What the agent of one node saw."""

    node: str
    nodes: int
    """How many nodes there were."""
    time: float
    """When it was seen."""
    kind: Kind
    step: int
    """Steps done when it happened; -1 if none."""
    since: float
    """Seconds between the last sign of life of any rank and the failure being seen."""
    decision: str
    """What is done about it."""
    command: list[str]
    deaths: list[Death] = field(default_factory=list)
    stuck: list[Stuck] = field(default_factory=list)
    gpu_faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Cost:
    """Seconds from the last step before a failure to the first step after it, by what they went to."""

    detect: float
    tear_down: float
    back_off: float
    rendezvous: float
    start: float
    join: float
    load: float
    first_step: float
    steps_again: int
    """Steps that were done and had to be done again."""

    def __str__(self) -> str:
        parts: dict[str, float] = {name: value for name, value in asdict(self).items() if name != "steps_again"}
        itemised = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in parts.items())
        return f"{sum(parts.values()):.1f} s ({itemised}) and {self.steps_again} steps done again"


def leave_account(run: Path, account: Account) -> None:
    name = f"{account.time:.3f}-{account.node}-{os.getpid()}.json"
    write_json(run / "failures" / _ACCOUNTS / name, asdict(account))


def make_report(run: Path) -> Path | None:
    """One report of the accounts that are there; None if there is none, or another agent was quicker."""
    accounts, claimed = run / "failures" / _ACCOUNTS, run / "failures" / f".claimed-{secrets.token_hex(4)}"
    try:
        accounts.rename(claimed)
    except OSError:
        return None
    found = [_read_account(path) for path in sorted(claimed.glob("*.json"))]
    if not found:
        return None
    stamp = datetime.fromtimestamp(found[0].time, UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
    path = run / "failures" / f"{stamp}.json"
    _write(path, summarize(found))
    shutil.rmtree(claimed, ignore_errors=True)
    return path


def add_cost(path: Path, cost: Cost) -> None:
    """What it cost, and which state was restored and why, which the ranks have noted in the run directory."""
    restored: dict[str, Any] | None = None
    with suppress(OSError, Z2aError):
        restored = read_json(path.parents[1] / HISTORY).get("restored")
    report = {**json.loads(path.read_text(encoding="utf-8")), "restored": restored}
    _write(path, {**report, "cost": asdict(cost), "cost_in_words": str(cost)})


def summarize(accounts: list[Account]) -> dict[str, Any]:
    """The accounts of one failure put together: what failed first, then all that is known of each rank."""
    deaths = sorted((death for account in accounts for death in account.deaths), key=lambda death: death.time)
    stuck = sorted((one for account in accounts for one in account.stuck), key=lambda one: one.rank)
    causes = [death for death in deaths if death.kind not in _NOT_THE_CAUSE] or deaths
    odd = [(one, why) for one, why in odd_ones(stuck)]
    kinds = [account.kind for account in accounts]
    kind = next((known for known in kinds if known not in _NOT_THE_CAUSE), kinds[0])
    return {
        "time": accounts[0].time,
        "kind": kind,
        "step": max(account.step for account in accounts),
        "nodes": accounts[0].nodes,
        "nodes_heard": sorted({account.node for account in accounts}),
        "first": asdict(causes[0]) if causes else None,
        "odd": [{"rank": one.rank, "why": why, "line": one.line} for one, why in odd],
        "seen_after": min(account.since for account in accounts),
        "decision": accounts[0].decision,
        "command": accounts[0].command,
        "gpu_faults": sorted({fault for account in accounts for fault in account.gpu_faults}),
        "ranks": [asdict(death) for death in deaths],
        "stuck": [asdict(one) for one in stuck],
    }


def screenful(report: dict[str, Any]) -> str:
    """The report for a person."""
    when = datetime.fromtimestamp(report["time"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    where = f"after step {report['step']}" if report["step"] >= 0 else "before the first step"
    lines = [f"{report['kind']} {where}, {when}"]
    missing = report["nodes"] - len(report["nodes_heard"])
    if missing > 0:
        lines.append(f"  {missing} of {report['nodes']} nodes said nothing: their agents are gone")
    first = report["first"]
    if report["stuck"]:
        lines.append(f"  no progress for {show_seconds(report['seen_after'])}; where the ranks are:")
        odd = {entry["rank"]: entry["why"] for entry in report["odd"]}
        for one in report["stuck"]:
            last = f"; last collective {one['collective']}" if one["collective"] else ""
            lines.append(f"  {'>' if one['rank'] in odd else ' '} rank {one['rank']}: {one['line']}{last}")
        lines += [f"  rank {entry['rank']} {entry['why']}" for entry in report["odd"]]
        if not odd:
            lines.append("  all ranks wait alike: look at the network between the nodes, or at a rank of another node")
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
        lines.append(f"  it cost {report['cost_in_words']}")
    return "\n".join(lines)


def _write(path: Path, report: dict[str, Any]) -> None:
    write_json(path, report)
    write_text(path.with_suffix(".txt"), screenful(report) + "\n")


def _read_account(path: Path) -> Account:
    values = json.loads(path.read_text(encoding="utf-8"))
    deaths = [Death(**death) for death in values.pop("deaths")]
    stuck = [Stuck(**one) for one in values.pop("stuck")]
    return Account(**values, deaths=deaths, stuck=stuck)
