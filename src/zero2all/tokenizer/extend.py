"""``z2a tokenizer extend``: add tokens learned from new text to a vocabulary. Every old id keeps its meaning.

New merges come after all old ones, so a text is tokenized as before and then merged further. New ids come after all old
ones, also after special tokens, so a model keeps its rows and gets new ones (``zero2all.model.grow_embeddings``).
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from zero2all.base.console import progress
from zero2all.base.errors import UsageError
from zero2all.base.io import atomic_dir, fingerprint, write_json
from zero2all.base.manifest import checksums, write_manifest
from zero2all.recipe import TokenizerRecipe
from zero2all.tokenizer.manifest import KIND, ExtendedTokenizer, is_other_tokenizer
from zero2all.tokenizer.merge import learn_merges, merge_memory
from zero2all.tokenizer.pair_index import new_words
from zero2all.tokenizer.pattern_check import check_pattern
from zero2all.tokenizer.pretokenizer import character_classes
from zero2all.tokenizer.sentencepiece_model import MODEL_FILE, added_token
from zero2all.tokenizer.sentencepiece_vocabulary import extended_model, learn_pieces
from zero2all.tokenizer.tokenizer import Tokenizer
from zero2all.tokenizer.vocabulary import PATTERNS, byte_alphabet, reserved_tokens
from zero2all.tokenizer.word_count import AggregationLimits, PretokenizeConfig, SpillWriter, aggregate_counts

SIZE_MULTIPLE = 64  # vocabulary rows, for fast matrix kernels
BATCH_TEXTS = 256
MIN_FREQUENCY = 2  # of a pair that is merged
MAX_MEMORY = 2 << 30
KEPT_FILES = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
Characters = Literal["any", "chinese"]
# Han, CJK punctuation and full-width forms. Quotes and dashes are not among them: English text has the same ones.
CHINESE = re.compile(
    "[\u2e80-\u2fdf\u3000-\u303f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]+"
)


def extend_tokenizer(
    directory: Path,
    texts: Iterable[str],
    num_new_tokens: int,
    out: Path,
    before_replace: Callable[[], None] = lambda: None,
    characters: Characters = "any",
) -> ExtendedTokenizer:
    """Learn up to ``num_new_tokens`` tokens; ``out`` becomes a Hugging Face directory with the old and new tokens.

    With ``characters="chinese"`` new tokens consist of Chinese characters and punctuation only, so text without them is
    encoded as before. ``before_replace`` is called before another tokenizer in ``out`` is replaced, and may raise.
    """
    old = Tokenizer(directory)
    if old.vocabulary.definition["model"].get("type") == "Unigram":
        raise UsageError("a unigram model cannot be extended: its tokens are chosen by their probability among all")
    learn = learn_pieces if old.vocabulary.is_sentencepiece else _learn_tokens
    work = out.with_name(f"{out.name}.work")
    try:
        trained_on_bytes = _count_words(old, texts, work, characters)
        words, counts = _read_words(work / "words.arrow")
        with progress(f"learning {num_new_tokens} tokens", num_new_tokens) as advance:
            names, merges = learn(old, words, counts, num_new_tokens, MIN_FREQUENCY, advance)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    definition = _extended_definition(old, names, merges)
    with atomic_dir(out, KIND) as partial:
        write_json(partial / "tokenizer.json", definition)
        for name in KEPT_FILES:
            if (directory / name).exists():
                shutil.copy(directory / name, partial / name)
        new = Tokenizer(partial)
        if (directory / MODEL_FILE).exists():
            (partial / MODEL_FILE).write_bytes(extended_model(directory / MODEL_FILE, old, new))
        manifest = ExtendedTokenizer(
            key=fingerprint([old.fingerprint, merges]),
            extends=old.fingerprint,
            vocab_size=new.vocab_size,
            learned=len(names),
            trained_on_bytes=trained_on_bytes,
            files=checksums(partial),
        )
        write_manifest(partial, KIND, asdict(manifest))
        if is_other_tokenizer(out, partial):
            before_replace()
    return manifest


def _count_words(old: Tokenizer, texts: Iterable[str], work: Path, characters: Characters) -> int:
    """Count the words of the texts into ``words.arrow``; returns the bytes of the texts."""
    work.mkdir(parents=True, exist_ok=True)
    config = PretokenizeConfig(_counting_pattern(old), TokenizerRecipe().max_han_run, 1.0)
    spills = SpillWriter(work / "new", config, character_classes(), MAX_MEMORY // 4)
    size, rest = 0, iter(texts)
    with progress("counting words") as advance:
        while batch := list(itertools.islice(rest, BATCH_TEXTS)):
            advance(len(batch))
            if characters == "chinese":
                batch = [run for text in batch for run in CHINESE.findall(text)]
            spills.count(pa.array(batch, pa.large_string()), np.ones(len(batch), bool))
            size += sum(len(text.encode()) for text in batch)
    spills.spill()
    limits = AggregationLimits(merge_memory, budget=MAX_MEMORY // 2, table_memory=MAX_MEMORY // 4)
    aggregate_counts(spills.paths, spills.row_count, work / "words.arrow", limits)
    return size


def _counting_pattern(old: Tokenizer) -> str:
    """How text is split into words while tokens are learned: as the tokenizer does, and sentencepiece does not."""
    if old.vocabulary.is_sentencepiece:
        return "zh-en-code"
    regex = old.vocabulary.pattern
    if (name := next((name for name, known in PATTERNS.items() if known == regex), None)) is not None:
        return name
    check_pattern(regex)
    return regex


def _read_words(path: Path) -> tuple[list[str], np.ndarray[Any, np.dtype[np.int64]]]:
    with pa.OSFile(str(path)) as stream:
        table = pa.ipc.open_file(stream).read_all()
    return [word.decode() for word in table["word"].to_pylist()], table["count"].to_numpy()


def _learn_tokens(
    old: Tokenizer,
    words: list[str],
    counts: np.ndarray[Any, np.dtype[np.int64]],
    num_new_tokens: int,
    min_frequency: int,
    advance: Callable[[float], None],
) -> tuple[list[str], list[list[str]]]:
    """The names of new tokens of a byte-level vocabulary, and all its merges."""
    encoded = old.encode_batch(words)
    lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
    symbols = np.concatenate([np.empty(0, np.int32), *encoded]).astype(np.int32)
    special = set(old.special_ids.values())
    # No text has the byte 0xff, so no merge can produce the placeholder of a special token.
    tokens = [b"\xff" + token if id in special else token for id, token in enumerate(old.token_bytes)]
    learned = learn_merges(
        new_words(symbols, lengths, counts), tokens, old.vocab_size + num_new_tokens, min_frequency, advance
    )
    character = {byte: character for character, byte in byte_alphabet().items()}
    names = {id: name for name, id in old.vocabulary.ids.items()}
    for id in range(old.vocab_size, len(tokens)):
        names[id] = "".join(character[byte] for byte in tokens[id])
    merges = [[names[merge.left], names[merge.right]] for merge in learned]
    return [names[id] for id in range(old.vocab_size, len(tokens))], old.vocabulary.merges + merges


def _extended_definition(old: Tokenizer, names: list[str], merges: list[list[str]]) -> dict[str, Any]:
    """The old ``tokenizer.json`` with new tokens and merges, and reserved names up to a round size."""
    definition: dict[str, Any] = json.loads(old.json_bytes)
    new_ids = {name: id for id, name in enumerate(names, old.vocab_size)}
    used = old.vocab_size + len(names)
    free_names = (name for name in reserved_tokens(used + SIZE_MULTIPLE) if name not in old.special_ids)
    reserved = dict(zip(free_names, range(used, used + -used % SIZE_MULTIPLE), strict=False))
    # Special tokens are listed as tokens of the model too: that is what makes readers keep ids in the middle.
    definition["model"]["vocab"] = {**old.vocabulary.ids, **new_ids, **old.special_ids, **reserved}
    definition["model"]["merges"] = merges
    for token in definition["added_tokens"]:
        # What was special stays so, although it is a token of the model now; see ``tokenizer_json``.
        if old.vocabulary.is_sentencepiece and token["content"] in old.special_ids:
            token["special"] = True
    definition["added_tokens"] += [added_token(id, name, special=True) for name, id in reserved.items()]
    return definition


def decompose_new_tokens(old: Tokenizer, new: Tokenizer) -> list[list[int]]:
    """For each id that only ``new`` has, the old ids that spell it; none for a special token."""
    special = set(new.special_ids.values())
    return [
        [] if id in special else old.encode_bytes(new.token_bytes[id], follows_text=True)
        for id in range(old.vocab_size, new.vocab_size)
    ]
