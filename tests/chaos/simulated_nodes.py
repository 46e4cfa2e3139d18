"""Several nodes on one machine: each is a set of namespaces with its own tmpfs and a virtual cable to a switch.

A node has its own network, host name, ``/dev/shm`` and temporary directory; every other file is shared, as on a
cluster with a shared file system. It lives as long as its init process, which ends with the process that created it,
however that ends: the kernel then drops its network, its mounts and the contents of its tmpfs. Needs root and iproute2.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zero2all.base.errors import Z2aError

NODE_TMPDIR = Path("/dev/shm/tmp")  # private to every node
COMMAND_TIMEOUT = 30.0  # seconds for any command that sets up or tears down a node

BOOT = Path(__file__).with_name("boot_node.sh").read_text(encoding="utf-8")


class SimulatedNode:
    """
    >>> with simulated_nodes(2) as (one, other):
    ...     subprocess.run(one.command("ping", "-c1", other.ip), check=True)
    """

    def __init__(self, name: str, ip: str) -> None:
        self.name, self.ip = name, ip
        self._init_process = _boot(name, ip)

    def command(self, *words: str) -> list[str]:
        """The command line that runs a command on the node. It ends with the process that starts it."""
        # nsenter, setpriv and env replace themselves, so that a signal to the process reaches the command.
        enter = ["nsenter", f"--target={self._init_process.pid}", "--net", "--mount", "--uts", "--"]
        return [*enter, "setpriv", "--pdeathsig=KILL", "env", f"TMPDIR={NODE_TMPDIR}", *words]

    def run(self, *words: str) -> str:
        return _run(*self.command(*words))

    def path(self, path: Path) -> Path:
        """A path on the node, as seen from the host."""
        return Path(f"/proc/{self._init_process.pid}/root") / path.absolute().relative_to("/")

    def processes(self) -> dict[int, str]:
        """Command lines of all processes on the node, by pid."""
        processes, own = {}, os.readlink(f"/proc/{self._init_process.pid}/ns/net")
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(directory / "ns/net") == own and int(directory.name) != self._init_process.pid:
                    processes[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, UnicodeDecodeError):
                continue  # it has just ended
        return processes

    def disconnect(self) -> None:
        self.run("ip", "link", "set", "cable", "down")

    def connect(self) -> None:
        self.run("ip", "link", "set", "cable", "up")

    def limit_bandwidth(self, rate: str) -> None:
        """Limit outgoing traffic to ``rate``, such as 1mbit."""
        self.run("tc", *f"qdisc replace dev cable root tbf rate {rate} burst 32kb latency 400ms".split())

    def mount_small_disk(self, directory: Path, size: str) -> Path:
        """Mount a file system of this size on the node; returns its path as seen from the host."""
        self.run("mkdir", "-p", str(directory))
        self.run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory))
        return self.path(directory)

    def kill_all(self) -> None:
        """Kill every process on the node, by pid, until none is left; its memory file systems are kept."""
        deadline = time.monotonic() + COMMAND_TIMEOUT
        while pids := list(self.processes()):
            if time.monotonic() > deadline:
                raise Z2aError(f"processes {pids} of {self.name} did not end in {COMMAND_TIMEOUT:.0f} s")
            _send_signals(pids, signal.SIGKILL)
            time.sleep(0.01)

    def suspend(self) -> None:
        """Stop every process on the node, as a virtual machine that is paused."""
        while running := [pid for pid in self.processes() if not _is_stopped(pid)]:
            _send_signals(running, signal.SIGSTOP)

    def resume(self) -> None:
        _send_signals(list(self.processes()), signal.SIGCONT)

    def shut_down(self) -> None:
        """Kill everything that runs on the node, and drop its memory."""
        if self._init_process.poll() is None:
            self.kill_all()
        self._init_process.kill()
        self._init_process.wait()
        for stream in (self._init_process.stdin, self._init_process.stdout):
            stream.close()

    def boot(self) -> None:
        """Start again after :meth:`shut_down`, with the same name and address and empty memory."""
        self._init_process = _boot(self.name, self.ip)

    @property
    def pid(self) -> int:
        """Of its init process, which holds its namespaces."""
        return self._init_process.pid


class SimulatedNetwork:
    """A switch and the nodes attached to it."""

    def __init__(self) -> None:
        self.nodes: list[SimulatedNode] = []
        self._switch = SimulatedNode(f"z2a-{secrets.token_hex(4)}-switch", "127.0.0.1")
        self._switch.run("ip", "link", "add", "switch", "up", "type", "bridge")

    def add(self) -> SimulatedNode:
        number = len(self.nodes) + 1
        self.nodes.append(SimulatedNode(self._switch.name.replace("switch", str(number)), f"10.77.0.{number}"))
        self._attach(number)
        return self.nodes[-1]

    def power_cycle(self, node: SimulatedNode) -> None:
        """As after a power failure: nothing runs on the node, and its memory is empty."""
        number = self.nodes.index(node) + 1
        node.shut_down()
        # The kernel removes the cable some time after the node; the new node must not find it.
        subprocess.run(
            self._switch.command("ip", "link", "del", f"port{number}"), capture_output=True, timeout=COMMAND_TIMEOUT
        )
        node.boot()
        self._attach(number)

    def close(self) -> None:
        for node in (*self.nodes, self._switch):
            node.shut_down()

    def _attach(self, number: int) -> None:
        node, port = self.nodes[number - 1], f"port{number}"
        # The same MAC address every time, as a network card has, or others would send to the old one.
        cable = f"address 02:77:00:00:00:{number:02x} netns {node.pid}"
        self._switch.run(*f"ip link add name {port} type veth peer name cable {cable}".split())
        self._switch.run(*f"ip link set {port} master switch up".split())
        node.run(*f"ip addr add {node.ip}/24 dev cable".split())
        node.connect()


def simulation_unavailable_reason() -> str | None:
    """Why nodes cannot be simulated here, if so."""
    if missing := [name for name in ("ip", "tc", "unshare", "nsenter", "setpriv") if shutil.which(name) is None]:
        return f"needs the commands {', '.join(missing)}: apt-get install iproute2 util-linux"
    try:
        SimulatedNode("z2a-probe", "127.0.0.1").shut_down()
    except Z2aError as error:
        return str(error)
    return None


@contextmanager
def simulated_nodes(count: int) -> Iterator[list[SimulatedNode]]:
    """Nodes attached to one switch."""
    with simulated_network(count) as network:
        yield network.nodes


@contextmanager
def simulated_network(count: int) -> Iterator[SimulatedNetwork]:
    network = SimulatedNetwork()
    try:
        for _ in range(count):
            network.add()
        yield network
    finally:
        network.close()


def _boot(name: str, ip: str) -> subprocess.Popen[bytes]:
    command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", BOOT, "z2a-node", name, ip]
    # In a session of its own: Ctrl-C ends the suite, which then shuts down its nodes one by one.
    init = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    with init.stderr:
        if init.stdout.readline() != b"up\n":
            reason = init.communicate(timeout=COMMAND_TIMEOUT)[1].decode(errors="replace").strip()
            raise Z2aError(f"no node can be simulated here: {reason}")
    return init


def _send_signals(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_stopped(pid: int) -> bool:
    """Whether it cannot run: stopped, or ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    except OSError:
        return True


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT)
    if done.returncode:
        raise Z2aError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
