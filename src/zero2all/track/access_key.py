"""The key that a request to the page's server needs: new at every start, or kept in a file."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from zero2all.errors import UsageError

MIN_LENGTH = 16  # characters
_KEY_PATTERN = re.compile(r"[A-Za-z0-9._~-]+")  # what needs no escaping in an address or a header


def new_key() -> str:
    return secrets.token_urlsafe(16)


def load_key(path: Path) -> str:
    """The key in a file, which is made with a new key if there is none."""
    try:
        _write_new(path)
        if path.stat().st_mode & 0o007:
            raise UsageError(f"{path} can be read by every user of this machine: chmod 600 {path}")
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be used for the key ({error}): give another file with --key-file") from None
    if len(key) < MIN_LENGTH or not _KEY_PATTERN.fullmatch(key):
        raise UsageError(
            f"the key in {path} must have at least {MIN_LENGTH} characters, all of them letters, digits or -._~: "
            "delete the file to get a new one"
        )
    return key


def _write_new(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with open(descriptor, "w", encoding="ascii") as stream:
        stream.write(f"{new_key()}\n")
