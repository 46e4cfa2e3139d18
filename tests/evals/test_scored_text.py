"""How text is divided into rows: every token is scored once, with the context that was promised."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero2all.base.errors import UsageError
from zero2all.evals.scored_text import BLOCK_TOKENS, EvalText, Packed, Stream, Windowed, read_stream
from zero2all.tokens import TokenShard
from zero2all.tokens.token_store import DOCS_SCHEMA, TokenShardWriter

EOS = 0


def write_shard(directory: Path, documents: list[list[int]]) -> TokenShard:
    rows = pa.RecordBatch.from_pylist([{"gid": "", "data_src": "", "title": "", "bytes": 0}] * len(documents))
    with TokenShardWriter(directory / "text", vocab_size=100) as writer:
        writer.write(rows.cast(DOCS_SCHEMA), [np.array(document, dtype=np.uint32) for document in documents], EOS)
    return TokenShard(directory / "text")


def scored_positions(stream: Stream) -> Counter[int]:
    return Counter(row.start + 1 + place for row in stream.rows for place in range(row.first_scored, row.length))


@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=6),
    window=st.integers(1, 9),
    stride=st.integers(1, 9),
    cut=st.integers(0, 40) | st.none(),
)
def test_a_window_scores_every_token_of_a_document_once_and_with_enough_context(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], window: int, stride: int, cut: int | None
) -> None:
    stride = min(stride, window)
    documents = [[1 + number % 9] * length for number, length in enumerate(lengths)]
    shard = write_shard(tmp_path_factory.mktemp("shard"), documents)
    stream = read_stream(EvalText("x", "source", [shard], cut), EOS, Windowed(window, stride))
    text = [position for position in stream.targets if stream.tokens[position] != EOS]
    counted = scored_positions(stream)
    assert counted == dict.fromkeys(text, 1)
    for row in stream.rows:
        assert row.length <= window
        inputs = stream.tokens[row.start : row.start + row.length]
        assert EOS not in inputs[1:]  # of one document, which begins with the end of the one before
        document_begin = row.start if inputs[0] == EOS else None
        for place in range(row.first_scored, row.length):
            assert document_begin is not None or place >= window - stride


@given(lengths=st.lists(st.integers(0, 25), min_size=1, max_size=6), seq_len=st.integers(1, 12))
def test_packed_sequences_of_a_test_set_score_all_of_it(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int
) -> None:
    shard = write_shard(tmp_path_factory.mktemp("shard"), [[7] * length for length in lengths])
    stream = read_stream(EvalText("x", "test set", [shard]), EOS, Packed(seq_len, document_mask=True))
    assert stream.tokens.tolist() == [EOS, *(token for length in lengths for token in [7] * length + [EOS])]
    assert scored_positions(stream) == dict.fromkeys(stream.targets, 1)
    assert all(row.length <= seq_len for row in stream.rows)


def test_of_a_part_of_a_text_only_full_sequences_are_scored(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, [[7] * 10, [8] * 10])
    stream = read_stream(EvalText("x", "source", [shard], max_tokens=17), EOS, Packed(5, document_mask=True))
    assert [(row.start, row.length) for row in stream.rows] == [(0, 5), (5, 5), (10, 5)]
    assert stream.targets == range(1, 16)
    assert stream.documents == 2


def test_units_are_documents_or_blocks_of_few_long_ones(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    (tmp_path / "one").mkdir()
    many = read_stream(
        EvalText("x", "test set", [write_shard(tmp_path / "many", [[7] * 3] * 30)]), EOS, Packed(16, True)
    )
    assert np.bincount(many.units[1:]).tolist() == [4] * 30
    one = read_stream(EvalText("x", "test set", [write_shard(tmp_path / "one", [[7] * 2000])]), EOS, Packed(16, True))
    assert one.documents == 1
    assert np.bincount(one.units).tolist() == [BLOCK_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS, 2002 - 3 * BLOCK_TOKENS]


def test_a_stride_beyond_the_window_would_skip_tokens() -> None:
    with pytest.raises(UsageError, match=r"--stride must be between 1 and the window \(8\); it is 9"):
        Windowed(8, 9)
