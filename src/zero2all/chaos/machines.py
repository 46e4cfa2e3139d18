"""Several machines on one: each a set of namespaces with a memory file system of its own and a cable to a switch.

A machine has its own network, host name, ``/dev/shm`` and temporary directory; every other file is shared, as on a
cluster with a shared file system. It lasts as long as its first process, which ends with the one that made it, however
that ends: the kernel then drops its network, its mounts and what its memory held. Needs root and iproute2.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero2all.errors import Z2aError

TEMPORARY = Path("/dev/shm/tmp")  # on every machine, its own
SECONDS = 30.0  # for any command that sets up or takes down a machine

# The first process of a machine: sets it up, and once nobody holds its input any more, ends all that runs there.
BOOT = """
mount -t tmpfs tmpfs /dev/shm && mkdir -m 1777 /dev/shm/tmp &&
printf '127.0.0.1 localhost\\n%s %s\\n' "$2" "$1" >/dev/shm/tmp/hosts && mount --bind /dev/shm/tmp/hosts /etc/hosts &&
echo "$1" >/proc/sys/kernel/hostname && ip link set lo up && echo up || exit 1
read -r _
found=yes
while [ $found = yes ]; do
  found=no
  for process in /proc/[0-9]*; do
    if [ $process != /proc/$$ ] && [ $process/ns/net -ef /proc/$$/ns/net ]; then
      kill -9 ${process#/proc/} && found=yes
    fi
  done
done 2>/dev/null
"""


class Machine:
    """
    >>> with some_machines(2) as (one, other):
    ...     subprocess.run(one.command("ping", "-c1", other.ip), check=True)
    """

    def __init__(self, name: str, ip: str) -> None:
        self.name, self.ip = name, ip
        self._first = _boot(name, ip)

    def command(self, *words: str) -> list[str]:
        """The same command, there. It ends with the process that starts it."""
        # nsenter, setpriv and env replace themselves, so that a signal to the process reaches the command.
        enter = ["nsenter", f"--target={self._first.pid}", "--net", "--mount", "--uts", "--"]
        return [*enter, "setpriv", "--pdeathsig=KILL", "env", f"TMPDIR={TEMPORARY}", *words]

    def run(self, *words: str) -> str:
        return _run(*self.command(*words))

    def path(self, path: Path) -> Path:
        """A file of that machine, seen from here."""
        return Path(f"/proc/{self._first.pid}/root") / path.absolute().relative_to("/")

    def processes(self) -> dict[int, str]:
        """Everything that runs on it, by pid, with its title."""
        found, own = {}, os.readlink(f"/proc/{self._first.pid}/ns/net")
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(directory / "ns/net") == own and int(directory.name) != self._first.pid:
                    found[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, UnicodeDecodeError):
                continue  # it has just ended
        return found

    def pull_the_cable(self) -> None:
        self.run("ip", "link", "set", "cable", "down")

    def plug_the_cable(self) -> None:
        self.run("ip", "link", "set", "cable", "up")

    def lose_the_way_to(self, other: Machine) -> None:
        """As a broken route does: what is sent is never heard of again."""
        self.run("ip", "route", "add", "blackhole", f"{other.ip}/32")

    def shape(self, rate: str) -> None:
        """Let no more than ``rate`` (such as 1mbit) leave it."""
        self.run("tc", *f"qdisc replace dev cable root tbf rate {rate} burst 32kb latency 400ms".split())

    def small_disk(self, directory: Path, size: str) -> Path:
        """Mount a file system with so much room there, and give its path as seen from here."""
        self.run("mkdir", "-p", str(directory))
        self.run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory))
        return self.path(directory)

    def kill_all(self) -> None:
        """Every process on it, by pid, until none is left; what it keeps in memory stays."""
        deadline = time.monotonic() + SECONDS
        while pids := list(self.processes()):
            if time.monotonic() > deadline:
                raise Z2aError(f"processes {pids} of {self.name} did not end in {SECONDS:.0f} s")
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)

    def end(self) -> None:
        """Everything that runs there is killed, and what was in its memory is gone."""
        if self._first.poll() is None:
            self.kill_all()
        self._first.kill()
        self._first.wait()
        for stream in (self._first.stdin, self._first.stdout):
            assert stream is not None
            stream.close()

    def boot(self) -> None:
        """Again after :meth:`end`, with the same name and address, and nothing in memory."""
        self._first = _boot(self.name, self.ip)

    @property
    def pid(self) -> int:
        """Of its first process, which holds its namespaces."""
        return self._first.pid


class Network:
    """A switch and the machines at it."""

    def __init__(self) -> None:
        self.machines: list[Machine] = []
        self._switch = Machine(f"z2a-{secrets.token_hex(4)}-switch", "127.0.0.1")
        self._switch.run("ip", "link", "add", "switch", "up", "type", "bridge")

    def add(self) -> Machine:
        number = len(self.machines) + 1
        self.machines.append(Machine(self._switch.name.replace("switch", str(number)), f"10.77.0.{number}"))
        self._plug_in(number)
        return self.machines[-1]

    def power_cycle(self, machine: Machine) -> None:
        """As after a power cut: nothing runs there, and its memory is empty."""
        number = self.machines.index(machine) + 1
        machine.end()
        # The kernel takes the cable away some time after the machine; the new one must not find it there.
        subprocess.run(self._switch.command("ip", "link", "del", f"port{number}"), capture_output=True, timeout=SECONDS)
        machine.boot()
        self._plug_in(number)

    def close(self) -> None:
        for machine in (*self.machines, self._switch):
            machine.end()

    def _plug_in(self, number: int) -> None:
        machine, port = self.machines[number - 1], f"port{number}"
        # The same address on the cable every time, as a network card has, or others would look for the old one.
        cable = f"address 02:77:00:00:00:{number:02x} netns {machine.pid}"
        self._switch.run(*f"ip link add name {port} type veth peer name cable {cable}".split())
        self._switch.run(*f"ip link set {port} master switch up".split())
        machine.run(*f"ip addr add {machine.ip}/24 dev cable".split())
        machine.plug_the_cable()


def why_not() -> str | None:
    """Why no machine can be made here, if so."""
    if missing := [name for name in ("ip", "tc", "unshare", "nsenter", "setpriv") if shutil.which(name) is None]:
        return f"needs the commands {', '.join(missing)}: apt-get install iproute2 util-linux"
    try:
        Machine("z2a-probe", "127.0.0.1").end()
    except Z2aError as error:
        return str(error)
    return None


@contextmanager
def some_machines(count: int) -> Iterator[list[Machine]]:
    """Each has a cable to one switch."""
    with a_network(count) as network:
        yield network.machines


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    with some_machines(2) as (one, other):
        yield one, other


@contextmanager
def a_network(count: int) -> Iterator[Network]:
    network = Network()
    try:
        for _ in range(count):
            network.add()
        yield network
    finally:
        network.close()


def _boot(name: str, ip: str) -> subprocess.Popen[bytes]:
    words = ["unshare", "--net", "--mount", "--uts", "sh", "-c", BOOT, "z2a-machine", name, ip]
    # In a session of its own: Ctrl-C ends the suite, which then ends its machines one after another.
    first = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert first.stdout is not None
    assert first.stderr is not None
    with first.stderr:
        if first.stdout.readline() != b"up\n":
            why = first.communicate(timeout=SECONDS)[1].decode(errors="replace").strip()
            raise Z2aError(f"no machine can be made here: {why}")
    return first


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise Z2aError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
