"""Documents as JSON lines and plain text: every document once, in files of a bounded size, complete or not at all."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from tests.corpus.builds import corpus_of, rows_of, source_of, texts_of, write_lines
from zero2all.base.io import sha256_file
from zero2all.base.tasks import TaskEngine
from zero2all.cli.corpus import app
from zero2all.corpus import build_corpus, corpus_export
from zero2all.corpus.corpus_export import ExportOptions, export_documents
from zero2all.corpus.ingest import document_texts


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    rows = [{"id": n, "title": f"标题{n}", "text": f"第{n}篇 text {n}\n" * (n % 7 + 1), "n": n} for n in range(200)]
    write_lines(root / "zh.jsonl", rows)
    (root / "odd.jsonl").write_text('{"text": "odd numbers, no line end", "x": NaN, "y": {"deep": [1, null, 1e400]}}\n')
    sources = (source_of(root / f"{name}.jsonl", name) for name in ("zh", "odd"))
    build_corpus(corpus_of(*sources, holdout=0.1, shard_size=5000), root / "documents")
    return root / "documents"


def read_lines(path: Path) -> list[dict[str, object]]:
    """Strictly: a constant that JSON does not have is an error."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    elif path.suffix == ".zst":
        data = pa.CompressedInputStream(io.BytesIO(data), "zstd").read()
    return [json.loads(line, parse_constant=pytest.fail) for line in data.decode().splitlines()]


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_json_lines_have_every_document_with_all_its_fields(
    documents: Path, tmp_path: Path, compression: corpus_export.Compression
) -> None:
    exported = export_documents(documents, tmp_path / "out", ExportOptions("jsonl", compression=compression))
    assert exported.documents == len(rows_of(documents)) == 201
    for split in ("train", "valid"):
        rows = [row for path in sorted((tmp_path / "out" / split).iterdir()) for row in read_lines(path)]
        expected = sorted(rows_of(documents, split), key=lambda row: row["gid"])
        found = sorted(rows, key=lambda row: str(row["gid"]))
        assert [{**row, "others": 0} for row in found] == [{**row, "others": 0} for row in expected]
        odd = [row["others"] for row in rows if row["data_src"] == "odd"]
        assert odd in ([], [{"x": None, "y": {"deep": [1, None, None]}}])
        assert all(row["others"] == {"n": int(str(row["id"]))} for row in rows if row["data_src"] == "zh")


def test_plain_text_is_the_texts_with_a_blank_line_between(documents: Path, tmp_path: Path) -> None:
    export_documents(documents, tmp_path / "out", ExportOptions("text"))
    texts = "".join(path.read_text() for path in sorted((tmp_path / "out" / "train").iterdir()))
    contents = texts_of(documents, "train")
    assert len(texts) == sum(len(content.removesuffix("\n")) + 2 for content in contents)
    assert all(content.removesuffix("\n") + "\n\n" in texts for content in contents)


def test_files_are_bounded_and_named_in_the_manifest(documents: Path, tmp_path: Path) -> None:
    exported = export_documents(
        documents, tmp_path / "out", ExportOptions("text", shard_size=1000), TaskEngine(workers=2)
    )
    files = {path.relative_to(tmp_path / "out").as_posix(): path for path in (tmp_path / "out").glob("*/*")}
    assert {name: sha256_file(path) for name, path in files.items()} == exported.files
    assert max(path.stat().st_size for path in files.values()) <= 1000
    assert sum(path.stat().st_size for path in files.values()) == exported.bytes
    assert "train/zh-00000.1.txt" in files
    alone = export_documents(documents, tmp_path / "alone", ExportOptions("text", shard_size=1))
    assert len(alone.files) == alone.documents  # a document is never divided


def test_an_export_is_kept_if_nothing_changed_and_made_again_if_something_did(documents: Path, tmp_path: Path) -> None:
    export_documents(documents, tmp_path / "out")
    (file,) = (path for path in (tmp_path / "out" / "train").glob("odd*"))
    before = file.stat().st_mtime_ns
    export_documents(documents, tmp_path / "out")
    assert file.stat().st_mtime_ns == before
    whole = file.read_bytes()
    file.write_bytes(b"damaged")
    export_documents(documents, tmp_path / "out")
    assert file.read_bytes() == whole
    export_documents(documents, tmp_path / "out", ExportOptions("text"))
    assert {path.suffix for path in (tmp_path / "out").glob("*/*")} == {".txt"}


def test_a_failed_export_leaves_what_was_there(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_documents(documents, tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}

    def fail(content: str) -> bytes:
        raise OSError("no more")

    monkeypatch.setattr(corpus_export, "_plain_text", fail)
    with pytest.raises(OSError, match="no more"):
        export_documents(documents, tmp_path / "out", ExportOptions("text"))
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_exported_can_be_a_source(documents: Path, tmp_path: Path) -> None:
    export_documents(documents, tmp_path / "out", ExportOptions(compression="zstd"))
    texts = sorted(document_texts([str(tmp_path / "out" / "train")]))
    assert texts == sorted(texts_of(documents, "train"))


def test_the_command_takes_a_recipe_or_the_documents(documents: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"corpus: {{dir: {documents}, sources: []}}\n")
    for number, source in enumerate((recipe, documents)):
        out = tmp_path / str(number)
        words = ["export", str(source), "--to", str(out), "--format", "text", "--shard-size", "2KB"]
        done = CliRunner().invoke(app, [*words, "--json"])
        assert json.loads(done.stdout)["documents"] == 201
        assert max(path.stat().st_size for path in out.glob("*/*")) <= 2000
    wrong = CliRunner().invoke(app, [*words, "--shard-size", "large"])
    assert wrong.exit_code == 2
    assert "200MB" in wrong.output
