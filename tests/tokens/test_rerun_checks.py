"""A rerun compares finished output by size, time and samples; with ``verify`` by every byte."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import zero2all.base.manifest as manifest
from tests.conftest import tiny_recipe
from zero2all.base.io import sha256_file
from zero2all.base.manifest import is_current, is_intact, sampled_digest, write_manifest
from zero2all.corpus import build_corpus
from zero2all.recipe import Recipe
from zero2all.tokens import build_tokens
from zero2all.tokens.manifest import BuiltStore

SMALL_BLOCK = 64  # so that the samples of a small file do not make up all of it


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "SAMPLE_BLOCK_BYTES", SMALL_BLOCK)


def flip(path: Path, place: int, keep_time: bool = True) -> None:
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))
    later = status.st_mtime_ns if keep_time else status.st_mtime_ns + 10**12
    os.utime(path, ns=(later, later))


def published(directory: Path) -> Path:
    directory.mkdir()
    data = directory / "data.bin"
    data.write_bytes(os.urandom(100_000))
    files, samples = {"data.bin": sha256_file(data)}, {"data.bin": sampled_digest(data)}
    write_manifest(directory, "things", {"key": "k", "files": files, "samples": samples})
    return data


def test_what_a_rerun_notices(tmp_path: Path) -> None:
    original = published(tmp_path / "a")
    between = SMALL_BLOCK + 10  # in no sample

    def changed(change: str) -> Path:
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        shutil.copytree(tmp_path / "a", tmp_path / "b")  # with its times
        data = tmp_path / "b" / "data.bin"
        if change == "size":
            data.write_bytes(data.read_bytes()[:-1])
            os.utime(data, ns=(original.stat().st_mtime_ns,) * 2)
        elif change == "sampled byte":
            flip(data, 5)
        elif change == "last byte":
            flip(data, -1)
        elif change == "byte and time":
            flip(data, between, keep_time=False)
        elif change == "time":
            os.utime(data, ns=(original.stat().st_mtime_ns + 10**12,) * 2)
        elif change == "other byte":
            flip(data, between)
        elif change == "missing":
            data.unlink()
        return tmp_path / "b"

    assert is_current(changed("nothing"), "things", "k")
    for change in ("size", "sampled byte", "last byte", "byte and time", "missing"):
        assert not is_current(changed(change), "things", "k"), change
    assert is_current(changed("time"), "things", "k")  # it was hashed
    assert is_current(changed("other byte"), "things", "k")  # the price of not reading everything
    assert not is_current(changed("other byte"), "things", "k", verify=True)
    assert not is_current(changed("nothing"), "things", "another key")


def test_an_unchanged_file_is_not_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = published(tmp_path / "a")
    digest, sample = sha256_file(data), sampled_digest(data)
    monkeypatch.setattr(manifest, "sha256_file", lambda path: pytest.fail("it was read as a whole"))
    assert is_intact(data, tmp_path / "a" / "manifest.json", digest, sample)


def rebuild(recipe: Recipe, verify: bool = False) -> BuiltStore:
    return build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir, verify=verify)


def test_tokens_and_documents_are_checked_so(workspace: Path, tmp_path: Path) -> None:
    shutil.copytree(workspace, tmp_path / "w")
    recipe = tiny_recipe(tmp_path / "w")
    rebuild(recipe)  # records these samples
    stem = next(iter(sorted(recipe.tokens_dir.glob("train/*.bin"))))
    whole = stem.read_bytes()
    assert len(whole) > 20 * SMALL_BLOCK
    assert rebuild(recipe).reused
    flip(stem, 5)
    assert not rebuild(recipe).reused
    assert stem.read_bytes() == whole
    flip(stem, SMALL_BLOCK + 10)
    assert rebuild(recipe).reused
    assert not rebuild(recipe, verify=True).reused
    assert stem.read_bytes() == whole
    build_corpus(recipe.corpus, recipe.documents_dir)
    assert build_corpus(recipe.corpus, recipe.documents_dir).reused
    shard = next(iter(sorted(recipe.documents_dir.glob("train/*.parquet"))))
    flip(shard, SMALL_BLOCK + 10)
    assert build_corpus(recipe.corpus, recipe.documents_dir).reused
    assert not build_corpus(recipe.corpus, recipe.documents_dir, verify=True).reused
    flip(shard, 5)
    assert not build_corpus(recipe.corpus, recipe.documents_dir).reused
