"""Where a run is: a directory here, or one at the other end of ssh. A place gives bytes of its files and nothing else.

Only the files of a run can be read, never through a link out of its directory, and nothing is ever written.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from zero2all.console import plain
from zero2all.errors import UsageError
from zero2all.track.ssh import Connection, Unreachable, parse_address

FACTS = ("recipe.yaml", "identity.json", "environment.json")
RECORD = "record.jsonl"
IS_RECORD = re.compile(r"record(\.rank[0-9]+)?(\.index)?\.jsonl")
BELOW = ("", "run", "*", "*/run")  # where records lie below the directory that a person names


class Place(Protocol):
    name: str

    def sizes(self) -> dict[str, int]:
        """Bytes of each file of the run that is there."""

    def read(self, file: str, start: int, length: int) -> bytes:
        """Bytes [start, start + length) of a file that ``sizes`` named."""


class LocalPlace:
    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        parts = self.directory.parts
        self.name = plain("/".join(parts[-2:-1] if parts[-1] == "run" else parts[-1:]))

    def sizes(self) -> dict[str, int]:
        try:
            files = [path for path in self.directory.iterdir() if is_run_file(path.name)]
            return {path.name: path.stat().st_size for path in files if self._inside(path)}
        except OSError as error:
            raise Unreachable(str(error)) from error

    def read(self, file: str, start: int, length: int) -> bytes:
        path = self.directory / file
        if not is_run_file(file) or not self._inside(path):
            raise UsageError(f"{file!r} is not a file of the run in {self.directory}")
        try:
            with open(path, "rb") as stream:
                stream.seek(start)
                return stream.read(length)
        except OSError as error:
            raise Unreachable(str(error)) from error

    def _inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.directory) and path.is_file()


class SshPlace:
    def __init__(self, connection: Connection, directory: str) -> None:
        self.connection, self.directory = connection, directory
        parts = directory.rstrip("/").split("/")
        host = f"[{connection.host}]" if ":" in connection.host else connection.host
        self.name = plain(f"{host}:{parts[-2] if parts[-1] == 'run' and len(parts) > 1 else parts[-1]}")

    def sizes(self) -> dict[str, int]:
        listed = self.connection.sizes(self.directory, ["record*.jsonl", *FACTS])
        return {name: size for name, size in listed.items() if is_run_file(name)}

    def read(self, file: str, start: int, length: int) -> bytes:
        if not is_run_file(file):
            raise UsageError(f"{file!r} is not a file of a run")
        return self.connection.read(f"{self.directory}/{file}", start, length)


def is_run_file(name: str) -> bool:
    return name in FACTS or IS_RECORD.fullmatch(name) is not None


def _is_below(name: str) -> bool:
    """Whether a record that was found lies where it was looked for."""
    parts = name.split("/")
    return parts[-1] == RECORD and len(parts) <= 3 and not {"", ".", ".."} & set(parts)


def find_runs(target: str, ssh: str = "ssh") -> list[Place]:
    """The runs in or below ``target``: a run directory, the one above it, or a directory of several."""
    if target.startswith("ssh://"):
        address, path = parse_address(target)
        connection = Connection(address, ssh)
        patterns = [f"{below}/{RECORD}" if below else RECORD for below in BELOW]
        found = connection.matches(path, patterns)
        records = [name for name in found if _is_below(name)]
        places: list[Place] = [SshPlace(connection, f"{path}/{name}".removesuffix(f"/{RECORD}")) for name in records]
    else:
        top = Path(target)
        local = sorted({path for below in BELOW for path in top.glob(f"{below}/{RECORD}" if below else RECORD)})
        places = [LocalPlace(path.parent) for path in local]
    if not places:
        raise UsageError(f"no run in {target}: it should hold the {RECORD} that 'z2a train' writes")
    return places
