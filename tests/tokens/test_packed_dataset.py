from __future__ import annotations

from pathlib import Path

import numpy as np

from zero2all.tokens import PackedDataset


def test_one_epoch_covers_every_token_of_every_shard_once(workspace: Path) -> None:
    dataset = PackedDataset.open(workspace / "tokens", "train", seq_len=32, seed=4)
    rows = dataset.tokens(0, dataset.samples_per_epoch)
    expected = []
    for shards in dataset.store.sources.values():
        tokens = shards[0].tokens
        covered = (len(tokens) - 1) // 32 * 32
        expected += list(map(bytes, tokens[:covered].reshape(-1, 32).astype(np.int64)))
    assert sorted(map(bytes, rows[:, :-1])) == sorted(expected)


def test_the_target_of_the_last_token_is_the_token_that_follows_it(workspace: Path) -> None:
    dataset = PackedDataset.open(workspace / "tokens", "train", seq_len=32)
    sources, sequences = dataset.order.locate(0, 1)
    shard, first, _ = dataset._sequences[dataset.order.names[sources[0]]].token_range(int(sequences[0]))
    assert (dataset.tokens(0, 1)[0] == shard.tokens[first : first + 33]).all()


def test_the_fingerprint_covers_what_the_order_depends_on(workspace: Path) -> None:
    def fingerprint(**changes: object) -> str:
        return PackedDataset.open(workspace / "tokens", **{"split": "train", "seq_len": 32, **changes}).fingerprint  # type: ignore[arg-type]

    assert fingerprint() == fingerprint()
    others = [
        fingerprint(seed=5),
        fingerprint(stage="x"),
        fingerprint(seq_len=16),
        fingerprint(split="valid"),
        fingerprint(mixture={"en": 1.0, "zh": 2.0}),
    ]
    assert len({fingerprint(), *others}) == 6


def test_documents_account_for_every_token(workspace: Path) -> None:
    dataset = PackedDataset.open(workspace / "tokens", "train", seq_len=32)
    for sample in range(40):
        spans = dataset.documents(sample, sample + 1)
        assert sum(span.tokens for span in spans) == 33
        tokens = dataset.tokens(sample, sample + 1)[0]
        offset = 0
        for span in spans:
            shard = next(s for s in dataset.store.sources[span.source] if s.stem.name == span.shard)
            start = int(shard.document_offsets[span.document]) + span.first_token
            assert (shard.tokens[start : start + span.tokens] == tokens[offset : offset + span.tokens]).all()
            offset += span.tokens
