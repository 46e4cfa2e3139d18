"""Tokenizers of other projects are used like our own, with the ids of the programs that they come from."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from tests.tokenizer.sentencepiece_models import llama_style, texts
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import write_json
from zero2all.base.manifest import read_documents_manifest
from zero2all.cli.main import app
from zero2all.evals import evaluate_bpb
from zero2all.export import export_run
from zero2all.generation import SamplingParams, generate_batch
from zero2all.recipe import Recipe, TokenizerRecipe
from zero2all.tokenizer import Tokenizer, train_tokenizer
from zero2all.tokenizer.backends import TRICKY_TEXTS
from zero2all.tokenizer.import_export import import_tokenizer
from zero2all.tokenizer.sentencepiece_model import PieceType, SentencePiece, append_pieces, parse_model
from zero2all.tokens import TokenStore, build_tokens
from zero2all.train import Run, train

MODELS: dict[str, dict[str, Any]] = {
    "bpe": {},
    "unigram": {"algorithm": "unigram"},
    "bpe without a space before a text": {"add_dummy_prefix": False},
    "bpe with symbols": {"add_dummy_prefix": False, "user_defined_symbols": ["\n", "<table>", "ing"]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for number, options in enumerate(MODELS.values()):
        (root / f"{number}.model").write_bytes(llama_style(**options))
    return {name: root / f"{number}.model" for number, name in enumerate(MODELS)}


@pytest.fixture(scope="module")
def imported(models: dict[str, Path]) -> dict[str, Tokenizer]:
    found = {}
    for name, path in models.items():
        made = import_tokenizer(path, path.with_suffix(""))
        assert made.compared_with_sentencepiece > 200
        found[name] = Tokenizer(path.with_suffix(""))
        assert made.vocab_size == found[name].vocab_size
    return found


def some_texts() -> list[str]:
    return [*TRICKY_TEXTS, *texts("en", 50_000), *texts("zh", 20_000), "<table>\n\n x<table>ing ings<0x41>", "  a", " "]


@pytest.mark.parametrize("name", MODELS)
def test_ids_equal_those_of_sentencepiece_and_transformers(
    models: dict[str, Path], imported: dict[str, Tokenizer], name: str
) -> None:
    from transformers import AutoTokenizer

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(models[name]))
    hugging_face = AutoTokenizer.from_pretrained(imported[name].directory)
    for text in some_texts():
        ids = imported[name].encode(text)
        if name != "unigram" or (len(text) < 5000 and text.strip()):  # else there are ties
            assert ids == theirs.encode(text)
        if name != "unigram" or "<" not in text:  # there its encoder takes the text <s> for a special token
            assert ids == hugging_face(text, split_special_tokens=True)["input_ids"]
        assert ids == imported[name].encode_batch(["x", text])[1].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_any_text_and_any_bytes_round_trip(imported: dict[str, Tokenizer], name: str) -> None:
    tokenizer = imported[name]

    @settings(max_examples=200, deadline=None)
    @given(st.text(st.characters(exclude_categories=["Cs"])), st.binary())
    def check(text: str, data: bytes) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ") == tokenizer.normalize(text)
        data = data.replace("▁".encode(), b"")
        assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data

    check()
    for text in some_texts():
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", MODELS)
def test_no_text_becomes_a_special_token_or_a_byte(imported: dict[str, Tokenizer], name: str) -> None:
    tokenizer = imported[name]
    special = set(tokenizer.special_ids.values())
    assert {"<unk>", "<s>", "</s>"} <= set(tokenizer.special_ids)
    for marker in (*tokenizer.special_ids, "<0x41>", "<0xE6><0x98>", "<0xe6>"):
        for text in (marker, f"a{marker}b", f" {marker} {marker}", marker[:-1]):
            ids = tokenizer.encode(text)
            assert not special.intersection(ids)
            assert tokenizer.decode(ids) == text
    with_end = tokenizer.encode("a</s>b", allow_special={"</s>"})
    assert with_end.count(tokenizer.eos_token_id) == 1


def test_the_sizes_of_tokens_add_up_to_the_size_of_the_text(imported: dict[str, Tokenizer]) -> None:
    for tokenizer in imported.values():
        for text in texts("zh", 3000):
            ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
            assert sum(tokenizer.token_byte_lengths[id] for id in ids) == len(text.encode())


def as_llama_3(definition: dict[str, Any], config: dict[str, Any]) -> None:
    for token in definition["added_tokens"]:
        token["content"] = token["content"].replace("<|endoftext|>", "<|end_of_text|>")
    config["eos_token"] = {"content": "<|end_of_text|>", "special": True}
    definition["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    definition["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "a",
    }  # fmt: skip
    definition["model"]["dropout"] = 0.5
    config["auto_map"] = {"AutoTokenizer": ["code.Tokenizer", None]}


def test_a_hugging_face_directory_is_used_without_its_surprises(tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = Path(shutil.copytree(tokenizer.directory, tmp_path / "theirs"))
    definition, config = json.loads(tokenizer.json_bytes), json.loads((theirs / "tokenizer_config.json").read_bytes())
    as_llama_3(definition, config)
    definition["normalizer"] = {"type": "NFC"}
    write_json(theirs / "tokenizer.json", definition)
    write_json(theirs / "tokenizer_config.json", config)
    import_tokenizer(theirs, tmp_path / "out")
    ours = Tokenizer(tmp_path / "out")
    text = "the model reads a line of text 春眠不觉晓" * 3
    assert ours.encode(text) == tokenizer.encode(text)
    assert ours.encode_batch([text])[0].tolist() == tokenizer.encode(text)
    assert ours.eos_token_id == tokenizer.eos_token_id == ours.special_ids["<|end_of_text|>"]
    assert ours.eos_token_id in ours.stop_token_ids
    assert ours.decode(ours.encode("e\u0301")) == ours.normalize("e\u0301") == "é"
    assert "auto_map" not in (tmp_path / "out" / "tokenizer_config.json").read_text("utf-8")


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_metaspace_directories_have_the_ids_of_transformers(
    imported: dict[str, Tokenizer], tmp_path: Path, scheme: str
) -> None:
    """As transformers writes LLaMA's tokenizer today: the space before a text is put by the pre-tokenizer."""
    from transformers import AutoTokenizer

    definition = json.loads(imported["bpe"].json_bytes)
    definition["normalizer"] = None
    definition["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    marker = {**definition["added_tokens"][0], "id": imported["bpe"].vocab_size, "content": "<|im_end|>"}
    definition["added_tokens"].append({**marker, "special": False})
    source = tmp_path / "theirs"
    source.mkdir()
    write_json(source / "tokenizer.json", definition)
    write_json(source / "special_tokens_map.json", {"eos_token": "</s>"})
    import_tokenizer(source, tmp_path / "out")
    ours, theirs = Tokenizer(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("hello world", " hello", "<s>hello</s> you<s>", "a<|im_end|>b", ""):
        assert ours.encode(text, allow_special="all") == theirs(text)["input_ids"]
    assert "<|im_end|>" in ours.special_ids
    assert ours.decode(ours.encode("a<|im_end|>")) == "a<|im_end|>"
    assert ours.decode(ours.encode(" a")) == ours.normalize(" a") == "a"
    assert ours.eos_token_id == 2


def with_pieces(*pieces: SentencePiece) -> bytes:
    return append_pieces(llama_style(), pieces, 700 + len(pieces))


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "a text": (lambda: b"#!/bin/sh\nexit 1\n", "damaged"),
    "empty": (lambda: b"", "no pieces"),
    "a pickle": (lambda: b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}.", "damaged"),
    "no byte fallback": (lambda: llama_style(byte_fallback=False, vocab_size=300), "no byte fallback"),
    "normalizes": (lambda: llama_style(normalization_rule_name="nmt_nfkc"), "normalizes characters"),
    "removes spaces": (lambda: llama_style(remove_extra_whitespaces=True), "repeated spaces"),
    "words": (lambda: llama_style("word"), "neither a BPE nor a unigram"),
    "space after words": (lambda: llama_style(treat_whitespace_as_suffix=True), "does not write a space"),
    "symbols and prefix": (lambda: llama_style(user_defined_symbols=["\n"]), "user-defined symbols"),
    "a piece twice": (lambda: with_pieces(SentencePiece("the", 1.0), SentencePiece("the", 0.0)), "the same"),
    "nan": (lambda: with_pieces(SentencePiece("@@@", float("nan"))), "score"),
    "long": (lambda: with_pieces(SentencePiece("x" * 1000, 0.0)), "characters"),
    "unused": (lambda: with_pieces(SentencePiece("@@@", 0.0, PieceType.UNUSED)), "unused"),
    "huge length": (lambda: b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "ends inside"),
    "endless number": (lambda: b"\xff" * 11, "too long"),
    "a score of 8 bytes": (lambda: b"\x0a\x09\x11" + struct.pack("<d", 1.0), "no float"),
    "a piece that is a number": (lambda: b"\x08\x01", "number where a message"),
    "a text that is not UTF-8": (lambda: b"\x0a\x03\x0a\x01\xff", "damaged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_used_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    (tmp_path / "m.model").write_bytes(make())
    with pytest.raises(Z2aError, match=reason) as raised:
        import_tokenizer(tmp_path / "m.model", tmp_path / "out")
    assert "m.model" in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_damaged_models_never_fail_in_another_way(models: dict[str, Path]) -> None:
    rng, data = random.Random(1), models["bpe"].read_bytes()
    for _ in range(150):
        damaged = bytearray(data[: rng.choice([len(data), rng.randrange(len(data))])])
        for _ in range(rng.randrange(4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        with suppress(Z2aError):
            parse_model(Path("m.model"), bytes(damaged))


def test_an_import_is_refused_if_ids_differ_from_sentencepiece(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentencepiece.SentencePieceProcessor, "encode", lambda self, text: [1])
    with pytest.raises(Z2aError, match="with other ids"):
        import_tokenizer(models["bpe"], tmp_path / "out")


def test_the_command_imports_and_training_does_not_replace_it(
    models: dict[str, Path], workspace: Path, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["tokenizer", "import", str(models["bpe"]), "--out", str(tmp_path / "t")])
    assert "700 tokens" in done.output
    with pytest.raises(UsageError, match="imported or extended"):
        train_tokenizer(TokenizerRecipe(vocab_size=512), workspace / "documents", tmp_path / "t")
    with pytest.raises(Z2aError, match="no tokenizer in"):
        import_tokenizer(tmp_path, tmp_path / "u")


@pytest.fixture(scope="module")
def recipe(imported: dict[str, Tokenizer], workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Of a workspace with LLaMA's kind of tokenizer, and its tokens."""
    out = tmp_path_factory.mktemp("continued")
    places = (f"out={out}", f"tokenizer.dir={imported['bpe'].directory}", f"tokens.dir={out}/tokens")
    recipe = tiny_recipe(workspace, *places, "train.steps=2", "evals.tokens=1M")
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    return recipe


def test_documents_are_tokenized_by_an_imported_tokenizer(recipe: Recipe, imported: dict[str, Tokenizer]) -> None:
    documents = read_documents_manifest(recipe.documents_dir).splits["valid"]
    sizes = np.array(imported["bpe"].token_byte_lengths)
    for name, shards in TokenStore(recipe.tokens_dir, "valid").sources.items():
        tokens = np.concatenate([shard.tokens for shard in shards])
        assert int(sizes[tokens].sum()) == documents[name].bytes
        assert tokens[-1] == imported["bpe"].special_ids["</s>"]


@pytest.mark.long
def test_every_stage_uses_an_imported_tokenizer(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe)
    run = Run.open(recipe.run_dir)
    assert run.tokenizer().eos_token_id == 2
    measured = evaluate_bpb(run.load_model(), run.tokenizer(), run.recipe)
    size = sum(part.bytes for part in read_documents_manifest(recipe.documents_dir).splits["valid"].values())
    assert 0.9 * size < measured.bytes <= size  # whole sequences only
    completion = generate_batch(run.load_model(), run.tokenizer(), ["the model"], SamplingParams(max_tokens=5))[0]
    assert completion.text == run.tokenizer().decode_bytes([*run.tokenizer().encode("x"), *completion.tokens])[
        1:
    ].decode("utf-8", "replace")
    assert export_run(run, tmp_path / "hf", check=True).max_difference < 1e-3
