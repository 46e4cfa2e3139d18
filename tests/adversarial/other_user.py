"""Code that runs as another, unprivileged user of this machine, where the tests run as root."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can run code as another user"
)

PROGRAM = """
import json, os, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
os.chdir("/")
sys.argv = sys.argv[2:]
exec(sys.stdin.read())
"""
# Every file below the given directories that can be opened to read or write, and every directory that can be changed.
TRESPASS = """
found = []
for top in sys.argv:
    for directory, directories, names in os.walk(top):
        for name in names:
            path = os.path.join(directory, name)
            for mode in (os.O_RDONLY, os.O_WRONLY):
                try:
                    os.close(os.open(path, mode | os.O_NONBLOCK | os.O_NOFOLLOW))
                    found.append(path)
                except OSError:
                    pass
        if directory != top:
            try:
                os.mkdir(directory + "/planted")
                found.append(directory)
            except OSError:
                pass
            try:
                os.rename(directory, directory + ".moved")
                found.append(directory)
            except OSError:
                pass
print(json.dumps(sorted(set(found))))
"""


def free_uid() -> int:
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    return next(uid for uid in range(54_321, 60_000) if uid not in taken)


def as_other_user(code: str, *words: str | Path) -> str:
    """What code prints that runs as another user."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PROGRAM, str(free_uid()), *map(str, words)],
        input=code, capture_output=True, text=True, timeout=60, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def open_to_others(*directories: Path) -> list[str]:
    """What another user can read, write or move below directories in which everybody may make files."""
    found: list[str] = json.loads(as_other_user(TRESPASS, *directories))
    return found
