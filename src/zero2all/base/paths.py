"""Paths on local disks or in an object store such as S3.

``to_path("s3://bucket/documents")`` gives a path with the ``pathlib`` methods that our stages use; every other text
gives a plain ``Path``. Keys and endpoint come from where every S3 tool takes them: ``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY``, ``AWS_ENDPOINT_URL``, ``~/.aws``, or the role of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from pathlib import Path, PosixPath
from typing import Any, NoReturn

from zero2all.base.errors import UsageError, Z2aError, need
from zero2all.base.redact import is_redacted, redact

READ_BLOCK_BYTES = 8 << 20  # of one request to a store
READ_BUFFER_BYTES = 1 << 18  # between that and small reads
STORE_CLIENT_PACKAGES = {"botocore", "aiobotocore", "aiohttp"}  # packages whose errors are a store's or the network's


def config_directory() -> Path:
    """This user's directory for what outlives a run; on most clusters all nodes share it."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "zero2all"


def is_url(path: str) -> bool:
    return "://" in path


def to_path(text: str | Path) -> Path:
    """
    >>> to_path("s3://bucket/documents") / "manifest.json"
    RemotePath('s3://bucket/documents/manifest.json')
    """
    return RemotePath(text) if isinstance(text, str) and is_url(text) else Path(text)


def credentials_problem(url: str) -> str:
    """What is wrong with the credentials of a URL; empty if nothing. Stores take theirs from the environment only."""
    if url.startswith(("s3://", "s3a://")) and (redact(url) != url or is_redacted(url)):
        return "put no keys into it: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    return ""


def resolve_store(url: str) -> tuple[Any, str]:
    """The fsspec file system that a URL is in, and the URL's name there."""
    if problem := credentials_problem(url):
        raise UsageError(f"{url}: {problem}")
    if is_redacted(url):
        raise UsageError(f"{url}: its secret was redacted when this was saved; give the URL with the secret")
    # Listings are never cached: other processes write to the same location.
    store_and_name: tuple[Any, str] = need("fsspec", "corpus").core.url_to_fs(url, use_listings_cache=False)
    return store_and_name


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Turn refusals, failures and timeouts of a store into one line that names the remedy, without credentials."""
    try:
        yield
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise Z2aError(
            f"the store refuses access to {url}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to keys that may read "
            "and write there, and AWS_ENDPOINT_URL where it is not Amazon's"
        ) from error
    except Exception as error:
        kind = type(error).__name__
        if kind in ("NoCredentialsError", "PartialCredentialsError"):
            raise Z2aError(f"no keys for {url}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
        if kind == "EndpointConnectionError":
            raise Z2aError(f"no store answers for {url}: is AWS_ENDPOINT_URL correct?") from error
        if isinstance(error, OSError) or type(error).__module__.split(".")[0] in STORE_CLIENT_PACKAGES:
            raise Z2aError(
                f"the store failed at {url} ({kind}: {error}): what is finished is kept, so run the same command again"
            ) from error
        raise


class RemoteReader(RawIOBase):
    """A remote file to read. A failure of its store is never mistaken for a damaged file."""

    def __init__(self, url: str) -> None:
        self.url = url
        with store_errors(url):
            store, name = resolve_store(url)
            self._inner = store.open(name, "rb", block_size=READ_BLOCK_BYTES, cache_type="readahead")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._inner.seekable())

    def readinto(self, buffer: Any) -> int:
        with store_errors(self.url):
            block = self._inner.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._inner.seek(offset, whence))

    def tell(self) -> int:
        return int(self._inner.tell())

    def close(self) -> None:
        self._inner.close()
        super().close()


def open_url(url: str) -> BufferedReader:
    return BufferedReader(RemoteReader(url), READ_BUFFER_BYTES)


class RemotePath(PosixPath):
    """A path in an object store. It supports only the methods below: any other would access the local disk."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self} is not on this machine; use zero2all.base.paths and zero2all.base.io")

    def absolute(self) -> RemotePath:
        return self

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        with self._store() as (store, name):
            return bool(store.exists(name))

    def read_bytes(self) -> bytes:
        return self.read_range(None, None)

    def read_range(self, start: int | None, stop: int | None) -> bytes:
        """The bytes from start to stop, or to the end, in one request."""
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
        """A no-op: an object store has no directories."""

    def objects(self) -> list[RemotePath]:
        """All objects below, at any depth."""
        with self._store() as (store, name):
            found = store.find(name, detail=True)  # an empty directory finds itself
            return [RemotePath(store.unstrip_protocol(inner)) for inner in found if found[inner]["type"] == "file"]

    def children(self) -> list[str]:
        """The names directly below, in one request for each thousand, however many objects are below them."""
        with self._store() as (store, name):
            try:
                found = store.ls(name, detail=False)
            except FileNotFoundError:
                return []
            return [inner.rstrip("/").rpartition("/")[2] for inner in found if inner.rstrip("/") != name.rstrip("/")]

    def sizes_and_etags(self) -> dict[RemotePath, tuple[int, str | None]]:
        """All objects below, in one request for each thousand. An ETag changes with the content, where there is one."""
        with self._store() as (store, name):
            infos = store.find(name, detail=True)
            return {
                RemotePath(store.unstrip_protocol(inner)): (int(info["size"]), info.get("ETag") or None)
                for inner, info in infos.items()
            }

    def etag(self) -> str | None:
        """The same of one object."""
        with self._store() as (store, name):
            mark = store.info(name).get("ETag")
            return str(mark) if mark else None

    def size(self) -> int:
        with self._store() as (store, name):
            return int(store.size(name))

    def put(self, local: Path) -> None:
        """Upload a local file atomically."""
        with self._store() as (store, name):
            store.put_file(str(local), name)

    @contextmanager
    def _store(self) -> Iterator[tuple[Any, str]]:
        with store_errors(str(self)):
            yield resolve_store(str(self))


def remove_objects(paths: Sequence[RemotePath]) -> None:
    """Remove objects of one store, in one request for each thousand where the store can."""
    if paths:
        with store_errors(str(paths[0])):
            names = [resolve_store(str(path)) for path in paths]
            names[0][0].rm([name for _, name in names])


def open_bytes(path: Path) -> BufferedReader:
    """A file to read, wherever it is."""
    return open_url(str(path)) if isinstance(path, RemotePath) else open(path, "rb")


def arrow_source(path: Path) -> Path | BufferedReader:
    """What Arrow reads a file from: its path, or a stream for remote files."""
    return open_url(str(path)) if isinstance(path, RemotePath) else path
