"""A damaged token store stops a run, and the error names the file and the command that repairs it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import tiny_recipe
from zero2all.base.errors import Z2aError
from zero2all.evals import evaluate_bpb
from zero2all.tokens import PackedDataset, TokenStore, build_tokens, verify_store
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
    def damage(stem: Path) -> None:
        path = stem.with_suffix(suffix)
        os.truncate(path, path.stat().st_size // 2 // 2 * 2)

    return damage


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
    assert train(recipe).steps == 2


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


@pytest.mark.parametrize(
    "manifest", ["[]", '"x"', "{", *(json.dumps({"kind": "tokens"} | more) for more in ({}, FORMAT_ONLY, NO_SPLITS))]
)
def test_a_damaged_manifest_is_reported(tokens: Path, manifest: str) -> None:
    (tokens / "manifest.json").write_text(manifest)
    with pytest.raises(Z2aError, match=str(tokens)):
        TokenStore(tokens, "train")


@pytest.mark.parametrize("entry", [{"records": []}, {"shard_tokens": None}, {"shards": "abc"}])
def test_a_manifest_with_a_damaged_entry_is_reported(tokens: Path, entry: dict[str, object]) -> None:
    path = tokens / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["splits"]["train"]["en"] |= entry
    path.write_text(json.dumps(manifest))
    with pytest.raises(Z2aError, match=r"manifest\.json is damaged"):
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
