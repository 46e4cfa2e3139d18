"""Downloads from the Hub: listing, revisions, checksums, the token, hostile repositories."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import get_session

from tests.corpus.download_server import Content, FakeHub, Page, Readable, Server, Text, send_page, serving
from tests.corpus.test_fetch import entries, files_in, quick  # noqa: F401
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.network.http_client import HttpClient
from zero2all.base.tasks import TaskEngine
from zero2all.cli.main import app
from zero2all.corpus import build_corpus
from zero2all.corpus.fetch import FetchOptions, FetchResult, fetch_files, list_files
from zero2all.corpus.fetch import sources as hub_module
from zero2all.corpus.fetch.sources import FileSelection, HubSource
from zero2all.recipe import load_recipe

TOKEN = "hf_averysecrettoken"
SOURCE = "hf://datasets/someone/stories"


@pytest.fixture
def store() -> Iterator[Server]:
    with serving(Server()) as one:
        yield one


@pytest.fixture
def hub(store: Server) -> Iterator[FakeHub]:
    with serving(FakeHub(store, "datasets/someone/stories", TOKEN)) as one:
        yield one


def fetch(hub: FakeHub, to: Path, source: str = SOURCE, **options: Any) -> FetchResult:
    given = {"endpoint": hub.url, "token": TOKEN, "timeout": 20.0} | options
    return fetch_files([source], to, FetchOptions(**given))


def select(include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> FileSelection:
    return FileSelection(include, exclude)


def fill(hub: FakeHub) -> dict[str, bytes]:
    """Five files on three pages of the listing."""
    hub.tree.append({"type": "directory", "path": "data", "oid": "0" * 40, "size": 0})
    contents: dict[str, Readable] = {
        "README.md": Text(b"# Stories\n"),
        "data/en/0.bin": Content(300_000),
        "data/en/1.bin": Content(200_000, seed=1),
        "data/zh/0.bin": Content(100_000, seed=2),
        "data/空 格+%.bin": Content(1000, seed=3),
    }
    for path, content in contents.items():
        hub.add_file(path, content, lfs=path != "README.md")
    return {f"stories/{path}": content.read(0, content.size) for path, content in contents.items()}


def test_a_repository_arrives_page_by_page_and_the_token_stays_with_the_hub(
    hub: FakeHub, store: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = fill(hub)
    with serving(Server()) as elsewhere:
        hub.next_host = elsewhere.url  # as mirrors do, which pass on the links of the original
        result = fetch(hub, tmp_path)
        assert not elsewhere.seen
    assert files_in(tmp_path) == wanted
    assert result.files == 5
    assert {one.headers.get("Authorization") for one in hub.seen} == {f"Bearer {TOKEN}"}
    assert len(store.seen) == 4
    assert not any("Authorization" in one.headers for one in store.seen)
    entry = entries(tmp_path)["stories/data/en/0.bin"]
    assert entry["revision"] == hub.COMMIT
    assert entry["url"] == f"{hub.url}/datasets/someone/stories/resolve/{hub.COMMIT}/data/en/0.bin"
    assert entry["source"] == SOURCE
    said = capsys.readouterr()
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert TOKEN not in said.out + said.err
    assert TOKEN.encode() not in kept


@pytest.mark.parametrize(
    ("source", "selection", "wanted"),
    [
        (SOURCE, select(include=("data/en/*",)), ["data/en/0.bin", "data/en/1.bin"]),
        (SOURCE, select(include=("data/en",)), ["data/en/0.bin", "data/en/1.bin"]),
        (SOURCE, select(include=("*.bin",), exclude=("*/0.bin", "data/空*")), ["data/en/1.bin"]),
        (SOURCE, select(exclude=("data/",)), ["README.md"]),
        (f"{SOURCE}/data/zh", select(), ["data/zh/0.bin"]),
        (f"{SOURCE}/data/en/0.bin", select(), ["data/en/0.bin"]),
    ],
)
def test_only_the_selected_files_are_downloaded(
    source: str, selection: FileSelection, wanted: list[str], hub: FakeHub, tmp_path: Path
) -> None:
    fill(hub)
    fetch(hub, tmp_path, source, selection=selection)
    assert sorted(files_in(tmp_path)) == [f"stories/{path}" for path in wanted]


def test_no_selected_file_is_an_error_that_names_some(hub: FakeHub, tmp_path: Path) -> None:
    fill(hub)
    with pytest.raises(UsageError, match=r"no file is selected .*; there are README.md, data/en/0.bin"):
        fetch(hub, tmp_path, selection=select(include=("*.parquet",)))
    with pytest.raises(UsageError, match="no file there"):
        fetch(hub, tmp_path, f"{SOURCE}/dat")


def test_a_model_has_urls_without_a_prefix(store: Server, tmp_path: Path) -> None:
    with serving(FakeHub(store, "models/someone/gpt")) as hub:
        hub.add_file("config.json", Text(b"{}"), lfs=False)
        hub.add_file("model.safetensors", Content(5000))
        result = fetch(hub, tmp_path, "hf://someone/gpt", token=None)
        assert sorted(files_in(tmp_path)) == ["gpt/config.json", "gpt/model.safetensors"]
        assert result.sources == []
        assert not any("Authorization" in one.headers for one in hub.seen)


@pytest.mark.parametrize(
    ("lfs", "content", "endless", "message"),
    [
        (False, Content(200_000, seed=7), False, "its checksum is .* the file was rejected and removed"),
        (True, Content(200_000, seed=7), False, "its checksum is .* the file was rejected and removed"),
        (True, Content(199_999), False, "the server sends 199999 bytes, not 200000"),
        (True, Content(200_001), False, "the server sends 200001 bytes, not 200000"),
        (True, Content(100_000), True, "its checksum is"),  # an endless answer is read up to the listed size
    ],
)
def test_content_that_is_not_as_listed_is_refused_and_removed(
    lfs: bool, content: Content, endless: bool, message: str, hub: FakeHub, tmp_path: Path
) -> None:
    hub.add_file("good.bin", Content(5000))
    page = hub.add_file("a.bin", Content(200_000), lfs=lfs)
    page.content, page.endless = content, endless
    with pytest.raises(Z2aError, match=rf"1 of 2 files .*\n.*a.bin: {message}"):
        fetch(hub, tmp_path)
    assert list(files_in(tmp_path)) == ["stories/good.bin"]


def test_a_download_that_was_cut_resumes_at_a_new_url_of_the_hub(hub: FakeHub, store: Server, tmp_path: Path) -> None:
    """The URLs of the storage behind the Hub expire."""
    page = hub.add_file("a.bin", Content(2_000_000))
    page.cut_after, page.cuts = 600_000, 2
    fetch(hub, tmp_path)
    assert files_in(tmp_path) == {"stories/a.bin": Content(2_000_000).read(0, 2_000_000)}
    assert [one.headers.get("Range") for one in store.seen] == [None, "bytes=600000-", "bytes=1200000-"]
    assert len([one for one in hub.seen if "/resolve/" in one.path]) == 3


def test_a_download_that_failed_resumes_with_the_next_command(hub: FakeHub, store: Server, tmp_path: Path) -> None:
    page = hub.add_file("a.bin", Content(2_000_000))
    page.cut_after, page.cuts, page.first = 600_000, 1, [None, *[(500, {})] * 10]
    with pytest.raises(Z2aError, match=r"status 500 from 127.0.0.1, 6 times in a row"):
        fetch(hub, tmp_path)
    page.first = []
    fetch(hub, tmp_path)
    assert files_in(tmp_path) == {"stories/a.bin": Content(2_000_000).read(0, 2_000_000)}
    assert store.seen[-1].headers["Range"] == "bytes=600000-"


def test_files_of_another_program_are_adopted_if_their_checksum_proves_them(hub: FakeHub, tmp_path: Path) -> None:
    wanted = fill(hub)
    for path, content in wanted.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    assert fetch(hub, tmp_path).downloaded_files == 0
    assert len(entries(tmp_path)) == 5


def test_a_mirror_downloads_nothing_again_and_a_new_commit_only_what_changed(
    hub: FakeHub, store: Server, tmp_path: Path
) -> None:
    fill(hub)
    fetch(hub, tmp_path)
    with serving(FakeHub(store, "datasets/someone/stories")) as mirror:
        mirror.COMMIT = "beef" + "0" * 36  # type: ignore[misc]
        mirror.tree = hub.tree
        assert fetch(mirror, tmp_path).downloaded_files == 0
    hub.tree = [one for one in hub.tree if one["path"] != "data/zh/0.bin"]
    hub.add_file("data/zh/0.bin", Content(100_000, seed=9))
    result = fetch(hub, tmp_path)
    assert (result.downloaded_files, result.downloaded_bytes) == (1, 100_000)
    assert files_in(tmp_path)["stories/data/zh/0.bin"] == Content(100_000, seed=9).read(0, 100_000)


HOSTILE = [
    "../outside.txt", "a/../../outside.txt", "/etc/outside.txt", "a\\..\\outside.txt", "C:\\outside.txt", "..",
    "a//b", "./a", "a/.", "", "x" * 256, "/".join(["x" * 200] * 20), "line\nbreak", "bell\x07", "esc\x1b[2J", "del\x7f",
    "right\u202eto-left", "c1\x9b",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_name_downloads_nothing(name: str, hub: FakeHub, store: Server, tmp_path: Path) -> None:
    hub.add_file("good.bin", Content(500))
    hub.add_file(name, Content(500))
    to = tmp_path / "inner" / "to"
    with pytest.raises(UsageError, match=r"the server names a file .*: nothing was downloaded"):
        fetch(hub, to)
    assert not list(tmp_path.iterdir())
    assert not store.seen
    fetch(hub, to, selection=select(include=("good.bin",)))
    assert list(files_in(tmp_path)) == ["inner/to/stories/good.bin"]


def test_files_in_hidden_directories_are_left_out(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (".git/hooks/post-checkout", ".GIT/config", "a/.vscode/tasks.json", ".gitattributes", "good.bin"):
        hub.add_file(name, Content(500))
    fetch(hub, tmp_path)
    assert sorted(files_in(tmp_path)) == ["stories/.gitattributes", "stories/good.bin"]
    assert "3 files in hidden directories are left out: stories/.git/hooks/post-checkout" in capsys.readouterr().err
    with pytest.raises(UsageError, match="in hidden directories"):
        fetch(hub, tmp_path, selection=select(include=(".git",)))


def test_a_file_and_a_directory_of_one_name_are_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.add_file("a", Content(500))
    hub.add_file("a/b", Content(500))
    with pytest.raises(UsageError, match="stories/a would be a file and a directory"):
        fetch(hub, tmp_path)
    hub.tree.pop()
    hub.add_file("a", Content(500))
    with pytest.raises(UsageError, match="two files would be written to stories/a"):
        fetch(hub, tmp_path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", "no valid list of files"),
        (b'{"error": "x"}', "no valid list of files"),
        (b'[{"type": "file", "path": "a", "size": -1, "oid": "' + b"0" * 40 + b'"}]', "greater than or equal to 0"),
        (b'[{"type": "file", "path": "a", "size": 1, "oid": "../x"}]', "match pattern"),
        (b'[{"type": "file", "path": 5, "size": 1, "oid": "' + b"0" * 40 + b'"}]', "valid string"),
        (b"[" * 100_000, "no valid list of files"),
    ],
    ids=["html", "object", "size", "checksum", "path", "deep"],
)
def test_a_damaged_listing_is_an_error(body: bytes, message: str, hub: FakeHub, tmp_path: Path) -> None:
    hub.answers[f"/api/datasets/someone/stories/tree/{hub.COMMIT}"] = body
    with pytest.raises(Z2aError, match=message):
        fetch(hub, tmp_path)


def test_a_listing_that_does_not_end_is_an_error(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same page again; and pages without a file, of which each names a cursor that none before it had."""
    fill(hub)
    same_page, original = {"recursive": ["true"]}, FakeHub._send_tree
    monkeypatch.setattr(FakeHub, "_send_tree", lambda self, request, query: original(self, request, same_page))
    with pytest.raises(Z2aError, match="the list of its files does not end"):
        fetch(hub, tmp_path)
    monkeypatch.setattr(hub_module, "MAX_PAGES", 20)
    asked: list[str] = []

    def send_empty_page(self: FakeHub, request: Any, query: dict[str, list[str]]) -> None:
        asked.append(query.get("cursor", [""])[0])
        if len(asked) > 50:
            request.plain(404, {})
        request.plain(200, {"Link": f'<{self.next_host}/?cursor={len(asked)}>; rel="next"'}, b"[]")

    monkeypatch.setattr(FakeHub, "_send_tree", send_empty_page)
    with pytest.raises(Z2aError, match="the list of its files does not end"):
        fetch(hub, tmp_path)
    assert len(asked) == 20


def answer_api_with(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, status: int, headers: dict[str, str]) -> None:
    real = hub.answer

    def answer(request: Any) -> None:
        if request.path.startswith("/api/"):
            request.plain(status, headers)
        else:
            real(request)

    monkeypatch.setattr(hub, "answer", answer)


def test_a_different_server_is_asked_without_the_token(
    hub: FakeHub, store: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named as the source, or by a redirect of the listing."""
    fetch(hub, tmp_path, store.add("/a.bin", Page(Content(100))))
    asked = len(store.seen)
    answer_api_with(hub, monkeypatch, 302, {"Location": f"{store.url}/api"})
    with pytest.raises(Z2aError, match="no such repository"):
        fetch(hub, tmp_path)
    assert len(store.seen) > asked > 0
    assert not any("Authorization" in one.headers for one in store.seen)


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (429, {"Retry-After": "4000"}, "the server asks to wait 1h06m"),
        (429, {"RateLimit": '"api";r=0;t=4000'}, "6 times in a row"),
        (503, {}, r"status 503 from 127.0.0.1, 6 times in a row"),
        (302, {"Location": "file:///etc/passwd"}, "is not http"),
        (302, {"Location": "/api/again"}, "more than 10 redirects"),
    ],
)
def test_no_answer_of_the_api_holds_up_the_command(
    status: int, headers: dict[str, str], message: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_api_with(hub, monkeypatch, status, headers)
    with pytest.raises(Z2aError, match=message):
        fetch(hub, tmp_path)
    assert len(hub.seen) <= 11


def test_a_listing_is_read_up_to_a_limit_and_not_decompressed(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked for compression, with which a short answer fills all memory."""
    monkeypatch.setattr(hub_module, "MAX_REPLY_BYTES", 1 << 20)
    endless, packed = Page(Content(1000), endless=True), gzip.compress(b"[]")
    answers: dict[str, Callable[[Any], None]] = {
        "the answer is longer than 1048576 bytes": lambda request: send_page(request, endless),
        "no valid list of files": lambda request: request.plain(200, {"Content-Encoding": "gzip"}, packed),
    }
    for message, answer in answers.items():
        monkeypatch.setattr(FakeHub, "_send_tree", lambda self, request, query, answer=answer: answer(request))
        with pytest.raises(Z2aError, match=message):
            fetch(hub, tmp_path)


def test_the_library_gets_its_own_client_back(hub: FakeHub, tmp_path: Path) -> None:
    fill(hub)
    before = type(get_session())
    fetch(hub, tmp_path)
    assert type(get_session()) is before is not HttpClient


def test_without_a_token_the_advice_is_to_set_one(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(
        Z2aError, match=r"no such repository and revision \(main\), or it is private or gated.*HF_TOKEN"
    ):
        fetch(hub, tmp_path, token=None)
    with pytest.raises(Z2aError, match="HF_TOKEN has characters") as error:
        fetch(hub, tmp_path, token="hf_secret\r\nHost: x")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("hf://datasets/o/n", ("dataset", "o/n", "")),
        ("hf://datasets/o/n/", ("dataset", "o/n", "")),
        ("hf://datasets/wikitext", ("dataset", "wikitext", "")),
        ("hf://datasets/o/n/a/b.txt", ("dataset", "o/n", "a/b.txt")),
        ("hf://o/n.x-1", ("model", "o/n.x-1", "")),
        ("hf://o/n/config.json", ("model", "o/n", "config.json")),
    ],
)
def test_sources_of_the_hub(text: str, wanted: tuple[str, str, str]) -> None:
    source = HubSource.parse(text)
    assert (source.kind, source.repository, source.path) == wanted


@pytest.mark.parametrize(
    "text",
    ["hf://", "hf://datasets", "hf://datasets/", "hf://../x", "hf://datasets/o/n@main", "s3://b/x", "/tmp/x", "x"],
)
def test_what_is_no_source_is_refused(text: str, hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"write hf://|--revision"):
        fetch(hub, tmp_path, text)


def test_the_printed_entry_builds_a_corpus_of_the_data_alone(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["the", "old", "ship", "sailed", "slowly", "over", "a", "calm", "sea", "while", "gulls", "cried", "above"]
    draw = random.Random(0)
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=80)) + "."}) for _ in range(40)]
    hub.add_file("README.md", Text(b"# A card, which is not part of the data. " + b"Some words. " * 40), lfs=False)
    hub.add_file("data/train.jsonl", Text("\n".join(lines).encode()))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        app(["corpus", "fetch", SOURCE, "--to", "raw", "--mirror", hub.url])
    printed = capsys.readouterr()
    assert TOKEN not in printed.out + printed.err
    entry = yaml.safe_load(printed.out.partition("for the recipe:\n")[2].partition("\n\n")[0])
    assert entry == {"corpus": {"sources": [{"name": "stories", "paths": ["raw/stories"], "exclude": ["README.md"]}]}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"name": "mine", "out": "out", **entry}))
    recipe = load_recipe(tmp_path / "mine.yaml", ["corpus.filters=[normalize]"])
    assert build_corpus(recipe.corpus, recipe.documents_dir, TaskEngine()).documents == 40


def test_sizes_are_listed_before_a_download(
    hub: FakeHub, store: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(hub)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}/")
    with pytest.raises(SystemExit):
        app(["corpus", "fetch", SOURCE, "--list", "--include", "data/en"])
    assert capsys.readouterr().out.splitlines() == [
        "   300KB  stories/data/en/0.bin",
        "   200KB  stories/data/en/1.bin",
        "   500KB  in 2 files",
    ]
    assert not store.seen
    files = list_files([SOURCE], FetchOptions(endpoint=hub.url, token=TOKEN))
    assert [file.size for file in files] == [10, 300_000, 200_000, 100_000, 1000]


def test_a_listed_checksum_that_is_not_the_wanted_one_downloads_nothing(
    hub: FakeHub, store: Server, tmp_path: Path
) -> None:
    hub.add_file("a.bin", Content(500))
    with pytest.raises(Z2aError, match="the Hub lists sha256:"):
        fetch(hub, tmp_path, sha256="0" * 64)
    assert not store.seen
    fetch(hub, tmp_path, sha256=Content(500).sha256())
    hub.add_file("b.bin", Content(500))
    with pytest.raises(UsageError, match="--sha256 is for one file, and there are 2"):
        fetch(hub, tmp_path, sha256=Content(500).sha256())
