"""Where a run is: a local directory, or a remote one over ssh. A location only reads byte ranges of the run's files.

Only the files of a run can be read, never through a link out of its directory, and nothing is ever written.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from zero2all.console import sanitize
from zero2all.errors import UsageError
from zero2all.track.ssh import SshConnection, UnreachableError, parse_address

METADATA_FILES = ("recipe.yaml", "identity.json", "environment.json")
RECORD_FILE = "record.jsonl"
RECORD_FILE_PATTERN = re.compile(r"record(\.rank[0-9]+)?(\.index)?\.jsonl")
SEARCH_PATHS = ("", "run", "*", "*/run")  # where to search for records below the given directory


class RunLocation(Protocol):
    name: str

    def file_sizes(self) -> dict[str, int]:
        """Size of each existing file of the run."""

    def read(self, file: str, start: int, length: int) -> bytes:
        """Bytes [start, start + length) of a file that ``file_sizes`` lists."""


class LocalRunLocation:
    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        parts = self.directory.parts
        self.name = sanitize("/".join(parts[-2:-1] if parts[-1] == "run" else parts[-1:]))

    def file_sizes(self) -> dict[str, int]:
        try:
            files = [path for path in self.directory.iterdir() if is_run_file(path.name)]
            return {path.name: path.stat().st_size for path in files if self._is_inside(path)}
        except OSError as error:
            raise UnreachableError(str(error)) from error

    def read(self, file: str, start: int, length: int) -> bytes:
        path = self.directory / file
        if not is_run_file(file) or not self._is_inside(path):
            raise UsageError(f"{file!r} is not a file of the run in {self.directory}")
        try:
            with open(path, "rb") as stream:
                stream.seek(start)
                return stream.read(length)
        except OSError as error:
            raise UnreachableError(str(error)) from error

    def _is_inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.directory) and path.is_file()


class SshRunLocation:
    def __init__(self, connection: SshConnection, directory: str) -> None:
        self.connection, self.directory = connection, directory
        parts = directory.rstrip("/").split("/")
        host = f"[{connection.host}]" if ":" in connection.host else connection.host
        self.name = sanitize(f"{host}:{parts[-2] if parts[-1] == 'run' and len(parts) > 1 else parts[-1]}")

    def file_sizes(self) -> dict[str, int]:
        listed = self.connection.file_sizes(self.directory, ["record*.jsonl", *METADATA_FILES])
        return {name: size for name, size in listed.items() if is_run_file(name)}

    def read(self, file: str, start: int, length: int) -> bytes:
        if not is_run_file(file):
            raise UsageError(f"{file!r} is not a file of a run")
        return self.connection.read(f"{self.directory}/{file}", start, length)


def is_run_file(name: str) -> bool:
    return name in METADATA_FILES or RECORD_FILE_PATTERN.fullmatch(name) is not None


def _is_expected_record_path(name: str) -> bool:
    """Whether a path that the remote listed can match ``SEARCH_PATHS``."""
    parts = name.split("/")
    return parts[-1] == RECORD_FILE and len(parts) <= 3 and not {"", ".", ".."} & set(parts)


def find_runs(target: str, ssh: str = "ssh") -> list[RunLocation]:
    """The runs in or below ``target``: a run directory, its parent, or a directory of several runs."""
    if target.startswith("ssh://"):
        address, path = parse_address(target)
        connection = SshConnection(address, ssh)
        patterns = [f"{below}/{RECORD_FILE}" if below else RECORD_FILE for below in SEARCH_PATHS]
        listed = connection.glob_files(path, patterns)
        records = sorted({name for name in listed if _is_expected_record_path(name)})  # the patterns overlap
        locations: list[RunLocation] = [
            SshRunLocation(connection, f"{path}/{name}".removesuffix(f"/{RECORD_FILE}")) for name in records
        ]
    else:
        top = Path(target)
        local = sorted(
            {path for below in SEARCH_PATHS for path in top.glob(f"{below}/{RECORD_FILE}" if below else RECORD_FILE)}
        )
        locations = [LocalRunLocation(path.parent) for path in local]
    if not locations:
        raise UsageError(f"no run in {target}: there is no {RECORD_FILE}, which 'z2a train' writes")
    return locations
