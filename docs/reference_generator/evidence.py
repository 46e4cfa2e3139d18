"""The tables of docs/evidence: measurements and parity from the JSON files there, faults from tests/chaos.

A page and its numbers cannot differ. Change a number in docs/evidence/*.json, with the commit, the machine and the
command that gave it, and run ``python docs/generate_reference.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.chaos.fault import Fault
from tests.chaos.faults import FAULTS, MULTI_NODE_FAULTS, SINGLE_NODE_FAULTS
from tests.chaos.membership_faults import MEMBERSHIP_FAULTS
from tests.chaos.outage_faults import OUTAGE_FAULTS
from tests.chaos.random_histories import RANDOM_HISTORIES

from reference_generator.markdown import code, table

EVIDENCE = Path(__file__).parents[1] / "evidence"
MEASUREMENTS = ("data", "model", "training", "parallel", "resilience")
FAULT_GROUPS = (
    ("Ranks, checkpoints and data on one node", "单节点：rank、checkpoint 与数据", SINGLE_NODE_FAULTS),
    ("Outages of storage, memory and disks", "存储、内存和磁盘故障", OUTAGE_FAULTS),
    ("Nodes and the rendezvous", "节点与 rendezvous", MULTI_NODE_FAULTS),
    ("Bad nodes and spares", "坏节点与备用节点", MEMBERSHIP_FAULTS),
    ("Random histories", "随机历史", RANDOM_HISTORIES),
)
FAULT_COLUMNS = {
    False: ["fault", "failure report", "log", "detected s", "recovered s", "steps again"],
    True: ["故障", "故障报告", "日志", "发现（秒）", "恢复（秒）", "重做的步"],
}
PARITY_WORDS = {
    "layout": "并行策略", "ranks": "rank 数", "loss": "loss", "gradients": "梯度", "tied": "词嵌入共享",
    "Muon in fp32": "Muon，fp32", "balance loss": "均衡 loss", "windows": "滑动窗口", "equal": "一致",
    "yes": "是", "yes, but not dropout": "是，dropout 除外",
}  # fmt: skip


def load(name: str) -> Any:
    return json.loads((EVIDENCE / f"{name}.json").read_text(encoding="utf-8"))


def in_language(value: str | dict[str, str], chinese: bool) -> str:
    return value if isinstance(value, str) else value["zh" if chinese else "en"]


def measurements(name: str, chinese: bool) -> str:
    """A section for each measurement: what was measured, its table, the command, the machine and the commit."""
    return "\n\n".join(["", *(_measurement(one, chinese) for one in load(f"benchmarks-{name}")), ""])


def _measurement(one: dict[str, Any], chinese: bool) -> str:
    heads = [in_language(cell, chinese) for cell in one.get("columns", [])]
    rows = ([in_language(cell, chinese) for cell in row] for row in one.get("rows", []))
    parts = [f"## {in_language(one['title'], chinese)}", in_language(one["what"], chinese), plain_table(heads, rows)]
    return "\n\n".join(filter(None, [*parts, _source(one, chinese)]))


def plain_table(heads: list[str], rows: Iterable[list[str]]) -> str:
    """Cells are Markdown already, with their bars escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) if heads else ""


def _source(one: dict[str, Any], chinese: bool) -> str:
    """The command, and in parentheses the machine and the commit."""
    where = f"（{one['machine']}，`{one['commit']}`）" if chinese else f" ({one['machine']}, `{one['commit']}`)"
    if len(one["command"]) == 1:
        return f"`{one['command'][0]}`{where}"
    where = where.strip()
    if not one["command"]:  # each row has its own
        return where
    return f"{code(chr(10).join(one['command']))}\n\n{where}"


def fault_tables(text: str, chinese: bool) -> str:
    """Every fault of the suite by group: what reports it, and the times that were measured."""
    measured = {row[0]: row[1:] for row in load("faults")["rows"]}
    if unknown := sorted(set(measured) - {fault.name for fault in FAULTS}):
        raise ValueError(f"docs/evidence/faults.json has times of faults that do not exist: {', '.join(unknown)}")
    if left_out := {fault.name for fault in FAULTS} - {one.name for *_, group in FAULT_GROUPS for one in group}:
        raise ValueError(f"in no group: {', '.join(sorted(left_out))}")
    parts = [""]
    for english, other, faults in FAULT_GROUPS:
        rows = [_fault_row(fault, measured.get(fault.name, ["-"] * 3), chinese) for fault in faults]
        parts += [f"## {other if chinese else english}", table(FAULT_COLUMNS[chinese], rows)]
    return "\n\n".join([*parts, ""])


def _fault_row(fault: Fault, measured: list[str], chinese: bool) -> list[str]:
    kind = fault.expected_kind or ("无" if chinese else "none")
    messages = ", ".join(f"`{message}`" for message in fault.expected_messages)
    return [fault.name, kind, messages, *measured]


def parity_tables(text: str, chinese: bool) -> str:
    """A section for each group of layouts that was measured together."""
    parts = [""]
    for group in load("parity"):
        words = PARITY_WORDS if chinese else {}
        rows = [[words.get(cell, cell) for cell in row] for row in group["rows"]]
        heads = [words.get(head, head) for head in group["columns"]]
        parts += [f"## {in_language(group['title'], chinese)}", plain_table(heads, rows), _source(group, chinese)]
    return "\n\n".join([*parts, ""])
