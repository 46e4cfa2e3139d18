"""Where a run is: a local directory, or a remote one over ssh. A location only reads byte ranges of the run's files.

Only the files of a run can be read, never through a link out of its directory, and nothing is ever written.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from zero2all.base.console import sanitize
from zero2all.base.errors import UsageError
from zero2all.base.workspace import DEFAULT_RUN, MAX_DEPTH, UNSEARCHED_PATTERNS, find_directories
from zero2all.track.ssh import SshConnection, UnreachableError, parse_address

PLAN_FILE = "plan.json"
METADATA_FILES = ("recipe.yaml", "identity.json", "environment.json", PLAN_FILE)
RECORD_FILE = "record.jsonl"
EVALS_FILE = "evals.jsonl"
RECORD_FILE_PATTERN = re.compile(r"record(\.rank[0-9]+)?(\.index)?\.jsonl")


class RunLocation(Protocol):
    @property
    def name(self) -> str:
        """What the run is called in charts and tables."""

    def file_sizes(self) -> dict[str, int]:
        """Size of each existing file of the run."""

    def read(self, file: str, start: int, length: int) -> bytes:
        """Bytes [start, start + length) of a file that ``file_sizes`` lists."""


class NamedLocation:
    """The name is the end of the path. The default run of a workspace has the name of the workspace."""

    def __init__(self, path: str, name_parts: int, prefix: str = "") -> None:
        self._parts, self._name_parts, self._prefix = _without_default_run(path.split("/")), name_parts, prefix

    @property
    def name(self) -> str:
        return sanitize(self._prefix + "/".join(self._parts[-self._name_parts :]))

    def lengthen_name(self) -> bool:
        """Add the directory above to the name; False if there is none."""
        self._name_parts += 1
        return self._name_parts <= len(self._parts)


class LocalRunLocation(NamedLocation):
    def __init__(self, directory: Path, name_parts: int = 1) -> None:
        super().__init__(os.path.abspath(directory), name_parts)
        self.directory = directory.resolve()

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


class SshRunLocation(NamedLocation):
    def __init__(self, connection: SshConnection, directory: str, name_parts: int = 1) -> None:
        host = f"[{connection.host}]" if ":" in connection.host else connection.host
        super().__init__(directory.rstrip("/"), name_parts, f"{host}:")
        self.connection, self.directory = connection, directory

    def file_sizes(self) -> dict[str, int]:
        listed = self.connection.file_sizes(self.directory, ["record*.jsonl", EVALS_FILE, *METADATA_FILES])
        return {name: size for name, size in listed.items() if is_run_file(name)}

    def read(self, file: str, start: int, length: int) -> bytes:
        if not is_run_file(file):
            raise UsageError(f"{file!r} is not a file of a run")
        return self.connection.read(f"{self.directory}/{file}", start, length)


def is_run_file(name: str) -> bool:
    return name in (EVALS_FILE, *METADATA_FILES) or RECORD_FILE_PATTERN.fullmatch(name) is not None


def _without_default_run(parts: list[str]) -> list[str]:
    return parts[:-1] if parts[-1] == DEFAULT_RUN and len(parts) > 1 else parts


def _is_expected_record_path(name: str) -> bool:
    """Whether a path that the remote listed can be one that was searched for."""
    parts = name.split("/")
    return parts[-1] == RECORD_FILE and len(parts) <= MAX_DEPTH + 1 and not {"", ".", ".."} & set(parts)


def find_runs(targets: list[str], ssh: str = "ssh") -> list[RunLocation]:
    """The runs in or below each target: a run, a workspace, or a directory of either. Their names differ."""
    locations = [location for target in dict.fromkeys(targets) for location in _runs_of(target, ssh)]
    while True:
        counts = Counter(location.name for location in locations)
        lengthened = [location.lengthen_name() for location in locations if counts[location.name] > 1]
        if not any(lengthened):
            return list(locations)


def _runs_of(target: str, ssh: str) -> Sequence[LocalRunLocation | SshRunLocation]:
    """The runs below a target, sorted; the name of each is its path below the target."""
    locations: Sequence[LocalRunLocation | SshRunLocation]
    if target.startswith("ssh://"):
        address, path = parse_address(target)
        connection = SshConnection(address, ssh)
        listed = connection.find_files(path, RECORD_FILE, MAX_DEPTH, list(UNSEARCHED_PATTERNS))
        below = sorted(name.split("/")[:-1] for name in listed if _is_expected_record_path(name))
        locations = [SshRunLocation(connection, "/".join([path, *parts]), _name_parts(parts)) for parts in below]
    else:
        top = Path(target)
        directories = find_directories(top, RECORD_FILE)
        locations = [LocalRunLocation(path, _name_parts(path.relative_to(top).parts)) for path in directories]
    if not locations:
        raise UsageError(f"no run in {target}: there is no {RECORD_FILE}, which 'z2a train' writes")
    return locations


def _name_parts(below: Sequence[str]) -> int:
    """The number of parts in the name of a run at this path below the target; at least the target's own name."""
    return max(1, len(_without_default_run([".", *below])) - 1)
