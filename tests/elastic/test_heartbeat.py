"""An agent reads the heartbeat of a rank at any moment, also while it is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from zero2all.elastic.heartbeat import Heartbeat, create_heartbeat

RANK = """
import sys
from pathlib import Path
from zero2all.elastic.heartbeat import Heartbeat
heartbeat = Heartbeat(Path(sys.argv[1]))
heartbeat(1)
print("ready", flush=True)
while True:
    heartbeat.ping()
"""


def test_a_heartbeat_that_is_being_written_never_looks_like_none(tmp_path: Path) -> None:
    begin = time.monotonic()
    agent = create_heartbeat(tmp_path, 0)
    assert agent.path is not None
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(agent.path)], stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"ready\n"
        read = [agent.read() for _ in range(20_000)]
    finally:
        os.kill(rank.pid, signal.SIGKILL)
        rank.communicate()
    assert min(status.time for status in read) > begin, "zeros: the agent would report a hang"
    assert {status.step for status in read} == {1}


def test_a_rank_of_a_previous_round_keeps_its_own_page(tmp_path: Path) -> None:
    first = create_heartbeat(tmp_path, 0)
    assert first.path is not None
    old_rank = Heartbeat(first.path)
    second = create_heartbeat(tmp_path, 0)
    old_rank(12)
    assert first.read().step == 12
    assert second.read().step == -1
