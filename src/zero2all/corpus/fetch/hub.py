"""Listing a repository of the Hugging Face Hub, or of a mirror, over its HTTP API."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import orjson
from pydantic import Field

from zero2all.corpus.fetch.http_client import FetchError, HttpClient, Response, TransientError
from zero2all.corpus.fetch.remote_file import RemoteFile
from zero2all.corpus.fetch.retry import Backoff
from zero2all.errors import UsageError, Z2aError
from zero2all.records import Record, parse_record

MAX_ANSWER_BYTES = 64 << 20
MAX_FILES = 1_000_000
MAX_PAGES = 10_000  # the Hub lists 1,000 files per page
_NEXT_PAGE = re.compile(r"<([^<>]{1,4096})>\s*;\s*rel=\"?next\"?")
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_SOURCE = re.compile(rf"hf://(?P<datasets>datasets/)?(?P<repository>{_NAME}(?:/(?P<name>{_NAME}))?)(?:/(?P<path>.+))?")
Size = Annotated[int, Field(ge=0, lt=1 << 62)]


@dataclass(frozen=True)
class LfsInfo:
    oid: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    size: Size


@dataclass(frozen=True)
class TreeEntry:
    type: str
    path: str
    oid: Annotated[str, Field(pattern="^[0-9a-f]{40,64}$")]
    size: Size = 0
    lfs: LfsInfo | None = None

    @property
    def validator(self) -> str:
        return f"sha256:{self.lfs.oid}" if self.lfs else f"git-blob:{self.oid}"


@dataclass(frozen=True)
class RevisionInfo:
    sha: Annotated[str, Field(pattern="^[0-9a-f]{40,64}$")]


@dataclass(frozen=True)
class HubSource:
    """``hf://datasets/OWNER/NAME/path`` or ``hf://OWNER/NAME/path``; the path is a file or a directory, or empty."""

    text: str
    kind: Literal["datasets", "models"]
    repository: str
    path: str

    @classmethod
    def parse(cls, text: str) -> HubSource:
        if "@" in text:
            raise UsageError(f"{text}: give the revision with --revision")
        match = _SOURCE.fullmatch(text.rstrip("/"))
        if match is None or match["repository"] == "datasets":
            raise UsageError(f"{text}: write hf://datasets/OWNER/NAME for a dataset, hf://OWNER/NAME for a model")
        return cls(text, "datasets" if match["datasets"] else "models", match["repository"], match["path"] or "")

    @property
    def directory(self) -> str:
        """Where its files go, below the directory of the download."""
        return self.repository.rpartition("/")[2]

    def contains(self, path: str) -> bool:
        return not self.path or path == self.path or path.startswith(f"{self.path}/")


@dataclass(frozen=True)
class Hub:
    client: HttpClient
    stop: threading.Event

    def list_files(self, source: HubSource, revision: str) -> list[RemoteFile]:
        """Every file of a source, at the commit that the revision is now."""
        place = f"{source.kind}/{source.repository}"
        try:
            answer, _ = self._read(RevisionInfo, f"{self._api(place)}/revision/{quote(revision, safe='')}")
        except FetchError as error:
            if error.status not in (401, 403, 404):
                raise
            raise FetchError(
                f"{source.text}: {self.client.endpoint} has no such repository and revision ({revision}), or it is "
                "private or gated: accept its terms there and set HF_TOKEN to a token that may read it"
            ) from error
        prefix = source.repository if source.kind == "models" else place
        files = self.client.endpoint + f"/{prefix}/resolve/{answer.sha}/"
        return [
            RemoteFile(
                source=source.text,
                url=files + quote(entry.path),
                path=f"{source.directory}/{entry.path}",
                size=entry.lfs.size if entry.lfs else entry.size,
                validator=entry.validator,
                revision=answer.sha,
            )
            for entry in self._list_tree(place, answer.sha)
            if entry.type == "file" and source.contains(entry.path)
        ]

    def _list_tree(self, place: str, commit: str) -> Iterator[TreeEntry]:
        cursor, count, seen = "", 0, {""}
        while True:
            query = urlencode({"recursive": "true", **({"cursor": cursor} if cursor else {})})
            entries, response = self._read(list[TreeEntry], f"{self._api(place)}/tree/{commit}?{query}")
            yield from entries
            count += len(entries)
            cursor = _next_cursor(response)
            if not cursor:
                return
            if cursor in seen or count > MAX_FILES or len(seen) == MAX_PAGES:
                raise FetchError(f"{place}: the list of its files does not end ({count} files)")
            seen.add(cursor)

    def _api(self, place: str) -> str:
        return f"{self.client.endpoint}/api/{place}"

    def _read(self, record: type[Record], url: str) -> tuple[Record, Response]:
        backoff = Backoff(url, self.stop)
        while True:
            try:
                with self.client.get(url, {"Accept": "application/json"}) as response:
                    body = response.read_all(MAX_ANSWER_BYTES)
                    return parse_record(record, orjson.loads(body), url), response
            except orjson.JSONDecodeError:
                backoff.wait(TransientError("the answer is not JSON"))
            except TransientError as error:
                backoff.wait(error)


def _next_cursor(response: Response) -> str:
    """Where the list continues. Only the position is taken from the link: mirrors give links to the original Hub."""
    match = _NEXT_PAGE.search(response.headers.get("Link", ""))
    return parse_qs(urlsplit(match[1]).query).get("cursor", [""])[0] if match else ""


def check_token(token: str) -> str:
    """A token as it goes into a header. The error does not show it."""
    if not re.fullmatch(r"[!-~]{1,1024}", token):
        raise Z2aError("HF_TOKEN has characters that no token has: set it again, or unset it")
    return token
