"""Evaluating, inspecting and exporting tokenizers."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers, trainers

from zero2all.base.errors import Z2aError
from zero2all.base.io import read_json
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.evaluate import evaluate_tokenizers, render_svg, render_table
from zero2all.tokenizer.import_export import export_tiktoken
from zero2all.tokenizer.token_spans import render_html, render_terminal, token_spans

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
    texts = {
        "zh": ["春眠不觉晓，处处闻啼鸟。" * 20, "花落知多少"],
        "en": ["the model reads a line of text <|pad|> " * 30],
    }
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
