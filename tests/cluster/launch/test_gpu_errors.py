"""New errors of GPUs while a job runs, through an nvidia-smi on PATH that prints what the driver would."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.processes import run_preloaded
from zero2all.cluster.launch.gpu_errors import GpuErrorPoll, GpuErrors, GpuFault

CARD = "00000000:3B:00.0"
LINKS = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 0: Replay Errors: 0
\t Link 0: Recovery Errors: {recovery}
\t Link 0: CRC Errors: 7
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
\t Link 3: CRC Errors: 0
"""


class FakeDriver:
    """An ``nvidia-smi`` and a ``dmesg`` that print files, which a test changes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name, script in {
            "nvidia-smi": f'[ "$1" = nvlink ] && exec cat {directory}/links || exec cat {directory}/counters',
            "dmesg": f"exec cat {directory}/log",
        }.items():
            (directory / name).write_text(f"#!/bin/sh\n{script}\n")
            (directory / name).chmod(0o755)
        self.set()

    def set(self, ecc: int = 2, recovery: int = 0, log: str = "") -> None:
        for name, text in {
            "counters": f"{CARD}, {ecc}, No\n",
            "links": LINKS.format(recovery=recovery),
            "log": log,
        }.items():
            partial = self.directory / f".{name}"
            partial.write_text(text)
            partial.rename(self.directory / name)  # a poll reads the old text or the new one


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return FakeDriver(tmp_path)


def test_a_poll_reports_each_new_error_once(driver: FakeDriver) -> None:
    found: list[GpuFault] = []
    poll = GpuErrorPoll(GpuErrors(since=10.0), found.append)
    poll.poll()
    assert found == [], "these counts were there before the job"
    driver.set(ecc=3, recovery=5, log="[   20.25] NVRM: Xid (PCI:0000:3b:00): 63, pid=1, row remapped\n")
    poll.poll()
    assert sorted(map(str, found)) == [
        f"{CARD}: 1 memory errors that could not be corrected (ECC)",
        "GPU 0: NVLink 0 has 5 new Recovery errors: check the link",
        "PCI:0000:3b:00: Xid 63, a memory page or row was retired",
    ]
    assert [fault.fatal for fault in sorted(found, key=str)] == [True, False, False]
    driver.set(ecc=4, recovery=9, log="[   20.25] NVRM: Xid (PCI:0000:3b:00): 63, pid=1, row remapped\n")
    poll.poll()
    assert len(found) == 3, "the same counters went on growing"


LAUNCH = """
import os, sys
os.chdir(sys.argv[1])
from zero2all.cluster.launch import gpu_errors
gpu_errors.POLL_INTERVAL = 0.1
from zero2all.cli.main import main
sys.argv[1:] = ["launch", "--procs", "1", "--", "python", "script.py"]
main()
"""
SCRIPT = """
import pathlib, sys, time
driver = pathlib.Path(sys.argv[0]).parent
(driver / "links").write_text((driver / "links").read_text().replace("Recovery Errors: 0", "Recovery Errors: 8"))
deadline = time.monotonic() + 30
while not (driver / "notified").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_the_agent_warns_and_notifies_while_the_ranks_run(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    (driver.directory / "script.py").write_text(SCRIPT)
    hook = f"{sys.executable} -c \"import sys; open('{driver.directory}/notified', 'a').write(sys.stdin.read())\""
    monkeypatch.setenv("Z2A_NOTIFY", hook)
    done = run_preloaded(LAUNCH, str(driver.directory))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("GPU 0: NVLink 0 has 8 new Recovery errors: check the link") == 1
    assert '"event": "GPU error"' in (driver.directory / "notified").read_text()
