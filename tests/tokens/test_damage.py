"""A damaged token store stops a run, and the error names the file and the command that repairs it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import zero2all.base.manifest as manifest
from tests.conftest import tiny_recipe
from zero2all.base.errors import Z2aError
from zero2all.base.io import sha256_file
from zero2all.base.manifest import is_current, is_intact, sampled_digest, write_manifest
from zero2all.corpus import build_corpus
from zero2all.evals import evaluate_bpb
from zero2all.recipe import Recipe
from zero2all.tokens import PackedDataset, TokenStore, build_tokens, verify_store
from zero2all.tokens.manifest import BuiltStore
from zero2all.train import Run, train

FORMAT_ONLY: dict[str, object] = {"format": 2}
NO_SPLITS: dict[str, object] = {"format": 2, "tokenizer": "x", "vocab_size": 9, "splits": 3}
Damage = Callable[[Path], None]


@pytest.fixture
def tokens(workspace: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "tokens"
    shutil.copytree(workspace / "tokens", copy)
    return copy


def halve(suffix: str) -> Damage:
    return lambda stem: os.truncate(path := stem.with_suffix(suffix), path.stat().st_size // 2 // 2 * 2)


def remove(suffix: str) -> Damage:
    return lambda stem: stem.with_suffix(suffix).unlink()


def flip_bit(stem: Path) -> None:
    path = stem.with_suffix(".bin")
    data = bytearray(path.read_bytes())
    data[len(data) // 4 * 2] ^= 1  # the low byte of an id: another id of the vocabulary
    path.write_bytes(data)


def put_id(stem: Path, id: int = 60_000) -> None:
    stored = np.memmap(stem.with_suffix(".bin"), dtype="<u2", mode="r+")
    stored[len(stored) // 2] = id
    stored.flush()


def swap_shards(stem: Path) -> None:
    """Swap all files of two shards: each is consistent in itself."""
    other = stem.with_name("zh-00000" if stem.name.startswith("en") else "en-00000")
    for suffix in (".bin", ".idx", ".docs.arrow", ".json"):
        aside = stem.with_suffix(".aside")
        stem.with_suffix(suffix).rename(aside)
        other.with_suffix(suffix).rename(stem.with_suffix(suffix))
        aside.rename(other.with_suffix(suffix))


def swap_within(stem: Path) -> None:
    """Same size, different content."""
    path = stem.with_suffix(".bin")
    data = path.read_bytes()
    half = len(data) // 4 * 2
    path.write_bytes(data[half:] + data[:half])


def files_in(tokens: Path) -> dict[Path, bytes]:
    return {path.relative_to(tokens): path.read_bytes() for path in tokens.rglob("*") if path.is_file()}


DAMAGES: dict[str, tuple[Damage, str]] = {
    "bit": (flip_bit, "en-00000.bin does not match its checksum"),
    "id outside the vocabulary": (put_id, "en-00000.bin"),
    "truncated bin": (halve(".bin"), r"en-00000.bin has \d+ bytes"),
    "missing bin": (remove(".bin"), "en-00000.bin is missing"),
    "truncated idx": (halve(".idx"), r"en-00000.idx has \d+ bytes"),
    "idx of a few bytes": (lambda stem: os.truncate(stem.with_suffix(".idx"), 12), "en-00000.idx is not a token index"),
    "missing idx": (remove(".idx"), "en-00000.idx is missing"),
    "missing docs": (remove(".docs.arrow"), "en-00000.docs.arrow is missing"),
    "truncated docs": (halve(".docs.arrow"), r"en-00000.docs.arrow has \d+ bytes"),
    "missing record": (remove(".json"), "en-00000.json is missing"),
    "shards swapped": (swap_shards, r"(en|zh)-00000\.(bin|json)"),
    "content moved": (swap_within, "en-00000.bin does not match its checksum"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_shard_stops_training_before_the_first_step(
    workspace: Path, tokens: Path, tmp_path: Path, name: str
) -> None:
    damage, message = DAMAGES[name]
    damage(tokens / "train" / "en-00000")
    recipe = tiny_recipe(workspace, f"tokens.dir={tokens}", f"out={tmp_path}/out", "train.steps=2")
    with pytest.raises(Z2aError, match=message) as raised:
        train(recipe)
    assert "z2a tokens build" in str(raised.value)
    assert not (recipe.run_dir / "record.jsonl").exists()

    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, tokens, verify=True)  # as it says
    assert files_in(tokens) == files_in(workspace / "tokens")
    if name == "bit":
        assert train(recipe).steps == 2  # so it does with these files after any of the others


def test_ids_outside_the_vocabulary_are_refused_where_they_are_read(tokens: Path) -> None:
    """Damage after the check at the start, or in a block that it did not draw."""
    put_id(tokens / "train" / "zh-00000")
    dataset = PackedDataset.open(tokens, "train", seq_len=32)
    with pytest.raises(Z2aError, match=r"zh-00000\.bin has ids outside the vocabulary in tokens \d+ to \d+"):
        dataset.tokens(0, dataset.samples_per_epoch)


@pytest.mark.parametrize("damage", [put_id, flip_bit, swap_within])
def test_evaluation_refuses_a_damaged_validation_split(
    workspace: Path, tokens: Path, tmp_path: Path, damage: Damage
) -> None:
    recipe = tiny_recipe(workspace, f"tokens.dir={tokens}", f"out={tmp_path}/out", "train.steps=1")
    train(recipe)
    damage(tokens / "valid" / "en-00000")
    run = Run.open(recipe.run_dir)
    with pytest.raises(Z2aError, match=r"valid/en-00000\.bin"):
        evaluate_bpb(run.load_model(), run.tokenizer(), run.recipe)


def test_a_damaged_manifest_is_reported(tokens: Path) -> None:
    path = tokens / "manifest.json"
    whole = path.read_text()
    for entry in ({"records": []}, {"shard_tokens": None}, {"shards": "abc"}):
        manifest = json.loads(whole)
        manifest["splits"]["train"]["en"] |= entry
        path.write_text(json.dumps(manifest))
        with pytest.raises(Z2aError, match=r"manifest\.json is damaged"):
            TokenStore(tokens, "train")
    kinds = (json.dumps({"kind": "tokens"} | more) for more in ({}, FORMAT_ONLY, NO_SPLITS))
    for text in ("[]", '"x"', "{", *kinds):
        path.write_text(text)
        with pytest.raises(Z2aError, match=str(tokens)):
            TokenStore(tokens, "train")


def test_a_rebuild_survives_a_damaged_record(workspace: Path, tokens: Path) -> None:
    recipe = tiny_recipe(workspace, f"tokens.dir={tokens}")
    for text in ("[]", "{}", "{", '{"files": 3, "key": "x"}'):
        (tokens / "train" / "en-00000.json").write_text(text)
        build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, tokens)
        assert (tokens / "manifest.json").read_bytes() == (workspace / "tokens" / "manifest.json").read_bytes()


def test_a_thousand_ranks_read_few_blocks_each(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_read: list[int] = []
    monkeypatch.setattr(
        "zero2all.tokens.verify._verify_block", lambda shard, record, number: blocks_read.append(number)
    )
    store = TokenStore(tokens, "train")
    verify_store(store)
    assert len(blocks_read) == 3  # a block of every shard
    blocks_read.clear()
    for rank in range(0, 1024, 128):
        verify_store(store, rank, 1024, seed=rank)
    assert len(blocks_read) == 8


# --- what a rerun compares

SMALL_BLOCK = 64  # so that the samples of a small file do not make up all of it


@pytest.fixture
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


@pytest.mark.usefixtures("small_samples")
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


@pytest.mark.usefixtures("small_samples")
def test_an_unchanged_file_is_not_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = published(tmp_path / "a")
    digest, sample = sha256_file(data), sampled_digest(data)
    monkeypatch.setattr(manifest, "sha256_file", lambda path: pytest.fail("it was read as a whole"))
    assert is_intact(data, tmp_path / "a" / "manifest.json", digest, sample)


def rebuild(recipe: Recipe, verify: bool = False) -> BuiltStore:
    return build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir, verify=verify)


@pytest.mark.usefixtures("small_samples")
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
