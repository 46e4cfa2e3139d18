"""Make ``src/zero2all/sandbox/system_calls.tsv``: every system call of a Linux kernel, and what it takes of identities.

``python -m tests.sandbox.make_system_calls x86_64.json aarch64.json``

The arguments are kernel builds as https://github.com/mebeim/systrack prints them (``systrack --format json``).
https://github.com/mebeim/linux-syscalls keeps its output for every release. A new kernel: make the table again, and
``tests/sandbox/test_system_calls.py`` names the system calls that need a rule.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def read_table(path: Path) -> dict[str, str]:
    """Two columns, and comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines if not line.startswith("#"))


TABLE = Path(__file__).parents[2] / "src/zero2all/sandbox/system_calls.tsv"
_TYPE = re.compile(r"^(const )?(pid_t|uid_t|gid_t|qid_t|key_serial_t)\b")
_NAME = re.compile(r"\b(u?pid|pid[12]|tgid|tid|pgid|pidfd|who)$")

HIDDEN = read_table(Path(__file__).with_name("hidden_identities.tsv"))


def identities(name: str, arguments: list[str]) -> str:
    """What a system call takes of processes, users and groups; empty: nothing."""
    seen = [one for one in arguments if _TYPE.search(one) or _NAME.search(one)]
    return ", ".join(seen) or HIDDEN.get(name, "")


def rows(x86_64: Path, aarch64: Path) -> list[tuple[str, str, str, str, str]]:
    """Name, the two numbers, the arguments, the identities among them."""
    numbers: dict[str, dict[str, int]] = {}
    arguments: dict[str, list[str]] = {}
    for machine, path in (("x86_64", x86_64), ("aarch64", aarch64)):
        for call in json.loads(path.read_text(encoding="utf-8"))["syscalls"]:
            numbers.setdefault(call["name"], {})[machine] = call["number"]
            arguments.setdefault(call["name"], call["signature"])
    return [
        (
            name,
            str(numbers[name].get("x86_64", "-")),
            str(numbers[name].get("aarch64", "-")),
            "; ".join(arguments[name]) or "-",
            identities(name, arguments[name]) or "-",
        )
        for name in sorted(numbers)
    ]


def main() -> None:
    lines = [("name", "x86_64", "aarch64", "arguments", "identities"), *rows(Path(sys.argv[1]), Path(sys.argv[2]))]
    TABLE.write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
