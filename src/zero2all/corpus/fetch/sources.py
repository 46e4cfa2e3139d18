"""What the user names to download, and the files behind it.

A repository of the Hugging Face Hub, or of a mirror, is listed with ``huggingface_hub``. The library trusts the server:
it follows links of the listing to any host, to any number of pages, and waits as long as it is told. So it gets the
client of ``zero2all.base.network.http_client``, and what it returns is checked.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote

import httpx2
from pydantic import Field

from zero2all import __version__
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.network.http_client import MAX_REPLY_BYTES, Backoff, HttpClient, HttpError, split_url
from zero2all.base.records import parse_record
from zero2all.base.redact import is_redacted, redact
from zero2all.corpus.fetch.download import run_all
from zero2all.corpus.fetch.remote_file import RemoteFile, probe_file
from zero2all.recipe import SourceRecipe
from zero2all.recipe.source_names import to_source_name

MAX_FILES = 1_000_000
MAX_PAGES = 10_000  # the Hub lists 1,000 files per page
HUB_ENDPOINT = "https://huggingface.co"
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_SOURCE = re.compile(rf"hf://(?P<datasets>datasets/)?(?P<repository>{_NAME}(?:/(?P<name>{_NAME}))?)(?:/(?P<path>.+))?")


@dataclass(frozen=True)
class FileSelection:
    """Globs over the paths of files in a source. A directory stands for all below it."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __contains__(self, path: str) -> bool:
        is_included = not self.include or _matches(path, self.include)
        return is_included and not _matches(path, self.exclude)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(path, one) or fnmatchcase(path, f"{one.rstrip('/')}/*") for one in patterns)


@dataclass(frozen=True)
class FetchOptions:
    selection: FileSelection = field(default_factory=FileSelection)
    endpoint: str = HUB_ENDPOINT
    """URL of the Hugging Face Hub, or of a mirror."""
    token: str | None = field(default=None, repr=False)
    """For private and gated repositories; it is sent to the endpoint only."""
    revision: str = "main"
    """Branch, tag or commit on the Hub."""
    workers: int = 8
    """Files that are downloaded at the same time."""
    sha256: str | None = None
    """Expected checksum of the only file."""
    max_size: int | None = None
    """Largest file that is accepted."""
    timeout: float = 30.0
    """Seconds to wait for a connection or for data."""

    def __post_init__(self) -> None:
        split_url(self.endpoint)
        if self.token and not re.fullmatch(r"[!-~]{1,1024}", self.token):
            raise Z2aError("HF_TOKEN has characters that no token has: set it again, or unset it")

    @property
    def hub_url(self) -> str:
        return self.endpoint.rstrip("/")

    def client(self, pages: _Pages | None = None) -> HttpClient:
        """For downloads, or with ``pages`` for a listing."""
        client = partial(HttpClient, self.timeout, endpoint=self.hub_url, token=self.token)
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


def list_repository(source: HubSource, options: FetchOptions, stop: threading.Event) -> list[RemoteFile]:
    """Every file of a source, at the commit that the revision is now."""
    from huggingface_hub import hf_hub_url

    try:
        listed = Backoff(source.text, stop).retry(lambda: _list_files(source, options))
    except HttpError as error:
        if error.status not in (401, 403, 404):
            raise
        raise HttpError(
            f"{source.text}: {options.hub_url} has no such repository and revision ({options.revision}), or it is "
            "private or gated: accept its terms there and set HF_TOKEN to a token that may read it"
        ) from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise HttpError(f"{source.text}: {options.hub_url} sent no valid list of files ({error!r:.100})") from error
    return [
        RemoteFile(
            source=source.text,
            url=hf_hub_url(
                source.repository, file.path, repo_type=source.kind, revision=file.commit, endpoint=options.hub_url
            ),
            path=f"{source.directory}/{file.path}",
            size=file.size,
            validator=file.validator,
            revision=file.commit,
        )
        for file in listed
        if source.contains(file.path)
    ]


def _list_files(source: HubSource, options: FetchOptions) -> list[_ListedFile]:
    from huggingface_hub import HfApi, RepoFile

    # Without the token, which only our client knows and only sends to the endpoint.
    api = HfApi(options.hub_url, token=False, library_name="zero2all", library_version=__version__)
    listed: list[_ListedFile] = []
    with _session(options.client(_Pages(source.text))):
        info = api.repo_info(source.repository, repo_type=source.kind, revision=options.revision, expand="sha")
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


# About a dataset, not part of it.
_CARD_FILES = ("README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "dataset_infos.json")


@dataclass(frozen=True)
class WebSource:
    """One file on a web server."""

    url: str

    @classmethod
    def parse(cls, text: str) -> WebSource:
        split_url(text)
        if is_redacted(text):
            raise UsageError(f"{text}: its secret was redacted when this was saved; give the URL with the secret")
        source = cls(text)
        if not source.name:
            raise UsageError(f"{text}: the URL has no file name")
        return source

    @property
    def text(self) -> str:
        return redact(self.url)

    @property
    def name(self) -> str:
        """The last part of the path. Names in headers are not used: they are the server's choice."""
        return unquote(split_url(self.url).path.rpartition("/")[2])


Source = HubSource | WebSource


def parse_source(text: str) -> Source:
    if text.startswith("hf://"):
        return HubSource.parse(text)
    if text.startswith(("http://", "https://")):
        return WebSource.parse(text)
    raise UsageError(f"{text}: write hf://datasets/OWNER/NAME, hf://OWNER/NAME or an http(s) URL")


def list_selected(
    sources: list[Source], options: FetchOptions, client: HttpClient, stop: threading.Event
) -> list[RemoteFile]:
    """The selected files of all sources, in order. Names of files are not checked yet."""
    found: dict[Source, list[RemoteFile]] = {
        source: _hub_files(source, options, stop) if isinstance(source, HubSource) else []
        for source in dict.fromkeys(sources)
    }

    def probe(source: WebSource) -> None:
        found[source] = [probe_file(client, stop, source.text, source.url, source.name)]

    web = [source for source in found if isinstance(source, WebSource) and source.name in options.selection]
    run_all([partial(probe, source) for source in web], options.workers, stop)
    selected = [file for files in found.values() for file in files]
    if not selected:
        raise UsageError("no file is selected by --include and --exclude")
    return selected


def _hub_files(source: HubSource, options: FetchOptions, stop: threading.Event) -> list[RemoteFile]:
    files = list_repository(source, options, stop)
    selected = [one for one in files if one.path.removeprefix(f"{source.directory}/") in options.selection]
    if not selected:
        raise UsageError(_nothing_selected(source, files))
    return selected


def _nothing_selected(source: HubSource, files: list[RemoteFile]) -> str:
    if not files:
        return f"{source.text}: no file there"
    examples = ", ".join(file.path.removeprefix(f"{source.directory}/") for file in files[:5])
    more = f" and {len(files) - 5} more" if len(files) > 5 else ""
    return f"{source.text}: no file is selected by --include and --exclude; there are {examples}{more}"


def recipe_sources(sources: list[str], files: list[RemoteFile], to: Path) -> list[SourceRecipe]:
    """One source for each dataset, and one for all files from web servers. Models are not text."""
    parsed = [parse_source(text) for text in dict.fromkeys(sources)]
    found = [
        _dataset_source(source, files, to)
        for source in parsed
        if isinstance(source, HubSource) and source.kind == "dataset"
    ]
    web = {source.text for source in parsed if isinstance(source, WebSource)}
    if paths := [str(to / file.path) for file in files if file.source in web]:
        found.append(SourceRecipe(name=to_source_name(to.resolve().name), paths=paths))
    return found


def _dataset_source(source: HubSource, files: list[RemoteFile], to: Path) -> SourceRecipe:
    paths = {file.path.removeprefix(f"{source.directory}/") for file in files if file.source == source.text}
    cards = [*_CARD_FILES, f"{source.directory}.py"]  # the last is a loading script
    exclude = [] if source.path else [name for name in cards if name in paths]
    return SourceRecipe(
        name=to_source_name(source.directory), paths=[str(to / source.directory / source.path)], exclude=exclude
    )
