"""Listing a repository of the Hugging Face Hub, or of a mirror, with ``huggingface_hub``.

The library trusts the server: it follows links of the listing to any host, to any number of pages, and waits as long as
it is told. So it gets the client of ``zero2all.http_client``, and what it returns is checked.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import httpx2
from pydantic import Field

from zero2all import __version__
from zero2all.corpus.fetch.remote_file import RemoteFile
from zero2all.errors import UsageError, Z2aError
from zero2all.http_client import MAX_REPLY_BYTES, Backoff, HttpClient, HttpError
from zero2all.records import parse_record

MAX_FILES = 1_000_000
MAX_PAGES = 10_000  # the Hub lists 1,000 files per page
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_SOURCE = re.compile(rf"hf://(?P<datasets>datasets/)?(?P<repository>{_NAME}(?:/(?P<name>{_NAME}))?)(?:/(?P<path>.+))?")


@dataclass(frozen=True)
class HubAccess:
    endpoint: str
    """URL of the Hub, or of a mirror."""
    token: str | None = field(repr=False)
    timeout: float

    def __post_init__(self) -> None:
        if self.token and not re.fullmatch(r"[!-~]{1,1024}", self.token):
            raise Z2aError("HF_TOKEN has characters that no token has: set it again, or unset it")

    def client(self, pages: _Pages | None = None) -> HttpClient:
        """For downloads, or with ``pages`` for a listing."""
        client = partial(HttpClient, self.timeout, endpoint=self.endpoint, token=self.token)
        return client() if pages is None else client(body_limit=MAX_REPLY_BYTES, on_response=pages.check)


@dataclass(frozen=True)
class HubSource:
    """``hf://datasets/OWNER/NAME/path`` or ``hf://OWNER/NAME/path``; the path is a file or a directory, or empty."""

    text: str
    kind: Literal["dataset", "model"]
    repository: str
    path: str

    @classmethod
    def parse(cls, text: str) -> HubSource:
        if "@" in text:
            raise UsageError(f"{text}: give the revision with --revision")
        match = _SOURCE.fullmatch(text.rstrip("/"))
        if match is None or match["repository"] == "datasets":
            raise UsageError(f"{text}: write hf://datasets/OWNER/NAME for a dataset, hf://OWNER/NAME for a model")
        return cls(text, "dataset" if match["datasets"] else "model", match["repository"], match["path"] or "")

    @property
    def directory(self) -> str:
        """Where its files go, below the directory of the download."""
        return self.repository.rpartition("/")[2]

    def contains(self, path: str) -> bool:
        return not self.path or path == self.path or path.startswith(f"{self.path}/")


@dataclass(frozen=True)
class _ListedFile:
    path: str
    size: Annotated[int, Field(ge=0, lt=1 << 62)]
    validator: Annotated[str, Field(pattern="^(sha256:[0-9a-f]{64}|git-blob:[0-9a-f]{40,64})$")]
    commit: Annotated[str, Field(pattern="^[0-9a-f]{40,64}$")]


def list_repository(source: HubSource, revision: str, access: HubAccess, stop: threading.Event) -> list[RemoteFile]:
    """Every file of a source, at the commit that the revision is now."""
    from huggingface_hub import hf_hub_url

    try:
        listed = Backoff(source.text, stop).retry(lambda: _list_files(source, revision, access))
    except HttpError as error:
        if error.status not in (401, 403, 404):
            raise
        raise HttpError(
            f"{source.text}: {access.endpoint} has no such repository and revision ({revision}), or it is "
            "private or gated: accept its terms there and set HF_TOKEN to a token that may read it"
        ) from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise HttpError(f"{source.text}: {access.endpoint} sent no valid list of files ({error!r:.100})") from error
    return [
        RemoteFile(
            source=source.text,
            url=hf_hub_url(
                source.repository, file.path, repo_type=source.kind, revision=file.commit, endpoint=access.endpoint
            ),
            path=f"{source.directory}/{file.path}",
            size=file.size,
            validator=file.validator,
            revision=file.commit,
        )
        for file in listed
        if source.contains(file.path)
    ]


def _list_files(source: HubSource, revision: str, access: HubAccess) -> list[_ListedFile]:
    from huggingface_hub import HfApi, RepoFile

    # Without the token, which only our client knows and only sends to the endpoint.
    api = HfApi(access.endpoint, token=False, library_name="zero2all", library_version=__version__)
    listed: list[_ListedFile] = []
    with _session(access.client(_Pages(source.text))):
        info = api.repo_info(source.repository, repo_type=source.kind, revision=revision, expand="sha")
        commit = info.sha
        for one in api.list_repo_tree(source.repository, recursive=True, revision=commit, repo_type=source.kind):
            if not isinstance(one, RepoFile):
                continue
            if len(listed) == MAX_FILES:
                raise HttpError(f"{source.text}: the list of its files does not end ({MAX_FILES} files)")
            size = one.lfs.size if one.lfs else one.size
            validator = f"sha256:{one.lfs.sha256}" if one.lfs else f"git-blob:{one.blob_id}"
            fields = {"path": one.path, "size": size, "validator": validator, "commit": commit}
            listed.append(parse_record(_ListedFile, fields, source.text))
    return listed


@contextmanager
def _session(client: HttpClient) -> Iterator[None]:
    """``huggingface_hub`` has one client per process."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    before = _http._GLOBAL_CLIENT_FACTORY
    set_client_factory(lambda: client)
    try:
        yield
    finally:
        set_client_factory(before)


@dataclass(frozen=True)
class _Pages:
    """The pages of a listing: each is new, and all are at one server."""

    name: str
    cursors: set[str] = field(default_factory=set)

    def check(self, response: httpx2.Response) -> None:
        link = response.links.get("next", {}).get("url")
        if link is None:
            return
        cursor = httpx2.URL(link).params.get("cursor", "")
        if cursor in self.cursors or len(self.cursors) + 1 >= MAX_PAGES:
            raise HttpError(f"{self.name}: the list of its files does not end ({len(self.cursors) + 1} pages)")
        self.cursors.add(cursor)
        # Only the position is taken from the link: mirrors give links to the original Hub.
        here = response.request.url.copy_set_param("cursor", cursor)
        response.headers["Link"] = f'<{here}>; rel="next"'
