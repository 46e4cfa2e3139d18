"""Packed fine-tuning against padding, on conversations as teams have them: useful tokens a second, and equal losses."""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import tiny_recipe
from zero2all.corpus import build_corpus
from zero2all.model import IGNORE_INDEX, Z2all, document_starts
from zero2all.recipe import ModelConfig
from zero2all.tokenizer import Tokenizer, train_tokenizer
from zero2all.tokens import TokenStore, build_tokens
from zero2all.tokens.conversation_rows import ConversationRows

SEQ_LEN, BATCH, ROUNDS = 1024, 4, 6


def step(model: Z2all, tokens: torch.Tensor, mask: torch.Tensor, is_first: torch.Tensor) -> float:
    """Seconds of a forward and backward pass."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:].masked_fill(~mask[:, 1:], IGNORE_INDEX)
    begin = time.perf_counter()
    model(inputs, targets_BS=targets, doc_starts_BS=document_starts(is_first[:, :-1])).sum().backward()
    model.zero_grad()
    return time.perf_counter() - begin


@pytest.mark.slow
@pytest.mark.long
def test_packing_doubles_the_useful_tokens_a_second(shared_corpus: Path, workspace: Path, tmp_path: Path) -> None:
    sources = [{"name": "alpaca", "kind": "chat", "paths": [str(shared_corpus / "sft" / "alpaca_en_5k.json")]}]
    recipe = tiny_recipe(
        workspace, f"out={tmp_path}", f"corpus.sources={json.dumps(sources)}", "corpus.dir=null", "tokens.dir=null",
        "tokenizer.dir=null", "tokenizer.vocab_size=4096", f"train.seq_len={SEQ_LEN}",
        f"model.max_position_embeddings={SEQ_LEN}", "train.batch_tokens=4096", "train.micro_batch_tokens=null",
    )  # fmt: skip
    build_corpus(recipe.corpus, recipe.documents_dir)
    train_tokenizer(recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    end_of_text = Tokenizer(recipe.tokenizer_dir).eos_token_id
    shards = TokenStore(recipe.tokens_dir, "train").sources["alpaca"]
    rows = ConversationRows(shards, SEQ_LEN)
    documents = np.random.default_rng(1).permutation(rows.used_documents)
    model = (
        Z2all(ModelConfig(preset="z2all-3m", vocab_size=4096, max_position_embeddings=SEQ_LEN)).init_weights(0).train()
    )
    useful, seconds = {"packed": 0, "padded": 0}, {"packed": 0.0, "padded": 0.0}
    numbers = iter(documents.tolist())
    for turn in range(ROUNDS + 1):
        packed = [(*rows.read(row), rows.is_first(row)) for row in range(turn * BATCH, (turn + 1) * BATCH)]
        # As many positions as a packed batch, padded to the longest conversation of the batch, as others do.
        batch: list[tuple[np.ndarray, np.ndarray]] = []  # type: ignore[type-arg]
        while not batch or (len(batch) + 1) * max(len(ids) for ids, _ in batch) < BATCH * SEQ_LEN:
            batch += [rows.read_document(number) for number in islice(numbers, 1)]
        width = max(len(ids) for ids, _ in batch)
        padded = []
        for ids, mask in batch:
            rest = (0, width - len(ids))
            is_first = np.arange(width) >= len(ids)
            padded.append((np.pad(ids, rest, constant_values=end_of_text), np.pad(mask, rest), is_first))
        for name, made, count in (
            ("packed", packed, sum(one.tokens for row in range(BATCH) for one in rows.documents(turn * BATCH + row))),
            ("padded", padded, sum(len(ids) for ids, _ in batch)),
        ):
            tokens, mask, first = (torch.from_numpy(np.stack(parts)) for parts in zip(*made, strict=True))
            took = step(model, tokens.long(), mask, first)
            if turn:  # the first warms up
                useful[name], seconds[name] = useful[name] + count, seconds[name] + took
    speed = {name: useful[name] / seconds[name] for name in useful}
    assert rows.fill > 0.97
    assert speed["packed"] > 2 * speed["padded"], speed
