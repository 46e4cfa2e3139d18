"""A private network between the nodes of a job over one UDP port each (WireGuard).

Ranks connect to each other at any port of the interface's own address, which no port map translates. In the overlay
every node has an address that all others reach. Nodes exchange public keys and UDP endpoints through the authenticated
rendezvous; private keys stay in memory, of this process and of WireGuard.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING

from zero2all.base.console import say
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.network.addresses import HostPort, NodeAddress, interface_for_address, interface_mtu
from zero2all.base.processes import end_with_parent, stop_on_signals
from zero2all.base.records import parse_record

if TYPE_CHECKING:  # the process that holds the interface needs no torch
    from zero2all.cluster.launch.rendezvous_client import RendezvousStore
    from zero2all.cluster.launch.rendezvous_messages import RankAssignment

HEADER_BYTES = 80  # of WireGuard in a packet, over IPv6
KEEPALIVE = 15  # seconds: routers forget a UDP flow after half a minute or more
CONNECT_TIMEOUT = 9.0  # seconds for the first connection: WireGuard repeats its handshake after five
MEETING_TIMEOUT = 10.0  # seconds for the other nodes to exchange keys
COMMAND_TIMEOUT = 30.0
_SHARED_SPACE = int(IPv4Address("100.64.0.0"))  # RFC 6598: belongs to no private network of a site
_SHARED_BITS = 22
_PROGRAMS = {"wg": "wireguard-tools", "ip": "iproute2"}


@dataclass(frozen=True)
class OverlayPeer:
    """What a node tells the others."""

    name: str
    public_key: str
    address: str
    endpoint: str
    """HOST:PORT, UDP."""
    is_advertised: bool
    """Whether the user gave the endpoint. Otherwise the node may be behind NAT, and must keep its own flows alive."""


class WireGuardOverlay:
    """
    >>> with WireGuardOverlay("job", underlay) as overlay:
    ...     overlay.connect(store, assignment, lambda: False)
    """

    def __init__(self, job_id: str, underlay: NodeAddress) -> None:
        """Brings the interface up. ``underlay`` is where this node is without the overlay; its ports are for UDP."""
        missing = [program for program in _PROGRAMS if shutil.which(program) is None]
        if missing:
            packages = " ".join(_PROGRAMS[program] for program in missing)
            raise UsageError(f"--overlay wireguard needs {', '.join(missing)}: apt-get install {packages} wireguard-go")
        self.interface = f"z2a-{secrets.token_hex(5)}"
        overlay = overlay_address(job_id, socket.gethostname(), underlay.local)
        self.address = NodeAddress(overlay, overlay)
        self._private_key = _run("wg", "genkey").strip()
        self._port = underlay.local_port or _free_udp_port()
        endpoint = str(HostPort(underlay.advertised, underlay.advertised_port or self._port))
        public_key = _run("wg", "pubkey", data=self._private_key).strip()
        is_advertised = underlay.is_mapped or underlay.advertised_port is not None
        self.own = OverlayPeer(socket.gethostname(), public_key, overlay, endpoint, is_advertised)
        self._known: set[str] = set()
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "zero2all.cluster.launch.overlay", self.interface],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self._bring_up(underlay)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WireGuardOverlay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the interface."""
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(COMMAND_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        self._guard.stdout.close()

    def _bring_up(self, underlay: NodeAddress) -> None:
        assert self._guard.stdout is not None
        kind = self._guard.stdout.readline().strip()
        if kind not in KINDS:
            raise UsageError(f"--overlay wireguard: {kind or 'no interface could be made'}")
        self._configure([])
        mtu = interface_mtu(interface_for_address(underlay.local) or "") or 1500
        _run("ip", "address", "add", f"{self.address.local}/32", "dev", self.interface)
        _run("ip", "link", "set", self.interface, "mtu", str(mtu - HEADER_BYTES), "up")
        say(f"overlay: {self.interface} ({kind}) is {self.address.local}, UDP port {self._port}")

    def connect(self, store: RendezvousStore, assignment: RankAssignment, is_interrupted: Callable[[], bool]) -> bool:
        """Exchange keys with the nodes of a round. False if one was lost, or has not come in time."""
        prefix, count = f"overlay/{assignment.round}", assignment.nodes
        store.set(f"{prefix}/{assignment.rank}", json.dumps(asdict(self.own)))
        keys = [f"{prefix}/{rank}" for rank in range(count) if rank != assignment.rank]
        if not store.wait_unless(keys, MEETING_TIMEOUT, is_interrupted):
            return False
        peers = [parse_record(OverlayPeer, json.loads(value), "overlay") for value in store.multi_get(keys)]
        _refuse_same_addresses([self.own, *peers])
        self._configure(peers)
        routes = "".join(f"route replace {peer.address}/32 dev {self.interface}\n" for peer in peers)
        _run("ip", "-batch", "-", data=routes)
        # A handshake with a node that does not know this one yet would be repeated only seconds later.
        if store.add(f"{prefix}/ready", 1) == count:
            store.set(f"{prefix}/complete", "1")
        if not store.wait_unless([f"{prefix}/complete"], MEETING_TIMEOUT, is_interrupted):
            return False
        self._configure(peers, keepalive=not self.own.is_advertised)
        return True

    def _configure(self, peers: list[OverlayPeer], *, keepalive: bool = False) -> None:
        """Sessions with peers that stay are kept; others are dropped."""
        lines = ["[Interface]", f"PrivateKey = {self._private_key}", f"ListenPort = {self._port}"]
        for peer in peers:
            lines += ["[Peer]", f"PublicKey = {peer.public_key}", f"AllowedIPs = {peer.address}/32"]
            if peer.is_advertised or peer.public_key not in self._known:
                lines.append(f"Endpoint = {_resolve(peer)}")
            # Else the endpoint may be one that WireGuard has learnt from the packets of a node behind NAT.
            if keepalive:
                lines.append(f"PersistentKeepalive = {KEEPALIVE}")
        _run("wg", "syncconf", self.interface, "/dev/stdin", data="\n".join(lines) + "\n")
        self._known = {peer.public_key for peer in peers}


def overlay_address(job_id: str, name: str, underlay: str) -> str:
    """The same after a restart: ranks keep their places and an excluded node stays excluded."""
    digest = hashlib.sha256(json.dumps([job_id, name, underlay]).encode()).digest()
    return str(IPv4Address(_SHARED_SPACE + int.from_bytes(digest[:4], "big") % (1 << _SHARED_BITS)))


def _refuse_same_addresses(nodes: list[OverlayPeer]) -> None:
    by_address: dict[str, OverlayPeer] = {}
    for node in nodes:
        other = by_address.setdefault(node.address, node)
        if other is not node:
            raise Z2aError(
                f"nodes {other.name} and {node.name} get the same overlay address {node.address}: give one of them "
                "another host name"
            )


def _resolve(peer: OverlayPeer) -> HostPort:
    found = HostPort.parse(peer.endpoint, "--advertise")
    try:
        address = socket.getaddrinfo(found.host, found.port, type=socket.SOCK_DGRAM)[0][4][0]
    except OSError as error:
        raise Z2aError(
            f"node {socket.gethostname()} cannot resolve {found.host} ({error.strerror}), which node {peer.name} "
            "advertises: give its address (--advertise)"
        ) from None
    return HostPort(str(address), found.port)


def _free_udp_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _run(*words: str, data: str | None = None) -> str:
    done = subprocess.run(words, input=data, capture_output=True, text=True, timeout=COMMAND_TIMEOUT)
    if done.returncode:
        raise Z2aError(f"--overlay wireguard: {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


# ``python -m zero2all.cluster.launch.overlay NAME`` holds an interface until its stdin is closed. It is a process of
# its own, because the agent may be killed: the kernel then closes the pipe, and the interface is removed. It writes
# one line: ``kernel`` or ``wireguard-go`` once the interface is there, else why it is not.
START_TIMEOUT = 10.0  # seconds
CONTROL_SOCKETS = Path("/var/run/wireguard")  # of wireguard-go; fixed in its source
KINDS = ("kernel", "wireguard-go")
_NEEDS = "it needs CAP_NET_ADMIN and /dev/net/tun (Docker: --cap-add NET_ADMIN --device /dev/net/tun)"


class NoInterfaceError(Exception):
    pass


@contextmanager
def wireguard_interface(name: str) -> Iterator[str]:
    """The kernel makes the interface, or wireguard-go where the kernel has no such module; yields which of them."""
    added = subprocess.run(["ip", "link", "add", name, "type", "wireguard"], capture_output=True, text=True)
    if added.returncode == 0:
        try:
            yield "kernel"
        finally:
            subprocess.run(["ip", "link", "del", name], capture_output=True)
        return
    if shutil.which("wireguard-go") is None:
        raise NoInterfaceError(
            f"the kernel makes no interface ({added.stderr.strip()}), and wireguard-go is not installed: apt-get "
            f"install wireguard-go; {_NEEDS}"
        )
    process = _start_user_space(name)
    try:
        yield "wireguard-go"
    finally:
        process.terminate()  # the interface goes with it
        process.wait()
        with suppress(OSError):
            (CONTROL_SOCKETS / f"{name}.sock").unlink()


def _start_user_space(name: str) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as log:
        # This process has one thread, so that code may run between fork and exec.
        process = subprocess.Popen(
            ["wireguard-go", "-f", name], stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=end_with_parent
        )
        deadline = time.monotonic() + START_TIMEOUT
        while process.poll() is None and time.monotonic() < deadline:
            if (CONTROL_SOCKETS / f"{name}.sock").exists() and name in (own for _, own in socket.if_nameindex()):
                return process
            time.sleep(0.02)
        process.kill()
        process.wait()
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    raise NoInterfaceError(f"wireguard-go makes no interface ({lines[-1] if lines else 'no message'}): {_NEEDS}")


def main(name: str) -> None:
    stop_on_signals()
    with suppress(KeyboardInterrupt):
        try:
            with wireguard_interface(name) as kind:
                _tell(kind)
                sys.stdin.buffer.read()
        except NoInterfaceError as error:
            _tell(str(error))


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
