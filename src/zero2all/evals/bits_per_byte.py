"""Bits per byte on the validation set: unlike loss or perplexity, it does not depend on the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero2all.console import progress
from zero2all.model import document_starts
from zero2all.recipe import Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenShard, TokenStore, verify_store

LossFunction = Callable[..., Tensor]
BATCH_SIZE = 16
UNIGRAM_TOKENS = 2_000_000_000  # over all shards: some 20 seconds, and more would not change the metric


@torch.no_grad()
def evaluate_bpb(compute_losses: LossFunction, tokenizer: Tokenizer, recipe: Recipe) -> dict[str, Any]:
    """Bits per byte of the model and of a unigram model on the same tokens, in total and by source.

    ``compute_losses`` returns the loss of each token: a model, or a parallel one. Text is split into sequences of
    ``train.seq_len``; end-of-text tokens are context, never scored, so the bytes are those of the text alone. The
    unigram model gives each token its share of the training tokens, with add-one smoothing.
    """
    valid = TokenStore(recipe.tokens_dir, "valid")
    valid.require_full_sequence(recipe.train.seq_len)
    verify_store(valid)
    train = TokenStore(recipe.tokens_dir, "train")
    unigram = torch.from_numpy(_unigram_nats(recipe.tokens_dir, train.fingerprint, tokenizer.vocab_size))
    byte_lengths = torch.tensor(tokenizer.token_byte_lengths)
    seq_len = recipe.train.seq_len
    budget = {name: max(seq_len, recipe.evals.tokens // len(valid.sources)) for name in valid.sources}
    by_source: dict[str, dict[str, float]] = {}
    with progress("evaluating on the validation set", sum(budget.values())) as advance:
        for name, shards in valid.sources.items():
            sequences = _split_sequences(_first_tokens(shards, budget[name] + 1), seq_len)
            if len(sequences) == 0:
                continue
            sums = {"model_nats": 0.0, "unigram_nats": 0.0, "bytes": 0.0}
            for batch in torch.split(torch.from_numpy(sequences), BATCH_SIZE):
                targets = batch[:, 1:]
                sizes = byte_lengths[targets]
                inputs = batch[:, :-1]
                starts = document_starts(inputs, tokenizer.eos_token_id) if recipe.train.document_mask else None
                losses = compute_losses(inputs, targets_BS=targets, doc_starts_BS=starts).cpu()
                sums["model_nats"] += float(losses[sizes > 0].double().sum())
                sums["unigram_nats"] += float(unigram[targets][sizes > 0].sum())
                sums["bytes"] += float(sizes.sum())
                advance(targets.numel())
            by_source[name] = sums
    totals = {key: sum(sums[key] for sums in by_source.values()) for key in ("model_nats", "unigram_nats", "bytes")}
    return {**_bpb_metrics(totals), "sources": {name: _bpb_metrics(sums) for name, sums in by_source.items()}}


def _bpb_metrics(sums: dict[str, float]) -> dict[str, Any]:
    model, unigram = (sums[key] / math.log(2) / sums["bytes"] for key in ("model_nats", "unigram_nats"))
    return {
        "bits_per_byte": round(model, 4),
        "unigram_bits_per_byte": round(unigram, 4),
        "below_unigram": round(1 - model / unigram, 4),
        "bytes": int(sums["bytes"]),
    }


def _first_tokens(shards: list[TokenShard], count: int) -> np.ndarray[Any, Any]:
    taken = [np.zeros(0, dtype=np.int64)]
    for shard in shards:
        if count <= 0:
            break
        taken.append(shard.read(0, count))
        count -= len(taken[-1])
    return np.concatenate(taken)


def _split_sequences(tokens: np.ndarray[Any, Any], seq_len: int) -> np.ndarray[Any, Any]:
    """[sequences, seq_len + 1], overlapping by one token, so that every token is a target once."""
    starts = np.arange(max(0, (len(tokens) - 1) // seq_len)) * seq_len
    sequences: np.ndarray[Any, Any] = tokens[starts[:, None] + np.arange(seq_len + 1)]
    return sequences


@lru_cache(maxsize=1)
def _unigram_nats(tokens_dir: Path, fingerprint: str, vocab_size: int) -> np.ndarray[Any, Any]:
    """Counted once, however often a run is evaluated; the fingerprint detects a store that was rebuilt."""
    shards = [shard for source_shards in TokenStore(tokens_dir, "train").sources.values() for shard in source_shards]
    counts = np.ones(vocab_size)
    for shard in shards:
        counts += np.bincount(shard.read(0, UNIGRAM_TOKENS // len(shards)), minlength=vocab_size)
    nats: np.ndarray[Any, Any] = -np.log(counts / counts.sum())
    return nats
