"""``z2a tokenizer extend``: add tokens learned from new text to a vocabulary. Every old id keeps its meaning.

New merges come after all old ones, so a text is tokenized as before and then merged further. New ids come after all old
ones, also those of special tokens, so a model keeps its rows and gets new ones (``zero2all.model.grow_embeddings``).
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from zero2all.console import progress
from zero2all.errors import UsageError
from zero2all.io import atomic_dir, checksums, fingerprint, write_json, write_manifest
from zero2all.recipe import TokenizerRecipe
from zero2all.tokenizer.manifest import KIND, ExtendedTokenizer
from zero2all.tokenizer.merge import learn_merges, merge_memory
from zero2all.tokenizer.pair_index import Words, new_words
from zero2all.tokenizer.pretokenizer import character_classes
from zero2all.tokenizer.tokenizer import Tokenizer
from zero2all.tokenizer.train import is_other_tokenizer
from zero2all.tokenizer.vocabulary import PATTERNS, byte_alphabet, reserved_tokens
from zero2all.tokenizer.word_count import PretokenizeConfig, SpillWriter, aggregate_counts

SIZE_MULTIPLE = 64  # vocabulary rows, for fast matrix kernels
BATCH_TEXTS = 256
KEPT_FILES = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def extend_tokenizer(
    directory: Path,
    texts: Iterable[str],
    num_new_tokens: int,
    out: Path,
    min_frequency: int = 2,
    max_memory: int = 2 << 30,
    before_replace: Callable[[], None] = lambda: None,
) -> ExtendedTokenizer:
    """Learn up to ``num_new_tokens`` tokens; ``out`` becomes a Hugging Face directory with the old and new tokens.

    ``before_replace`` is called before another tokenizer in ``out`` is replaced, and may raise.
    """
    old = Tokenizer(directory)
    work = out.with_name(f"{out.name}.work")
    try:
        trained_on_bytes = _count_words(old, texts, work, max_memory)
        words = _read_old_encoding(old, work / "words.arrow")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    special = set(old.special_ids.values())
    # No text has the byte 0xff, so no merge can produce the placeholder of a special token.
    tokens = [b"\xff" + token if id in special else token for id, token in enumerate(old.token_bytes)]
    with progress(f"learning {num_new_tokens} tokens", num_new_tokens) as advance:
        merges = learn_merges(words, tokens, old.vocab_size + num_new_tokens, min_frequency, advance)
    definition = _extended_definition(old, tokens, merges)
    ids = [*definition["model"]["vocab"].values(), *(token["id"] for token in definition["added_tokens"])]
    with atomic_dir(out, KIND) as partial:
        write_json(partial / "tokenizer.json", definition)
        for name in KEPT_FILES:
            if (directory / name).exists():
                shutil.copy(directory / name, partial / name)
        manifest = ExtendedTokenizer(
            key=fingerprint([old.fingerprint, definition["model"]["merges"][-len(merges) :] if merges else []]),
            extends=old.fingerprint,
            vocab_size=1 + max(ids),
            learned=len(tokens) - old.vocab_size,
            trained_on_bytes=trained_on_bytes,
            files=checksums(partial),
        )
        write_manifest(partial, KIND, asdict(manifest))
        if is_other_tokenizer(out, partial):
            before_replace()
    return manifest


def _count_words(old: Tokenizer, texts: Iterable[str], work: Path, max_memory: int) -> int:
    """Count the words of the texts into ``words.arrow``; returns the bytes of the texts."""
    pattern = next((name for name, regex in PATTERNS.items() if regex == old.vocabulary.pattern), None)
    if pattern is None:
        raise UsageError(f"only a tokenizer that splits text by one of {', '.join(PATTERNS)} can be extended")
    work.mkdir(parents=True, exist_ok=True)
    spills = SpillWriter(
        work / "new",
        PretokenizeConfig(pattern, TokenizerRecipe().max_han_run, 1.0),
        character_classes(),
        max_memory // 4,
    )
    size, rest = 0, iter(texts)
    with progress("counting words") as advance:
        while batch := list(itertools.islice(rest, BATCH_TEXTS)):
            array = pa.array(batch)
            spills.count(array, np.ones(len(batch), bool))
            size += sum(len(text.encode()) for text in batch)
            advance(len(batch))
    spills.spill()
    memory_budget = max_memory // 2
    aggregate_counts(
        spills.paths, spills.row_count, work / "words.arrow", merge_memory, memory_budget, 0, max_memory // 4
    )
    return size


def _read_old_encoding(old: Tokenizer, path: Path) -> Words:
    """Counted words as the old tokenizer encodes them."""
    with pa.OSFile(str(path)) as stream:
        table = pa.ipc.open_file(stream).read_all()
    encoded = old.encode_batch([word.decode() for word in table["word"].to_pylist()])
    lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
    symbols = np.concatenate([np.empty(0, np.int32), *encoded]).astype(np.int32)
    return new_words(symbols, lengths, table["count"].to_numpy())


def _extended_definition(old: Tokenizer, tokens: list[bytes], merges: list[tuple[int, int]]) -> dict[str, Any]:
    """The old ``tokenizer.json`` with new tokens and merges, and reserved names up to a round size."""
    definition: dict[str, Any] = json.loads(old.json_bytes)
    character = {byte: character for character, byte in byte_alphabet().items()}
    names = {id: name for name, id in old.vocabulary.definition["model"]["vocab"].items()}
    for id in range(old.vocab_size, len(tokens)):
        names[id] = "".join(character[byte] for byte in tokens[id])
    padding = [name for name in reserved_tokens(len(tokens) + SIZE_MULTIPLE) if name not in old.special_ids]
    special = {**old.special_ids}
    for id in range(len(tokens), len(tokens) + -len(tokens) % SIZE_MULTIPLE):
        special[padding.pop(0)] = id
    # Special tokens are listed as tokens of the model too: that is what makes readers keep ids in the middle.
    definition["model"]["vocab"] = {name: id for id, name in names.items()} | special
    definition["model"]["merges"] = _merges(definition) + [[names[left], names[right]] for left, right in merges]
    like = definition["added_tokens"][-1]
    definition["added_tokens"] += [
        {**like, "id": id, "content": name} for name, id in special.items() if name not in old.special_ids
    ]
    return definition


def _merges(definition: dict[str, Any]) -> list[list[str]]:
    """Pairs of tokens; older files have each pair as one text."""
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in definition["model"]["merges"]]


def decompose_new_tokens(old: Tokenizer, new: Tokenizer) -> list[list[int]]:
    """For each id that only ``new`` has, the old ids that it is merged from; none for a reserved name."""
    ids = new.vocabulary.definition["model"]["vocab"]
    old_ids: dict[int, list[int]] = {id: [id] for id in range(old.vocab_size)}
    for left, right in _merges(new.vocabulary.definition):
        old_ids.setdefault(ids[left + right], old_ids[ids[left]] + old_ids[ids[right]])
    return [old_ids.get(id, []) for id in range(old.vocab_size, new.vocab_size)]
