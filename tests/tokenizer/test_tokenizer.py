from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers, trainers

from tests.conftest import tiny_recipe
from tests.corpus.builds import corpus_of, make_gid, source_of, write_lines
from zero2all.base.errors import Z2aError
from zero2all.base.io import read_json
from zero2all.corpus import build_corpus
from zero2all.corpus.document_shards import is_validation
from zero2all.recipe import TokenizerRecipe
from zero2all.tokenizer import Tokenizer, train_tokenizer
from zero2all.tokenizer.evaluate import evaluate_tokenizers, render_svg, render_table
from zero2all.tokenizer.import_export import export_tiktoken
from zero2all.tokenizer.token_spans import render_html, render_terminal, token_spans
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


def test_plain_transformers_loads_the_directory_and_gives_the_same_ids(
    tokenizer: Tokenizer, transformers_tokenizer: Any
) -> None:
    theirs = transformers_tokenizer
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
        lines.append({"id": number, "text": text})
    assert sum("zyxwvu" in str(line["text"]) for line in lines) > 20
    source = source_of(write_lines(tmp_path / "a.jsonl", lines))
    documents = build_corpus(corpus_of(source, holdout=0.5), tmp_path / "documents")
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


# --- evaluating, inspecting and exporting

TEXT = "春眠不觉晓 <b>x & y</b>\n\tdef f(龘): return '<|pad|>' # \x1b[31m"


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of another kind: words of a few letters, all else unknown."""
    made = HFTokenizer(models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(["the model reads"], trainers.WordLevelTrainer(special_tokens=["[UNK]"]))
    path = tmp_path_factory.mktemp("lossy") / "tokenizer.json"
    made.save(str(path))
    return path


def test_tokenizers_are_measured_side_by_side(tokenizer: Tokenizer, real_tokenizer: Tokenizer, lossy: Path) -> None:
    chinese = ["春眠不觉晓，处处闻啼鸟。" * 20, "花落知多少"]
    texts = {"zh": chinese, "en": ["the model reads a line of text <|pad|> " * 30]}
    paths = {"small": tokenizer.directory, "real": real_tokenizer.directory, "lossy": lossy}
    evaluation = evaluate_tokenizers(paths, texts)
    metrics = evaluation.tokenizers
    for name, ours in (("small", tokenizer), ("real", real_tokenizer)):
        part = metrics[name].domains["en"]
        assert part.tokens == len(ours.encode(texts["en"][0]))  # "<|pad|>" is text here too
        assert part.bytes_per_token == round(part.bytes / part.tokens, 4)
        used = {id for documents in texts.values() for text in documents for id in ours.encode(text)}
        assert metrics[name].unused_tokens == ours.vocab_size - len(ours.special_ids) - len(used)
        assert metrics[name].random_bytes_back == part.documents_back == 1
    assert metrics["lossy"].random_bytes_back < 0.5
    assert metrics["lossy"].domains["zh"].documents_back == 0
    assert metrics["real"].tokens_per_word["English names"] < metrics["small"].tokens_per_word["English names"]

    table = render_table(evaluation).splitlines()
    assert len({line.count("|") for line in table}) == 1
    assert re.search(r"\|\s+small \|\s+real \|\s+lossy \|", table[0])
    assert ElementTree.fromstring(render_svg(evaluation)).tag.endswith("svg")


def test_a_tokenizer_or_text_that_is_not_there_says_so(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(Z2aError, match="no tokenizer in"):
        evaluate_tokenizers({"x": tmp_path}, {"en": ["a"]})
    with pytest.raises(Z2aError, match="no text in en"):
        evaluate_tokenizers({"x": tokenizer.directory}, {"en": []})


def test_token_spans_are_the_text(real_tokenizer: Tokenizer) -> None:
    spans = token_spans(real_tokenizer, TEXT)
    assert b"".join(span.data for span in spans).decode() == TEXT
    assert [span.id for span in spans] == real_tokenizer.encode(TEXT)
    assert not any(span.special for span in spans)
    assert [span.data for span in token_spans(real_tokenizer, TEXT, special=True) if span.special] == [b"<|pad|>"]


def test_the_page_holds_the_text_and_no_markup_of_it(real_tokenizer: Tokenizer) -> None:
    tags: list[str] = []
    said: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)

        def handle_data(self, data: str) -> None:
            said.append(data)

    page = render_html(token_spans(real_tokenizer, TEXT + "<script>alert(1)</script>"), "a <title>")
    Reader().feed(page)
    assert not {"script", "b"} & set(tags)
    assert "<script>alert(1)</script>".replace(" ", "·") in "".join(said)
    assert "http" not in page


def test_a_terminal_gets_no_control_characters_of_the_text(real_tokenizer: Tokenizer) -> None:
    plain = render_terminal(token_spans(real_tokenizer, TEXT), colour=False)
    assert "\x1b" not in plain
    assert "\\x1b" in plain.replace("|", "")
    coloured = render_terminal(token_spans(real_tokenizer, TEXT), colour=True)
    uncoloured = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert uncoloured.strip() == "".join(span.display_text for span in token_spans(real_tokenizer, TEXT))


def test_tiktoken_reads_what_is_exported(
    real_tokenizer: Tokenizer, real_texts: dict[str, list[str]], tmp_path: Path
) -> None:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    made = export_tiktoken(real_tokenizer, tmp_path / "mine.tiktoken")
    settings = read_json(Path(made.settings))
    encoding = tiktoken.Encoding("mine", mergeable_ranks=load_tiktoken_bpe(made.ranks), **settings)
    assert encoding.n_vocab == real_tokenizer.vocab_size
    for texts in real_texts.values():
        for text in texts[:20]:
            assert encoding.encode_ordinary(text) == real_tokenizer.encode(text)
    assert encoding.encode("<|pad|>", allowed_special="all") == [real_tokenizer.special_ids["<|pad|>"]]
