"""Logs of ranks: only the end is read, and they do not fill the disk."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from zero2all.cluster.launch.failure_report import HEAD_BYTES, TAIL_BYTES, last_lines, trim_log

TEXT = b"one\ntwo\nthr\xffee\n"


def used(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_of_a_large_log_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    with open(log, "wb") as stream:
        stream.seek(1 << 30)
        stream.write(b"\n" + TEXT)
    tracemalloc.start()
    try:
        assert last_lines(log, 2) == ["two", "thr\ufffdee"]
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert last_lines(tmp_path / "none", 2) == []
    log.write_bytes(b"")
    assert last_lines(log, 2) == []


def test_a_log_that_grows_keeps_its_head_and_its_tail(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    with open(log, "wb", buffering=0) as rank:  # as a rank has it open, which continues to write
        rank.write(b"the first line\n")
        for _ in range(24):
            rank.write(b"x" * ((1 << 20) - 1) + b"\n")
        rank.write(b"a line near the end\n")
        os.fsync(rank.fileno())
        if not trim_log(log):
            pytest.skip("this file system cannot give back a part of a file")
        assert used(log) <= HEAD_BYTES + TAIL_BYTES + (1 << 20)
        rank.write(b"and one after it\n")
    assert last_lines(log, 2) == ["a line near the end", "and one after it"]
    with open(log, "rb") as stream:
        assert stream.readline() == b"the first line\n"


def test_a_small_log_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_bytes(TEXT)
    assert not trim_log(log)
    assert log.read_bytes() == TEXT
    assert not trim_log(tmp_path / "none")
