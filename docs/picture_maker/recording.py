"""Records what a command prints to a terminal, with times, as an asciinema file."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import struct
import subprocess
import termios
import time
from dataclasses import dataclass
from pathlib import Path

COLUMNS, ROWS = 100, 30


@dataclass(frozen=True)
class Recording:
    """What a command printed: ``(seconds, text)`` of each write."""

    command: str
    columns: int
    rows: int
    writes: list[tuple[float, str]]

    def save(self, path: Path) -> None:
        header = {"version": 2, "width": self.columns, "height": self.rows, "command": self.command}
        lines = [header, *([seconds, "o", text] for seconds, text in self.writes)]
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Recording:
        header, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        writes = [(seconds, text) for seconds, _, text in lines]
        return cls(header["command"], header["width"], header["height"], writes)


def record(command: list[str], directory: Path) -> Recording:
    """Run a command in a terminal of its own, in ``directory``."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    started = time.monotonic()
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, cwd=directory, env=variables)
    os.close(end)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    writes: list[tuple[float, str]] = []
    while data := _read(terminal):
        writes.append((round(time.monotonic() - started, 3), decoder.decode(data)))
    os.close(terminal)
    if process.wait() != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{''.join(text for _, text in writes)[-2000:]}")
    return Recording(" ".join([Path(command[0]).name, *command[1:]]), COLUMNS, ROWS, writes)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux: the last process that had the terminal open has ended
        return b""
