"""``z2a tokenizer train``: byte-level BPE over a sample of the training documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tokenizers import AddedToken, Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders as hf_decoders

from zero2all.console import progress
from zero2all.io import (
    atomic_dir,
    checksums,
    fingerprint,
    is_current,
    read_json,
    read_manifest,
    write_json,
    write_manifest,
    write_text,
)
from zero2all.recipe import TokenizerRecipe
from zero2all.tokenizer.vocabulary import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    NAMED_TOKENS,
    PAD,
    PATTERNS,
    SPECIAL_TOKENS,
    START_OF_TEXT,
    reserved_tokens,
)
from zero2all.units import show_bytes

KIND = "tokenizer"


def train_tokenizer(recipe: TokenizerRecipe, documents: Path, out: Path) -> dict[str, Any]:
    """Learn a vocabulary from the training split in ``documents``; ``out`` becomes a Hugging Face directory."""
    corpus = read_manifest(documents, "documents", "z2a corpus build RECIPE")
    key = fingerprint([corpus["key"], recipe.model_dump(mode="json", exclude={"dir"})])
    if is_current(out, KIND, key):
        return {**read_json(out / "manifest.json"), "reused": True}

    merges_wanted = recipe.vocab_size - len(SPECIAL_TOKENS)
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[recipe.pattern]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = hf_decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=merges_wanted,
        min_frequency=recipe.min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so that nothing is unknown
        show_progress=False,
    )
    available = sum(part["bytes"] for part in corpus["splits"]["train"].values())
    share = min(1.0, recipe.sample / available) if available else 0.0
    with progress(
        f"learning {recipe.vocab_size} tokens from {show_bytes(share * available)}", share * available
    ) as advance:
        sample = Sample(documents, corpus, share, advance)
        tokenizer.train_from_iterator(sample, trainer)

    learned = tokenizer.get_vocab_size()
    # The size is a promise to the model, so a text too small to fill it leaves reserved names for later use.
    special = NAMED_TOKENS + reserved_tokens(recipe.vocab_size - learned - len(NAMED_TOKENS))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    with atomic_dir(out, KIND) as partial:
        tokenizer.save(str(partial / "tokenizer.json"))
        write_json(
            partial / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": START_OF_TEXT,
                "eos_token": END_OF_TEXT,
                "pad_token": PAD,
                "clean_up_tokenization_spaces": False,
                "model_max_length": 10**9,
            },
        )
        write_text(partial / "chat_template.jinja", CHAT_TEMPLATE)
        body = {
            "key": key,
            "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
            "learned": learned,
            "special_tokens": list(special),
            "pattern": recipe.pattern,
            "trained_on_bytes": sample.bytes,
            "files": checksums(partial),
        }
        write_manifest(partial, KIND, body)
    return {"kind": KIND, **body, "reused": False}


class Sample:
    """Training text, each document in or out by its gid, so that the sample does not depend on order."""

    def __init__(self, documents: Path, corpus: dict[str, Any], share: float, advance: Callable[[float], None]) -> None:
        self.documents, self.corpus, self.share, self.advance = documents, corpus, share, advance
        self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        for part in self.corpus["splits"]["train"].values():
            for shard in part["shards"]:
                with pq.ParquetFile(self.documents / "train" / shard) as table:
                    for batch in table.iter_batches(batch_size=256, columns=["gid", "content"]):
                        for row in batch.to_pylist():
                            # Other digits than those that decide the held-out split.
                            if int(row["gid"][-12:], 16) < self.share * 2**48:
                                size = len(row["content"].encode())
                                self.bytes += size
                                self.advance(size)
                                yield row["content"]
