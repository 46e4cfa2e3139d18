"""What the user names to download, and the files behind it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from zero2all.corpus.fetch.download import run_all
from zero2all.corpus.fetch.hub import HubAccess, HubSource, list_repository
from zero2all.corpus.fetch.remote_file import RemoteFile, probe_file
from zero2all.errors import UsageError
from zero2all.http_client import HttpClient, split_url
from zero2all.recipe import SourceRecipe
from zero2all.recipe.source_names import to_source_name
from zero2all.redact import is_redacted, redact

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
class SourceLister:
    client: HttpClient
    hub: HubAccess
    stop: threading.Event
    revision: str
    workers: int
    selection: FileSelection

    def list_files(self, sources: list[Source]) -> list[RemoteFile]:
        """The selected files of all sources, in order. Names of files are not checked yet."""
        found: dict[Source, list[RemoteFile]] = {
            source: self._hub_files(source) if isinstance(source, HubSource) else []
            for source in dict.fromkeys(sources)
        }

        def probe(source: WebSource) -> None:
            found[source] = [probe_file(self.client, self.stop, source.text, source.url, source.name)]

        web = [source for source in found if isinstance(source, WebSource) and source.name in self.selection]
        run_all([partial(probe, source) for source in web], self.workers, self.stop)
        selected = [file for files in found.values() for file in files]
        if not selected:
            raise UsageError("no file is selected by --include and --exclude")
        return selected

    def _hub_files(self, source: HubSource) -> list[RemoteFile]:
        files = list_repository(source, self.revision, self.hub, self.stop)
        selected = [one for one in files if one.path.removeprefix(f"{source.directory}/") in self.selection]
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
