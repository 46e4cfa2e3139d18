"""Several machines on one: network namespaces with cables to a switch. Needs root and iproute2."""

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

    def pull_the_cable(self) -> None:
        _ip("-n", self.namespace, "link", "set", "cable", "down")

    def plug_the_cable(self) -> None:
        _ip("-n", self.namespace, "link", "set", "cable", "up")

    def lose_the_way_to(self, other: Machine) -> None:
        """As a broken route does: what is sent is never heard of again."""
        _ip("-n", self.namespace, "route", "add", "blackhole", f"{other.ip}/32")

    def shape(self, rate: str) -> None:
        """Let no more than ``rate`` (such as 1mbit) leave it."""
        words = f"qdisc replace dev cable root tbf rate {rate} burst 32kb latency 400ms".split()
        subprocess.run(["tc", "-n", self.namespace, *words], check=True, capture_output=True, timeout=30)

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
    with some_machines(2) as (one, other):
        yield one, other


@contextmanager
def some_machines(count: int) -> Iterator[list[Machine]]:
    """Each has a cable to one switch."""
    name = f"z2a-{secrets.token_hex(4)}"
    switch = f"{name}-switch"
    machines = [Machine(f"{name}-{number}", f"10.77.0.{number}") for number in range(1, count + 1)]
    try:
        _ip("netns", "add", switch)
        _ip(*f"-n {switch} link add switch up type bridge".split())
        for number, machine in enumerate(machines):
            space = machine.namespace
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip(*f"link add cable netns {space} type veth peer name port{number} netns {switch}".split())
            _ip(*f"-n {switch} link set port{number} master switch up".split())
            _ip("-n", space, "addr", "add", f"{machine.ip}/24", "dev", "cable")
            _ip("-n", space, "link", "set", "cable", "up")
        yield machines
    finally:
        known = _ip("netns", "list")
        for machine in machines:
            if machine.namespace in known:
                machine.kill_all()
                _ip("netns", "del", machine.namespace)
        if switch in known:
            _ip("netns", "del", switch)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30).stdout
