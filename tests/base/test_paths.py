from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from zero2all.base.errors import RecipeError, Z2aError
from zero2all.base.paths import RemotePath, open_url, to_path
from zero2all.corpus import build_corpus
from zero2all.recipe import CorpusRecipe, SourceRecipe, parse_recipe, recipe_yaml

LINE = b'{"text": "a line of text that is long enough to be kept by every filter that there is here"}\n'
WHOLE = 2000 * LINE


class Unreliable(BaseHTTPRequestHandler):
    """Announces the full length, but closes the connection in the middle of ``/cut.jsonl``."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(WHOLE)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(WHOLE if self.path == "/whole.jsonl" else WHOLE[: len(WHOLE) // 2])

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    pytest.importorskip("aiohttp")
    with ThreadingHTTPServer(("127.0.0.1", 0), Unreliable) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_remote_path_has_the_methods_of_a_path_and_touches_no_disk() -> None:
    path = to_path("s3://bucket/documents")
    assert isinstance(path, RemotePath)
    assert str(path / "train" / "a.parquet") == "s3://bucket/documents/train/a.parquet"
    assert path.with_name(path.name + ".work") == to_path("s3://bucket/documents.work")
    assert (path / "a.parquet").with_suffix(".json").relative_to(path).as_posix() == "a.json"
    assert pickle.loads(pickle.dumps(path)) == path
    with pytest.raises(TypeError, match="not on this machine"):
        os.fspath(path)
    with pytest.raises(TypeError, match="not on this machine"):
        path.is_dir()
    assert type(to_path("runs/first")) is type(Path("runs/first"))


def test_only_documents_may_be_remote() -> None:
    recipe = parse_recipe("corpus: {dir: s3://bucket/documents}")
    assert recipe.documents_dir == to_path("s3://bucket/documents")
    assert parse_recipe(recipe_yaml(recipe)) == recipe
    for wrong in ("out: s3://bucket/run", "tokens: {dir: s3://bucket/tokens}", "tokenizer: {dir: s3://bucket/t}"):
        with pytest.raises(RecipeError, match="must be a local directory"):
            parse_recipe(wrong)
    with pytest.raises(RecipeError, match="below the bucket"):
        parse_recipe("corpus: {dir: s3://bucket}")


def test_a_store_that_fails_midway_is_not_a_damaged_file(web: str, tmp_path: Path) -> None:
    with open_url(f"{web}/whole.jsonl") as stream:
        assert stream.read() == WHOLE
    recipe = CorpusRecipe(sources=[SourceRecipe(name="web", paths=[f"{web}/cut.jsonl"])], filters=[])
    with pytest.raises(Z2aError, match=r"the store failed at .*cut.jsonl.* run the same command again"):
        build_corpus(recipe, tmp_path / "documents")
    assert not any((tmp_path / "documents.work" / "parts").glob("*"))
