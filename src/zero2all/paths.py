"""Paths that are on this machine's disks, or in an object store such as S3.

``to_path("s3://bucket/documents")`` gives a path with the words of ``pathlib`` that our stages use; every other text
gives a plain ``Path``. Keys and endpoint come from where every S3 tool takes them: ``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY``, ``AWS_ENDPOINT_URL``, ``~/.aws``, or the role of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path, PosixPath
from typing import Any, NoReturn

from zero2all.errors import Z2aError, need

BLOCK = 8 << 20  # read ahead of a remote file


def is_url(path: str) -> bool:
    return "://" in path


def to_path(text: str | Path) -> Path:
    """
    >>> to_path("s3://bucket/documents") / "manifest.json"
    RemotePath('s3://bucket/documents/manifest.json')
    """
    return RemotePath(text) if isinstance(text, str) and is_url(text) else Path(text)


def store_of(url: str) -> tuple[Any, str]:
    """The fsspec file system that a URL is in, and the URL's name there."""
    # Listings are never remembered: other processes write to the same place.
    found: tuple[Any, str] = need("fsspec", "corpus").core.url_to_fs(url, use_listings_cache=False)
    return found


@contextmanager
def plain_errors(url: str) -> Iterator[None]:
    """Refused keys and a store that does not answer become one line that says what to set, without what was set."""
    try:
        yield
    except PermissionError as error:
        raise Z2aError(
            f"the store refuses access to {url}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to keys that may read "
            "and write there, and AWS_ENDPOINT_URL where it is not Amazon's"
        ) from error
    except Exception as error:
        # Of botocore, which has its own errors for these and is not imported before a store is used.
        match type(error).__name__:
            case "NoCredentialsError" | "PartialCredentialsError":
                raise Z2aError(f"no keys for {url}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
            case "EndpointConnectionError" | "ConnectTimeoutError" | "ConnectionClosedError":
                raise Z2aError(f"no store answers for {url}: is AWS_ENDPOINT_URL right?") from error
        raise


class RemotePath(PosixPath):
    """A path in an object store. It does only what is written here: anything else would look at the local disk."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self} is not on this machine; use zero2all.paths and zero2all.io")

    def absolute(self) -> RemotePath:
        return self

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        with self._store() as (store, name):
            return bool(store.exists(name))

    def read_bytes(self) -> bytes:
        return self.read_range(None, None)

    def read_range(self, start: int | None, stop: int | None) -> bytes:
        """The bytes from start to stop, or as many as there are, in one request."""
        with self._store() as (store, name):
            data: bytes = store.cat_file(name, start=start, end=stop)
            return data

    def read_text(self, encoding: str | None = "utf-8", errors: str | None = None) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def unlink(self, missing_ok: bool = False) -> None:
        with self._store() as (store, name):
            if missing_ok or store.exists(name):
                store.rm_file(name)
            else:
                raise FileNotFoundError(str(self))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """An object store has no directories: a name is there when something is put below it."""

    def objects(self) -> list[RemotePath]:
        """All objects below, at any depth."""
        with self._store() as (store, name):
            return [RemotePath(store.unstrip_protocol(inner)) for inner in store.find(name)]

    def open_bytes(self) -> BufferedIOBase:
        with self._store() as (store, name):
            stream: BufferedIOBase = store.open(name, "rb", block_size=BLOCK, cache_type="readahead")
            return stream

    def put(self, local: Path) -> None:
        """Make this object a copy of a local file: all of it, or nothing."""
        with self._store() as (store, name):
            store.put_file(str(local), name)

    @contextmanager
    def _store(self) -> Iterator[tuple[Any, str]]:
        with plain_errors(str(self)):
            yield store_of(str(self))


def open_bytes(path: Path) -> BufferedIOBase:
    """A file to read, wherever it is."""
    return path.open_bytes() if isinstance(path, RemotePath) else open(path, "rb")


def arrow_source(path: Path) -> Path | BufferedIOBase:
    """What Arrow reads a file from: its path, or a stream where Arrow cannot reach it by itself."""
    return path.open_bytes() if isinstance(path, RemotePath) else path
