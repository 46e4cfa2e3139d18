from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_recipe
from tests.corpus.gids import make_gid
from zero2all.base.errors import Z2aError
from zero2all.corpus import build_corpus
from zero2all.corpus.document_shards import is_validation
from zero2all.recipe import CorpusRecipe, SourceRecipe, TokenizerRecipe
from zero2all.tokenizer import Tokenizer, train_tokenizer
from zero2all.tokenizer.vocabulary import SPECIAL_TOKENS


def test_any_text_round_trips(tokenizer: Tokenizer) -> None:
    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.text())
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert [batch.tolist() for batch in tokenizer.encode_batch([text, text])] == [ids, ids]

    check()


def test_size_is_as_requested_and_special_tokens_are_at_the_end(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 512
    assert max(tokenizer.special_ids.values()) == 511
    assert tokenizer.eos_token_id == 512 - len(tokenizer.special_ids)
    assert tokenizer.token_byte_lengths[tokenizer.eos_token_id] == 0


def test_plain_transformers_loads_the_directory_and_gives_the_same_ids(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer.directory)
    assert len(theirs) == tokenizer.vocab_size
    assert theirs.eos_token_id == tokenizer.eos_token_id
    for text in ("the model reads", "春眠不觉晓", "def f(x):\n\treturn 12345\n", "  mixed 中文 text\r\n"):
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text


def test_training_twice_gives_the_same_bytes_and_a_rerun_is_free(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace)
    manifest = train_tokenizer(recipe.tokenizer, recipe.documents_dir, tmp_path / "again")
    first, again = (path / "tokenizer.json" for path in (workspace / "tokenizer", tmp_path / "again"))
    assert first.read_bytes() == again.read_bytes()
    assert not manifest.reused
    assert train_tokenizer(recipe.tokenizer, recipe.documents_dir, tmp_path / "again").reused


def test_a_text_too_small_for_the_vocabulary_leaves_reserved_names(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace, "tokenizer.vocab_size=8192")
    manifest = train_tokenizer(recipe.tokenizer, recipe.documents_dir, tmp_path / "big")
    assert manifest.learned < 8192 - len(SPECIAL_TOKENS)
    assert manifest.vocab_size == Tokenizer(tmp_path / "big").vocab_size == 8192


def test_validation_text_is_not_trained_on(tmp_path: Path) -> None:
    """A word that only validation documents contain must not become a token."""
    lines = []
    for number in range(200):
        gid = make_gid("s", str(number), text := f"plain words {number} " * 5)
        marked = f"zyxwvu {number} " * 50
        # Find an id for which the marked text is in the validation set, too.
        if is_validation(gid, 0.5) and is_validation(make_gid("s", str(number), marked), 0.5):
            text = marked
        lines.append(json.dumps({"id": number, "text": text}))
    assert sum("zyxwvu" in line for line in lines) > 20
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    corpus = CorpusRecipe(
        sources=[SourceRecipe(name="s", paths=[str(tmp_path / "a.jsonl")])],
        holdout=0.5,
        filters=[],
    )
    documents = build_corpus(corpus, tmp_path / "documents")
    manifest = train_tokenizer(TokenizerRecipe(vocab_size=320), tmp_path / "documents", tmp_path / "tokenizer")
    tokens = Tokenizer(tmp_path / "tokenizer").token_bytes
    assert any(b"plain" in token for token in tokens)
    assert not any(b"zy" in token for token in tokens)
    assert manifest.trained_on_bytes == documents.splits["train"]["s"].bytes


def test_missing_directories_say_which_command_makes_them(tmp_path: Path, workspace: Path) -> None:
    with pytest.raises(Z2aError, match="z2a tokenizer train"):
        Tokenizer(tmp_path)
    with pytest.raises(Z2aError, match="z2a corpus build"):
        train_tokenizer(tiny_recipe(workspace).tokenizer, tmp_path, tmp_path / "out")
