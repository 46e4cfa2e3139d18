"""Test sets: any files, tokenized once."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import tiny_recipe
from zero2all.base.console import console
from zero2all.base.errors import UsageError
from zero2all.base.io import read_json
from zero2all.evals import evaluate_bpb
from zero2all.tokenizer import Tokenizer
from zero2all.tokens.evaluation_set import build_test_sets, find_test_sets, open_test_sets
from zero2all.track.record_lines import EventLine
from zero2all.track.run_record import read_record_lines
from zero2all.train import TrainerHooks, train
from zero2all.train.data_loader import Batch

TEXTS = ["the model reads 春眠不觉晓", "a second document"]


@pytest.fixture(scope="module")
def tokenizer(workspace: Path) -> Tokenizer:
    return Tokenizer(workspace / "tokenizer")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "directory"])
def test_any_format_gives_the_same_tokens(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = tmp_path / f"text.{kind}"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    if kind == "directory":
        source.mkdir()
        for number, text in enumerate(TEXTS):
            (source / f"{number}.txt").write_text(text, encoding="utf-8")
    elif kind == "parquet":
        pq.write_table(pa.table({"text": TEXTS}), source)
    else:
        source.write_bytes(gzip.compress(lines.encode()) if kind.endswith("gz") else lines.encode())
    build_test_sets({"测试 1": str(source)}, tokenizer, tmp_path / "out")
    shard = open_test_sets(["测试 1"], tmp_path / "out")["测试 1"]
    expected = [id for text in TEXTS for id in [*tokenizer.encode(text), tokenizer.eos_token_id]]
    assert shard.tokens.tolist() == expected
    assert [shard.document_info(number).bytes for number in range(2)] == [len(text.encode()) for text in TEXTS]


def test_a_set_is_tokenized_again_only_if_it_has_changed(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 1000)
    source, out = tmp_path / "text.txt", tmp_path / "out"
    source.write_text(TEXTS[0], encoding="utf-8")
    build_test_sets({"words": str(source)}, tokenizer, out)
    written = (out / "words" / "tokens.bin").stat().st_mtime_ns
    build_test_sets({"words": str(source)}, tokenizer, out)
    assert (out / "words" / "tokens.bin").stat().st_mtime_ns == written
    source.write_text(TEXTS[1], encoding="utf-8")
    with console.capture() as capture:
        build_test_sets({"words": str(source)}, tokenizer, out)
    assert "test set 'words' has changed" in capture.get()
    assert open_test_sets(["words"], out)["words"].tokens[:-1].tolist() == tokenizer.encode(TEXTS[1])


def test_a_set_whose_files_are_gone_is_used_as_it_was(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source, out = tmp_path / "text.txt", tmp_path / "out"
    source.write_text(TEXTS[0], encoding="utf-8")
    build_test_sets({"words": str(source)}, tokenizer, out)
    source.unlink()
    with console.capture() as capture:
        build_test_sets({"words": str(source)}, tokenizer, out)
    assert "its tokens from an earlier start are used" in " ".join(capture.get().split())
    assert list(find_test_sets(["words", "none"], tokenizer, out)) == ["words"]
    data = bytearray((out / "words" / "tokens.bin").read_bytes())
    data[0] ^= 1
    (out / "words" / "tokens.bin").write_bytes(data)
    assert find_test_sets(["words"], tokenizer, out) == {}
    with pytest.raises(UsageError, match="test set 'words': nothing at"):
        build_test_sets({"words": str(source)}, tokenizer, out)


def test_what_is_not_text_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "image.txt").write_bytes(b"\x00\x01\x02\xff" * 500)
    with pytest.raises(UsageError, match=r"test set 'words': image\.txt cannot be read: binary"):
        build_test_sets({"words": str(tmp_path / "image.txt")}, tokenizer, tmp_path / "out")
    (tmp_path / "blank.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(UsageError, match="test set 'words' has no text"):
        build_test_sets({"words": str(tmp_path / "blank.jsonl")}, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out" / "words").exists()


def test_training_evaluates_test_sets_that_it_tokenized_before_the_first_step(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXTS[0], encoding="utf-8")
    sets = json.dumps({"words": str(tmp_path / "text.txt")})
    options = ["train.steps=4", "evals.every=2 steps", f"evals.test_sets={sets}", f"out={tmp_path}/out"]
    recipe = tiny_recipe(workspace, *options)
    manifests = []

    def on_batch(batch: Batch) -> None:
        if batch.step == 0:
            manifests.append(read_json(recipe.run_dir / "test_sets" / "words" / "manifest.json"))

    train(recipe, evaluate=evaluate_bpb, hooks=TrainerHooks(on_batch=on_batch))
    events = [line for line in read_record_lines(recipe.run_dir / "record.jsonl") if isinstance(line, EventLine)]
    evaluations = [event.details for event in events if event.event == "evaluation"]
    assert manifests[0]["documents"] == 1
    assert [evaluation["test_sets"]["words"]["bytes"] for evaluation in evaluations] == [len(TEXTS[0].encode())] * 2
    first, last = (evaluation["test_sets"]["words"]["bits_per_byte"] for evaluation in evaluations)
    assert last != first


def test_a_missing_test_set_stops_training_before_it_starts(workspace: Path, tmp_path: Path) -> None:
    sets = json.dumps({"words": str(tmp_path / "none.txt")})
    recipe = tiny_recipe(workspace, "evals.every=2 steps", f"evals.test_sets={sets}", f"out={tmp_path}/out")
    with pytest.raises(UsageError, match="test set 'words': nothing at"):
        train(recipe, evaluate=evaluate_bpb)
    assert not (recipe.run_dir / "record.jsonl").exists()
