"""Tokenizers that grow, and models with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.conftest import TINY
from tests.tokenizer.sentencepiece_models import llama_style
from zero2all.base.io import write_json
from zero2all.model import Z2all, grow_embeddings
from zero2all.recipe import ModelConfig
from zero2all.tokenizer import Tokenizer, extend
from zero2all.tokenizer.extend import decompose_new_tokens, extend_tokenizer
from zero2all.tokenizer.import_export import import_tokenizer


@pytest.fixture(scope="module")
def extended(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = ["acetylsalicylic acid 乙酰水杨酸 thrombocytopenia 血小板减少症"] * 50 + ["the model reads"] * 5
    out = tmp_path_factory.mktemp("extended") / "tokenizer"
    made = extend_tokenizer(tokenizer.directory, texts, 100, out)
    assert made.extends == tokenizer.fingerprint
    assert made.vocab_size == Tokenizer(out).vocab_size
    assert not out.with_name("tokenizer.work").exists()
    return Tokenizer(out)


def test_an_extended_tokenizer_keeps_every_old_id(tokenizer: Tokenizer, extended: Tokenizer) -> None:
    assert extended.token_bytes[: tokenizer.vocab_size] == tokenizer.token_bytes
    assert {name: extended.special_ids[name] for name in tokenizer.special_ids} == tokenizer.special_ids
    assert extended.vocab_size % 64 == 0
    assert extended.vocab_size >= tokenizer.vocab_size + 50
    before, after = ("thrombocytopenia 血小板减少症",) * 2
    assert len(extended.encode(after)) < len(tokenizer.encode(before)) / 2
    text = "夜来风雨声 def f(x): 42"
    assert extended.decode(extended.encode(text)) == text


def test_the_size_is_exact_without_padding_too(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = ["acetylsalicylic thrombocytopenia 乙酰水杨酸血小板减少症"] * 50
    made = extend_tokenizer(tokenizer.directory, texts, 64, tmp_path / "t")
    assert made.vocab_size == tokenizer.vocab_size + 64


def test_every_reader_agrees_on_an_extended_tokenizer(extended: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(extended.directory)
    assert len(theirs) == extended.vocab_size
    assert {name: theirs.convert_tokens_to_ids(name) for name in extended.special_ids} == extended.special_ids
    texts = ["acetylsalicylic acid <|im_end|> 乙酰水杨酸", "thrombocytopenia\n\n血小板 減少", "the model 123456"]
    expected = [theirs(text, split_special_tokens=True)["input_ids"] for text in texts]
    for name in ("hf", "tiktoken", "gigatoken"):
        encoded = Tokenizer(extended.directory, backend=name).encode_batch(texts)  # type: ignore[arg-type]
        assert [ids.tolist() for ids in encoded] == expected
    chat = [{"role": "user", "content": "乙酰水杨酸?"}]
    assert theirs.apply_chat_template(chat)["input_ids"] == extended.render_chat(chat)


def test_the_old_ids_of_new_tokens_spell_them(tokenizer: Tokenizer, extended: Tokenizer) -> None:
    old_ids = decompose_new_tokens(tokenizer, extended)
    assert len(old_ids) == extended.vocab_size - tokenizer.vocab_size
    special = set(extended.special_ids.values())
    for id, ids in enumerate(old_ids, tokenizer.vocab_size):
        if id in special:
            assert ids == []
        else:
            assert len(ids) >= 2
            assert max(ids) < tokenizer.vocab_size
            assert tokenizer.decode_bytes(ids) == extended.token_bytes[id]


def test_an_extended_tokenizer_can_be_extended(extended: Tokenizer, tmp_path: Path) -> None:
    extend_tokenizer(extended.directory, ["электроэнцефалограмма"] * 9, 10, tmp_path / "again")
    again = Tokenizer(tmp_path / "again")
    assert again.token_bytes[: extended.vocab_size] == extended.token_bytes
    assert len(again.special_ids) == len(set(again.special_ids.values()))
    assert again.vocab_size == extended.vocab_size + 64


def test_a_tokenizer_with_another_pattern_is_extended_by_its_own(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = json.loads(tokenizer.json_bytes)
    definition["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"[^-]+|-"
    write_json(tmp_path / "tokenizer.json", definition)
    checked: list[str] = []
    monkeypatch.setattr(extend, "check_pattern", checked.append)
    extend_tokenizer(tmp_path, ["x y-z"] * 9, 5, tmp_path / "out")
    new = Tokenizer(tmp_path / "out")
    assert new.encode("x y") == [new.token_bytes.index(b"x y")]
    assert not any(b"-z" in token for token in new.token_bytes[tokenizer.vocab_size :])
    assert checked == [r"[^-]+|-"]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_marker_that_is_not_declared_special_stays_special(tokenizer: Tokenizer, kind: str, tmp_path: Path) -> None:
    """As Qwen 3 has <tool_call>, and chat models made of LLaMA have <|im_start|>."""
    base = tokenizer.directory
    if kind == "sentencepiece":
        (tmp_path / "m.model").write_bytes(llama_style())
        import_tokenizer(tmp_path / "m.model", base := tmp_path / "base")
    definition = json.loads((base / "tokenizer.json").read_text("utf-8"))
    marker = {**definition["added_tokens"][0], "id": Tokenizer(base).vocab_size, "content": "<mark>", "special": False}
    definition["added_tokens"].append(marker)
    old = tmp_path / "old"
    old.mkdir()
    write_json(old / "tokenizer.json", definition)
    extend_tokenizer(old, ["春眠不觉晓"] * 9, 5, tmp_path / "new")
    for directory in (old, tmp_path / "new"):
        found = Tokenizer(directory)
        assert found.special_ids["<mark>"] == marker["id"]
        assert marker["id"] not in found.encode("a<mark>b")


def test_a_grown_model_keeps_old_rows_and_averages_those_of_new_tokens(
    tokenizer: Tokenizer, extended: Tokenizer
) -> None:
    old_ids = decompose_new_tokens(tokenizer, extended)
    for tied in (True, False):
        shape = {**yaml.safe_load(TINY)["model"], "tie_word_embeddings": tied, "vocab_size": tokenizer.vocab_size}
        model = Z2all(ModelConfig(**shape)).init_weights(seed=1)
        grown = grow_embeddings(model, old_ids)
        ids = torch.tensor([tokenizer.encode("the model reads")])
        assert torch.equal(grown(ids)[..., : tokenizer.vocab_size], model(ids))
        assert grown.config.vocab_size == extended.vocab_size
        for old, new in ((model.embed_tokens, grown.embed_tokens), (model.lm_head, grown.lm_head)):
            for row, of in zip(new.weight[tokenizer.vocab_size :], old_ids, strict=True):
                wanted = (old.weight[of] if of else old.weight).mean(0)
                np.testing.assert_allclose(row.detach(), wanted.detach(), atol=1e-7)
        assert (grown.lm_head.weight is grown.embed_tokens.weight) == tied
