"""The job secret, which authenticates the nodes. It is never on a command line and never in a log."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from zero2all.base.console import say
from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.base.errors import UsageError
from zero2all.base.paths import config_directory

MIN_SECRET_LENGTH = 16  # characters
_POLL_INTERVAL = 0.2  # seconds between two checks for a file that another node writes


def new_secret() -> str:
    return secrets.token_hex(32)


def default_secret_file() -> Path:
    """A file in the home directory, which on most clusters all nodes share."""
    return config_directory() / "job.secret"


def find_secret(file: Path | None, *, make: bool, patience: float = 0.0) -> tuple[str, Path | None]:
    """The secret and the file it is in: of ``file``, else of the environment, else of the default file.

    ``make``: this machine hosts the rendezvous, and writes the file if there is none. Others wait for it up to
    ``patience`` seconds, since the host may start at the same moment.
    """
    if file is None and (given := os.environ.get(JOB_SECRET_VARIABLE)) is not None:
        return _validate_secret(given, f"the variable {JOB_SECRET_VARIABLE}"), None
    path = file or default_secret_file()
    if make:
        _write_new(path)
    deadline, logged = time.monotonic() + patience, False
    while True:
        try:
            return _validate_secret(_read(path), str(path)), path
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise UsageError(missing_secret_message(path)) from None
            if not logged:
                say(f"waiting for the job secret in {path}: the node that hosts the rendezvous writes it")
                logged = True
        time.sleep(_POLL_INTERVAL)


def missing_secret_message(path: Path | None = None) -> str:
    return (
        f"no job secret in {path or default_secret_file()}: copy that file (mode 0600) from the machine that hosts the "
        f"rendezvous, name a copy with --secret-file, or set {JOB_SECRET_VARIABLE} to the same value on every node"
    )


def _read(path: Path) -> str:
    if path.is_dir():
        raise UsageError(f"{path} is a directory: give a file with --secret-file")
    try:
        mode = path.stat().st_mode
        if mode & 0o007:
            raise UsageError(f"{path} can be read by every user of this machine: chmod 600 {path}")
        return path.read_text(encoding="ascii")
    except (PermissionError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a job secret ({error}): give another with --secret-file") from None


def _write_new(path: Path) -> None:
    """Write the secret atomically: two nodes that start at the same moment get the same one."""
    if path.exists():
        return
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, f"{new_secret()}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            os.link(partial, path)
        except FileExistsError:
            pass
        finally:
            partial.unlink()
    except OSError as error:
        raise UsageError(
            f"the job secret cannot be written to {path} ({error.strerror}): set {JOB_SECRET_VARIABLE}, "
            "or name a writable file with --secret-file"
        ) from None


def _validate_secret(value: str, where: str) -> str:
    secret = value.strip()
    if len(secret) < MIN_SECRET_LENGTH:
        raise UsageError(
            f"the job secret in {where} has {len(secret)} characters, and needs {MIN_SECRET_LENGTH}: "
            "make one with 'openssl rand -hex 32'"
        )
    return secret
