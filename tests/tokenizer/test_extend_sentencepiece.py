"""LLaMA's kind of vocabulary learns Chinese; English stays as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

from tests.tokenizer.sentencepiece_models import CORPUS, llama_style, texts
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import write_json
from zero2all.corpus.ingest import document_texts
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.backends import TRICKY_TEXTS
from zero2all.tokenizer.extend import CHINESE, Characters, decompose_new_tokens, extend_tokenizer
from zero2all.tokenizer.import_export import import_tokenizer
from zero2all.tokenizer.sentencepiece_model import MODEL_FILE, SentencePiece, append_pieces

Pair = tuple[Tokenizer, Tokenizer]


def make_pair(
    root: Path, model: bytes, learned_from: list[str], num_new_tokens: int, characters: Characters = "chinese"
) -> Pair:
    (root / "llama.model").write_bytes(model)
    import_tokenizer(root / "llama.model", root / "old")
    made = extend_tokenizer(root / "old", learned_from, num_new_tokens, root / "new", characters=characters)
    assert made.learned == num_new_tokens or characters == "any"  # then a few lines do not have so many
    return Tokenizer(root / "old"), Tokenizer(root / "new")


def package_of(tokenizer: Tokenizer) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.directory / MODEL_FILE))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("extended"), llama_style(), texts("zh", 60_000), 300)


def bytes_per_token(tokenizer: Tokenizer, documents: list[str]) -> float:
    tokens = sum(len(ids) for ids in tokenizer.encode_batch(documents))
    return sum(len(text.encode()) for text in documents) / tokens


def check_pair(pair: Pair, english: list[str], chinese: list[str]) -> None:
    old, new = pair
    assert new.token_bytes[: old.vocab_size] == old.token_bytes
    assert {name: new.special_ids[name] for name in old.special_ids} == old.special_ids
    assert new.vocab_size % 64 == 0
    assert new.eos_token_id == old.eos_token_id
    english = [text for text in english if not CHINESE.search(text)]  # some articles name something in Chinese
    assert sum(map(len, english)) > 10_000
    for text in english:
        assert new.encode(text) == old.encode(text)
    package = package_of(new)
    assert package.get_piece_size() == new.vocab_size
    assert package.id_to_piece(old.vocab_size).encode() == new.token_bytes[old.vocab_size]
    theirs = AutoTokenizer.from_pretrained(new.directory)
    assert len(theirs) == new.vocab_size
    for text in (*TRICKY_TEXTS, *english, *chinese):
        ids = new.encode(text)
        assert ids == package.encode(text)
        assert ids == theirs(text, split_special_tokens=True)["input_ids"]
        assert new.decode(ids) == text


def test_old_ids_and_english_stay_and_chinese_needs_fewer_tokens(pair: Pair) -> None:
    documents = texts("zh", 100_000)[1:]
    check_pair(pair, texts("en", 100_000), documents)
    assert bytes_per_token(pair[1], documents) > 1.4 * bytes_per_token(pair[0], documents)


def test_each_new_token_is_used_and_spelled_by_old_ones(pair: Pair) -> None:
    old, new = pair
    special = set(new.special_ids.values())
    parts = decompose_new_tokens(old, new)
    assert len(parts) == new.vocab_size - old.vocab_size
    for id, ids in enumerate(parts, old.vocab_size):
        if id in special:
            assert ids == []
        else:
            assert b"".join(old.token_bytes[part] for part in ids) == new.token_bytes[id]
            assert new.continuation.encode([new.token_bytes[id].decode()])[0].tolist() == [id]


def test_a_frequent_character_comes_before_a_rare_pair(tmp_path: Path) -> None:
    old, new = make_pair(tmp_path, llama_style(), ["龘靐" * 2] * 50 + ["齉"] * 60 + ["龖龖"] * 4, 5)
    found = [new.token_bytes[id].decode() for id in range(old.vocab_size, old.vocab_size + 5)]
    assert found == ["靐", "龘", "齉", "龘靐", "龘靐龘靐"]  # 200, 200, 120, 100 and 50 tokens saved; 龖 would save 16


def test_text_of_any_kind_is_learned_from_without_the_option(tmp_path: Path) -> None:
    old, new = make_pair(tmp_path, llama_style(), ["a thrombocytopenia\n春眠 <0x41>"] * 9, 40, "any")
    text = "thrombocytopenia 春眠"
    assert len(new.encode(text)) < len(old.encode(text))
    assert new.decode(new.encode(text + " <0x41>\n")) == text + " <0x41>\n"
    assert package_of(new).encode(text) == new.encode(text)


def test_an_old_piece_made_of_new_ones_keeps_its_rank(tmp_path: Path) -> None:
    """sentencepiece joins whatever becomes a piece: also an old one that only new pieces can make."""
    model = append_pieces(llama_style(), [SentencePiece(c, -5000.0 - n) for n, c in enumerate("中国人")], 703)
    _, new = make_pair(tmp_path, append_pieces(model, [SentencePiece("中国人", -4000.0)], 704), ["国人"] * 9, 1)
    assert new.encode("中国人") == package_of(new).encode("中国人")
    assert len(new.encode("中国人")) == 2  # with the space before


def test_what_cannot_be_extended_says_so(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "u.model").write_bytes(llama_style("unigram", characters=20_000))
    import_tokenizer(tmp_path / "u.model", tmp_path / "unigram")
    with pytest.raises(UsageError, match="unigram model cannot be extended"):
        extend_tokenizer(tmp_path / "unigram", ["中"], 1, tmp_path / "new")
    other = tmp_path / "other"
    other.mkdir()
    definition = json.loads(pair[0].json_bytes)
    definition["added_tokens"].append({**definition["added_tokens"][0], "id": 700, "content": "<more>"})
    write_json(other / "tokenizer.json", definition)
    (other / MODEL_FILE).write_bytes((pair[0].directory / MODEL_FILE).read_bytes())
    with pytest.raises(Z2aError, match=r"not the model of the tokenizer\.json"):
        extend_tokenizer(other, ["中国"] * 9, 1, tmp_path / "new")


@pytest.mark.long
def test_four_thousand_chinese_tokens(shared_corpus: Path, tmp_path: Path) -> None:
    model = llama_style(vocab_size=8000, characters=3_000_000, character_coverage=0.99995)
    learned_from = list(document_texts([str(CORPUS / "zh" / "wiki2019zh_style" / "wiki_zh_00.jsonl")]))
    pair = make_pair(tmp_path, model, learned_from, 4000)
    english, chinese = texts("en", 10**7), texts("zh", 10**7)
    check_pair(pair, english, chinese)
    before, after = (bytes_per_token(tokenizer, chinese) for tokenizer in pair)
    assert before < 1.1
    assert after > 2.5
