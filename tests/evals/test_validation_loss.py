from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import tiny_recipe
from zero2all.base.errors import Z2aError
from zero2all.evals import evaluate_bpb, validation_loss
from zero2all.evals.validation_loss import count_tokens
from zero2all.model import Z2all
from zero2all.recipe import ModelConfig
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenShard, TokenStore


def test_an_untrained_model_has_the_closed_form(workspace: Path) -> None:
    recipe, tokenizer = tiny_recipe(workspace), Tokenizer(workspace / "tokenizer")
    model = Z2all(ModelConfig.model_validate({**recipe.model.model_dump(), "vocab_size": 512})).init_weights(0)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    result = evaluate_bpb(model, tokenizer, recipe)
    num_targets = num_bytes = 0
    unigram = 0.0
    counts = np.ones(512)
    for shards in TokenStore(workspace / "tokens", "train").sources.values():
        counts += np.bincount(shards[0].tokens, minlength=512)
    for shards in TokenStore(workspace / "tokens", "valid").sources.values():
        ids = shards[0].tokens[: 4096 // 3 + 1]
        targets = [int(id) for id in ids[1 : 1 + (len(ids) - 1) // 32 * 32] if id != tokenizer.eos_token_id]
        num_targets += len(targets)
        num_bytes += sum(len(tokenizer.token_bytes[id]) for id in targets)
        unigram += sum(math.log2(counts.sum() / counts[id]) for id in targets)
    assert result.bits_per_byte == pytest.approx(num_targets * math.log2(512) / num_bytes, abs=1e-3)
    assert result.unigram_bits_per_byte == pytest.approx(unigram / num_bytes, abs=1e-3)
    assert set(result.sources) == {"en", "zh", "code"}


def test_ranks_count_the_training_tokens_together_and_open_few_shards(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank used to open every shard at its first evaluation."""
    store, directory = TokenStore(workspace / "tokens", "train"), workspace / "tokens"
    shards = [shard for shards in store.sources.values() for shard in shards]
    whole = sum(np.bincount(shard.tokens, minlength=512) for shard in shards)
    opened: list[Path] = []
    read = TokenShard.read
    monkeypatch.setattr(TokenShard, "read", lambda self, *part: opened.append(self.stem) or read(self, *part))
    parts = [count_tokens(directory, store.fingerprint, 512, rank, 2) for rank in range(2)]
    assert np.array_equal(parts[0] + parts[1], whole)
    assert sorted(opened) == sorted(shard.stem for shard in shards), "each is opened by one rank"
    monkeypatch.setattr(validation_loss, "UNIGRAM_SHARDS", 2)
    opened.clear()
    count_tokens(directory, store.fingerprint, 512, 0, 1)
    assert opened == [shards[0].stem, shards[2].stem]


def test_a_missing_validation_set_is_reported(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(
        workspace,
        "model.max_position_embeddings=32768",
        "train.seq_len=32768",
        "train.batch_tokens=32768",
        "train.micro_batch_tokens=32768",
    )
    tokenizer = Tokenizer(workspace / "tokenizer")
    model = Z2all(ModelConfig.model_validate({**recipe.model.model_dump(), "vocab_size": 512})).init_weights(0)
    with pytest.raises(Z2aError, match=r"raise corpus\.holdout"):
        evaluate_bpb(model, tokenizer, recipe)
