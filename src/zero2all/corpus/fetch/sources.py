"""What the user names to download, and the files behind it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from urllib.parse import unquote

from zero2all.corpus.fetch.http_client import HttpClient, split_url
from zero2all.corpus.fetch.hub import Hub, HubSource
from zero2all.corpus.fetch.jobs import Job, run_jobs
from zero2all.corpus.fetch.remote_file import ProbedUrl, RemoteFile
from zero2all.errors import UsageError
from zero2all.redact import is_redacted, redact


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
    stop: threading.Event
    revision: str
    workers: int
    selection: FileSelection

    def list_files(self, sources: list[Source]) -> list[RemoteFile]:
        """The selected files of all sources, in order. Names of files are not checked yet."""
        hub = Hub(self.client, self.stop)
        found: dict[Source, list[RemoteFile]] = {
            source: hub.list_files(source, self.revision) if isinstance(source, HubSource) else []
            for source in dict.fromkeys(sources)
        }
        web = [source for source in found if isinstance(source, WebSource) and source.name in self.selection]
        run_jobs([self._probe_job(source, found) for source in web], self.workers, self.stop)
        for source, files in found.items():
            if isinstance(source, HubSource):
                found[source] = [
                    one for one in files if one.path.removeprefix(f"{source.directory}/") in self.selection
                ]
                if not found[source]:
                    raise UsageError(_nothing_selected(source, files))
        selected = [file for files in found.values() for file in files]
        if not selected:
            raise UsageError("no file is selected by --include and --exclude")
        return selected

    def _probe_job(self, source: WebSource, found: dict[Source, list[RemoteFile]]) -> Job:
        def probe() -> list[Job]:
            probed = ProbedUrl.of(self.client, source.url, self.stop)
            found[source] = [
                RemoteFile(
                    source=source.text,
                    url=source.url,
                    path=source.name,
                    size=probed.size,
                    validator=probed.validator,
                    accepts_ranges=probed.accepts_ranges,
                    has_strong_validator=probed.has_strong_validator,
                )
            ]
            return []

        return probe


def _nothing_selected(source: HubSource, files: list[RemoteFile]) -> str:
    if not files:
        return f"{source.text}: no file there"
    examples = ", ".join(file.path.removeprefix(f"{source.directory}/") for file in files[:5])
    more = f" and {len(files) - 5} more" if len(files) > 5 else ""
    return f"{source.text}: no file is selected by --include and --exclude; there are {examples}{more}"
