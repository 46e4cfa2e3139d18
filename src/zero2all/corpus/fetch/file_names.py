"""Names of files that a server chooses: none leads out of the directory of a download."""

from __future__ import annotations

import re

from zero2all.errors import UsageError

MANIFEST_NAME = "fetch.json"
WORK_DIRECTORY = ".z2a-fetch"  # hidden, so that a corpus does not read it
MAX_NAME_BYTES = 255  # of one component, on every file system
MAX_PATH_BYTES = 2048
# Control characters, line separators, those that change the text direction, and lone surrogates.
_INVISIBLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def name_problem(path: str) -> str | None:
    """Why a relative path with forward slashes is not safe to write to."""
    if _INVISIBLE.search(path):
        return "has control characters"
    if "\\" in path:
        return "has a backslash"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "is not a plain relative path"
    if parts[0] in (WORK_DIRECTORY, MANIFEST_NAME):
        return "is a name that the download itself uses"
    if any(len(part.encode()) > MAX_NAME_BYTES for part in parts) or len(path.encode()) > MAX_PATH_BYTES:
        return "is too long"
    return None


def is_in_hidden_directory(path: str) -> bool:
    """Whether other programs may run or read a file as their own, such as ``.git/hooks/…``. Corpora skip these."""
    return any(part.startswith(".") and part not in (".", "..") for part in path.split("/")[:-1])


def check_paths(paths: list[str]) -> None:
    """Raise unless all files can be written side by side, each below one directory."""
    taken: set[str] = set()
    for path in paths:
        if problem := name_problem(path):
            raise UsageError(
                f"the server names a file {path[:200]!r}, which {problem}: nothing was downloaded; "
                "leave the file out with --exclude"
            )
        if path in taken:
            raise UsageError(f"two files would be written to {path}: download them to different directories (--to)")
        taken.add(path)
    for path in paths:
        parts = path.split("/")
        for above in ("/".join(parts[:length]) for length in range(1, len(parts))):
            if above in taken:
                raise UsageError(f"{above} would be a file and a directory: leave one of them out with --exclude")
