"""``python -m zero2all.elastic.overlay_guard NAME``: holds a WireGuard interface until its stdin is closed.

A process of its own, because the agent may be killed: the kernel then closes the pipe, and the interface is removed. It
writes one line: ``kernel`` or ``wireguard-go`` once the interface is there, else why it is not.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zero2all.processes import end_with_parent, stop_on_signals

START_TIMEOUT = 10.0  # seconds
CONTROL_SOCKETS = Path("/var/run/wireguard")  # of wireguard-go; fixed in its source
KINDS = ("kernel", "wireguard-go")
_NEEDS = "it needs CAP_NET_ADMIN and /dev/net/tun (Docker: --cap-add NET_ADMIN --device /dev/net/tun)"


class NoInterfaceError(Exception):
    pass


@contextmanager
def wireguard_interface(name: str) -> Iterator[str]:
    """Made by the kernel, or by wireguard-go where the kernel has no such module; which of them."""
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
