"""Training through the sentencepiece package (``tokenizer.trainer: sentencepiece-bpe`` and ``-unigram``).

The package holds all text in memory, so it gets as many documents as fit. The settings are those of LLaMA's vocabulary
(no normalization, byte fallback, single digits), but without a space before each text: so every text round-trips, also
after a special token.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from zero2all.console import progress, say
from zero2all.errors import UsageError, need
from zero2all.paths import arrow_source
from zero2all.recipe import TokenizerRecipe
from zero2all.records import DocumentsManifest
from zero2all.tokenizer.manifest import LearnedVocabulary
from zero2all.tokenizer.sentencepiece_convert import to_tokenizer_json
from zero2all.tokenizer.sentencepiece_model import Piece, PieceType, append_pieces, parse_model
from zero2all.tokenizer.vocabulary import UNKNOWN, reserved_tokens
from zero2all.tokenizer.word_count import BATCH_DOCUMENTS, select_documents
from zero2all.units import show_bytes

MEMORY_PER_BYTE = 28  # of text: 26 measured for Chinese, 9 for English (python -m benchmarks sentencepiece_memory)
PROCESS_MEMORY = 300 << 20
MAX_LINE_CHARACTERS = 1000  # the package skips lines above 4192 bytes
TRAINER_OPTIONS: dict[str, Any] = {
    "hard_vocab_limit": False,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "unk_id": 0,
    "unk_piece": UNKNOWN,
    "bos_id": -1,
    "eos_id": -1,
    "pad_id": -1,
    "num_threads": 8,  # a fixed number, because the result of unigram training depends on it
    "minloglevel": 2,
}


@dataclass(frozen=True)
class _TrainingText:
    """Lines of the training documents, sampled by document."""

    shards: list[Path]
    share: float

    def lines(self) -> Iterator[str]:
        for shard in self.shards:
            with pq.ParquetFile(arrow_source(shard), buffer_size=1 << 20) as file:
                for batch in file.iter_batches(batch_size=BATCH_DOCUMENTS, columns=["gid", "content"]):
                    selected = pa.array(select_documents(batch.column("gid"), self.share))
                    for text in batch.column("content").filter(selected).to_pylist():
                        yield from split_lines(text)


def split_lines(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        for start in range(0, len(line), MAX_LINE_CHARACTERS):
            yield line[start : start + MAX_LINE_CHARACTERS]


def train_sentencepiece(
    recipe: TokenizerRecipe, documents: Path, corpus: DocumentsManifest, special: tuple[str, ...]
) -> LearnedVocabulary:
    """A vocabulary of ``recipe.vocab_size`` tokens with these special tokens."""
    package = need("sentencepiece", "tokenizer")
    sources = corpus.splits["train"].values()
    available = sum(part.bytes for part in sources)
    limit = min(recipe.train_bytes, (recipe.max_memory - PROCESS_MEMORY) // MEMORY_PER_BYTE)
    if limit < min(available, recipe.train_bytes):
        say(f"sentencepiece trains on {show_bytes(limit)}: more would not fit into tokenizer.max_memory")
    shards = [documents / "train" / shard for part in sources for shard in part.shards]
    text = _TrainingText(shards, min(1.0, limit / available) if available else 0.0)
    written, used = io.BytesIO(), 0

    def counted_lines() -> Iterator[str]:
        nonlocal used
        for line in text.lines():
            used += len(line.encode())
            yield line

    try:
        with progress("training with sentencepiece"):
            package.SentencePieceTrainer.train(
                sentence_iterator=counted_lines(),
                model_writer=written,
                model_type=recipe.trainer.removeprefix("sentencepiece-"),
                vocab_size=recipe.vocab_size,
                control_symbols=list(special),
                **TRAINER_OPTIONS,
            )
    except (RuntimeError, OSError) as error:
        reason = str(error).rpartition("] ")[2] or "there is no text"
        raise UsageError(f"sentencepiece cannot train this vocabulary: {reason}") from error
    return _filled_up(written.getvalue(), recipe.vocab_size, special, used)


def _filled_up(data: bytes, vocab_size: int, special: tuple[str, ...], used: int) -> LearnedVocabulary:
    """The model relies on the size, so a text too small to fill it leaves reserved names for later use."""
    learned = len(parse_model(Path("tokenizer.model"), data).pieces)
    names = [name for name in reserved_tokens(vocab_size) if name not in special][: vocab_size - learned]
    data = append_pieces(data, [Piece(name, 0.0, PieceType.CONTROL) for name in names], vocab_size)
    model = parse_model(Path("tokenizer.model"), data)
    all_special = [piece.text for piece in model.pieces if piece.type in (PieceType.UNKNOWN, PieceType.CONTROL)]
    definition = json.dumps(to_tokenizer_json(model), ensure_ascii=False, indent=1).encode()
    return LearnedVocabulary(definition, all_special, vocab_size - len(all_special), used, None, data)
