"""Raw files and documents on a real S3 server: the same bytes as on a disk, also when the build is killed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.conftest import TINY
from tests.corpus.test_resume import KILLS, build_with_kills, contents, recipe_for, write_raw_with_copies
from tests.seaweed import SECRET_KEY
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import write_json
from zero2all.base.manifest import all_files, read_manifest
from zero2all.base.paths import RemotePath, arrow_source, to_path
from zero2all.base.tasks import TaskEngine
from zero2all.corpus import build_corpus
from zero2all.corpus.corpus_report import corpus_report
from zero2all.corpus.dedup.shuffle import rows_between, save_rows
from zero2all.recipe import CorpusRecipe, DedupRecipe, parse_recipe
from zero2all.tokenizer import train_tokenizer
from zero2all.tokens import build_tokens

Z2A = Path(sys.executable).with_name("z2a")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few files: every one costs a request in every partition of every shuffle."""
    root = tmp_path_factory.mktemp("raw")
    write_raw_with_copies(root)
    for path in [*sorted((root / "zh").iterdir())[3:], *sorted((root / "code" / "pkg").iterdir())[4:]]:
        path.unlink()
    return root


def upload(raw: Path, bucket: str) -> None:
    for path in raw.rglob("*"):
        if path.is_file():
            target = to_path(f"{bucket}/raw/{path.relative_to(raw).as_posix()}")
            assert isinstance(target, RemotePath)
            target.put(path)


def remote_recipe(bucket: str, raw: Path, near: bool = False) -> CorpusRecipe:
    """The recipe of the local tests, with every source in the bucket."""
    words = recipe_for(raw).model_dump_json().replace(str(raw), f"{bucket}/raw")
    return CorpusRecipe.model_validate_json(words).model_copy(update={"dedup": DedupRecipe(near=near)})


def one_file(raw: Path) -> CorpusRecipe:
    return CorpusRecipe(sources=recipe_for(raw).sources[:1], filters=[])


def remote_contents(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in all_files(out)}


def shards(files: dict[str, bytes]) -> dict[str, bytes]:
    """Without the manifest, whose key names the raw files as they are stored: by time on a disk, by ETag on S3."""
    return {name: data for name, data in files.items() if name.endswith(".parquet")}


@pytest.mark.slow
def test_documents_on_s3_have_the_bytes_of_a_local_build(s3: str, raw: Path, tmp_path: Path) -> None:
    upload(raw, s3)
    out = to_path(f"{s3}/documents")
    local = build_corpus(recipe_for(raw), tmp_path / "documents")
    remote = build_corpus(remote_recipe(s3, raw, near=True), out, TaskEngine(workers=2))
    assert shards(remote_contents(out)) == shards(contents(tmp_path / "documents"))
    assert replace(remote, key="") == replace(local, key="", samples={})
    assert build_corpus(remote_recipe(s3, raw, near=True), out).reused


@pytest.mark.long
def test_killed_at_random_moments_it_ends_with_the_same_bytes(
    s3: str, raw: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The moment is a number of objects in the bucket; the last one falls into the writing of the shards."""
    upload(raw, s3)
    before = len(all_files(to_path(s3)))
    build_corpus(remote_recipe(s3, raw), to_path(f"{s3}/whole"))
    undisturbed = remote_contents(to_path(f"{s3}/whole"))
    made = len(all_files(to_path(s3))) - before
    staging = tmp_path / "staging"
    staging.mkdir()
    rng = random.Random(7)
    moments = [*sorted(rng.sample(range(1, made - len(undisturbed)), KILLS - 1)), made - 3]
    kills = build_with_kills(
        remote_recipe(s3, raw),
        f"{s3}/documents",
        [before + made + moment for moment in moments],
        lambda: len(all_files(to_path(s3))),
        {**os.environ, "TMPDIR": str(staging)},
    )
    assert not list(staging.iterdir())  # also not what the killed ones had there
    assert kills >= KILLS // 2
    assert remote_contents(to_path(f"{s3}/documents")) == undisturbed
    manifest = read_manifest(to_path(f"{s3}/documents"), "documents", "")
    files = (path for path in all_files(to_path(f"{s3}/documents")) if path.suffix == ".parquet")
    gids = [gid for path in files for gid in pq.read_table(arrow_source(path))["gid"].to_pylist()]
    dropped = sum(part["documents"] for a in manifest["sources"].values() for part in a["dropped"].values())
    assert len(gids) == len(set(gids)) == manifest["documents"]
    assert len(gids) + dropped == sum(account["read"]["documents"] for account in manifest["sources"].values())
    record_property("cases", kills)


@pytest.mark.long
def test_later_stages_read_documents_from_s3(s3: str, raw: Path, tmp_path: Path) -> None:
    sources = json.dumps([source.model_dump() for source in recipe_for(raw).sources])
    stages = {}
    for name, place in (("local", str(tmp_path / "documents")), ("remote", f"{s3}/documents")):
        out = tmp_path / name
        recipe = parse_recipe(TINY, [f"out={out}", f"corpus.sources={sources}", f"corpus.dir={place}"])
        build_corpus(recipe.corpus, recipe.documents_dir)
        train_tokenizer(recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir)
        build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
        stages[name] = {stage: contents(out / stage) for stage in ("tokenizer", "tokens")}
        assert corpus_report(recipe.documents_dir).statistics["en"].looked_at > 100
    assert stages["remote"] == stages["local"]


def test_an_unfinished_corpus_is_not_taken_for_a_complete_one(s3: str, raw: Path) -> None:
    out = to_path(f"{s3}/documents")
    build_corpus(one_file(raw), out)
    write_json(out / "manifest.json", {"kind": "documents", "unfinished": True})  # as a kill leaves it
    with pytest.raises(Z2aError, match="not finished"):
        read_manifest(out, "documents", "z2a corpus build RECIPE")
    assert not build_corpus(one_file(raw), out).reused


def test_what_somebody_else_put_there_is_not_touched(s3: str, raw: Path) -> None:
    upload(raw, s3)
    with pytest.raises(UsageError, match="something else"):
        build_corpus(one_file(raw), to_path(f"{s3}/raw"))
    assert not all_files(to_path(f"{s3}/raw.work"))
    assert to_path(f"{s3}/raw/en.jsonl").exists()


@pytest.mark.parametrize("where", ["raw", "documents"])
def test_wrong_keys_are_an_error_in_one_line_that_tells_no_secret(
    where: str, s3: str, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(raw, s3)
    paths = f"{s3}/raw/*.jsonl" if where == "raw" else str(raw / "en.jsonl")
    out = tmp_path / "documents" if where == "raw" else f"{s3}/documents"
    (tmp_path / "recipe.yaml").write_text(f"corpus: {{dir: {out}, sources: [{{name: en, paths: ['{paths}']}}]}}\n")
    wrong = SECRET_KEY + " is not it"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    words = [str(Z2A), "corpus", "build", str(tmp_path / "recipe.yaml")]
    begun = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert [line.partition(" ")[0] for line in done.stderr.splitlines()] == ["error:", "see"]
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in done.stderr
    assert SECRET_KEY not in done.stdout + done.stderr
    assert time.monotonic() - begun < 30
    assert not all_files(to_path(f"{s3}/documents"))


def test_a_range_of_a_remote_file_is_what_it_is_of_a_local_one(s3: str, tmp_path: Path) -> None:
    """Rows of 12 bytes do not fall on the ends of blocks."""
    rows = np.zeros(200_000, dtype=[("hash", "<u8"), ("n", "<u4")])
    rows["hash"] = np.sort(np.random.default_rng(5).integers(0, 2**64, len(rows), dtype=np.uint64))
    rows["n"] = np.arange(len(rows))
    local, remote = tmp_path / "rows.npy", to_path(f"{s3}/rows.npy")
    save_rows(local, rows)
    save_rows(remote, rows)
    first = int(rows["hash"][0])
    for start, stop in [(0, 2**64 - 1), (2**60, 2**63), (2**63, 2**63 + 2**48), (0, first), (first, first), (5, 4)]:
        assert np.array_equal(rows_between(remote, "hash", start, stop), rows_between(local, "hash", start, stop))
    assert len(rows_between(remote, "hash", 0, 2**64 - 1)) == len(rows)
    save_rows(remote, rows[:0])
    assert len(rows_between(remote, "hash", 0, 2**64 - 1)) == 0
