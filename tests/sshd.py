"""An sshd of our own on loopback, with keys made for the test."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


@contextmanager
def sshd(home: Path) -> Iterator[int]:
    """The port of a running sshd. ``home`` gets the key pairs ``host``, ``other`` and ``user``, which may log in."""
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        pytest.skip("needs sshd and ssh (Debian: openssh-server openssh-client)")
    for name in ("host", "other", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / name], check=True)
    shutil.copy(home / "user.pub", home / "authorized")
    port = free_port()
    (home / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nListenAddress ::1\nHostKey {home}/host\n"
        f"AuthorizedKeysFile {home}/authorized\n"
        "PidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\nPermitRootLogin yes\n"
    )
    separation = Path("/run/sshd")  # sshd asks for it; Debian's service would make it
    if not separation.exists():
        try:
            separation.mkdir()
        except OSError:
            pytest.skip("sshd cannot be started here: /run/sshd is missing")
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", home / "sshd_config"], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: server.poll() is not None or answers(port), "sshd does not answer")
        if server.poll() is not None:
            pytest.skip(f"sshd cannot be started here (status {server.returncode})")
        yield port
    finally:
        server.terminate()
        server.wait(10)


def write_client(home: Path, port: int, known: str, hosts: str = "there") -> Path:
    """The client's configuration for ``hosts``; ``known`` is the key that it takes for the host's."""
    kind, key = (home / f"{known}.pub").read_text().split()[:2]
    (home / f"known_{known}").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    client = home / f"client_{known}"
    client.write_text(
        f"Host {hosts}\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {home}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {home}/known_{known}\n"
        "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n  BatchMode yes\n  LogLevel ERROR\n"
    )
    return client


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def answers(port: int, host: str = "127.0.0.1") -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def wait_for(there: Callable[[], Any], complaint: str, seconds: float = 40.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := there()):
        assert time.monotonic() < until, complaint
        time.sleep(0.05)
    return found
