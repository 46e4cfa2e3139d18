"""Two machines on one: two network namespaces with a cable between them. Needs root and iproute2."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    namespace: str
    ip: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]

    def processes(self) -> dict[int, str]:
        """Everything that runs on it, by pid, with its title."""
        found = {}
        for pid in map(int, _ip("netns", "pids", self.namespace).split()):
            try:
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has just ended
        return found

    def kill_all(self) -> None:
        """Every process on it, by pid, until none is left."""
        while pids := list(self.processes()):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


def why_not() -> str | None:
    """Why no namespace can be made here, if so."""
    if shutil.which("ip") is None:
        return "needs the command ip: apt-get install iproute2"
    name = f"z2a-{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    name = f"z2a-{secrets.token_hex(4)}"
    machines = Machine(f"{name}-1", "10.77.0.1"), Machine(f"{name}-2", "10.77.0.2")
    try:
        for machine in machines:
            _ip("netns", "add", machine.namespace)
            _ip("-n", machine.namespace, "link", "set", "lo", "up")
        one, other = (machine.namespace for machine in machines)
        _ip(*f"link add cable netns {one} type veth peer name cable netns {other}".split())
        for machine in machines:
            _ip("-n", machine.namespace, "addr", "add", f"{machine.ip}/24", "dev", "cable")
            _ip("-n", machine.namespace, "link", "set", "cable", "up")
        yield machines
    finally:
        known = _ip("netns", "list")
        for machine in machines:
            if machine.namespace in known:
                machine.kill_all()
                _ip("netns", "del", machine.namespace)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30).stdout
