from __future__ import annotations

from pathlib import Path

import numpy as np

from zero2all.tokens import Samples


def test_one_epoch_covers_every_token_of_every_shard_once(world: Path) -> None:
    samples = Samples.open(world / "tokens", "train", seq_len=32, seed=4)
    rows = samples.tokens(0, samples.per_epoch)
    expected = []
    for shards in samples.store.sources.values():
        tokens = shards[0].tokens
        covered = (len(tokens) - 1) // 32 * 32
        expected += list(map(bytes, tokens[:covered].reshape(-1, 32).astype(np.int64)))
    assert sorted(map(bytes, rows[:, :-1])) == sorted(expected)


def test_the_target_of_a_rows_last_token_is_the_token_that_follows_it(world: Path) -> None:
    samples = Samples.open(world / "tokens", "train", seq_len=32)
    sources, numbers = samples.order.locate(0, 1)
    shard, first, _ = samples._rows[samples.order.names[sources[0]]].place(int(numbers[0]))
    assert (samples.tokens(0, 1)[0] == shard.tokens[first : first + 33]).all()


def test_fingerprint_follows_what_the_order_depends_on(world: Path) -> None:
    def of(**changes: object) -> str:
        return Samples.open(world / "tokens", **{"split": "train", "seq_len": 32, **changes}).fingerprint  # type: ignore[arg-type]

    assert of() == of()
    others = [of(seed=5), of(stage="x"), of(seq_len=16), of(split="valid"), of(mixture={"en": 1.0, "zh": 2.0})]
    assert len({of(), *others}) == 6


def test_documents_account_for_every_token(world: Path) -> None:
    samples = Samples.open(world / "tokens", "train", seq_len=32)
    for sample in range(40):
        parts = samples.documents(sample, sample + 1)
        assert sum(part.tokens for part in parts) == 33
        tokens = samples.tokens(sample, sample + 1)[0]
        at = 0
        for part in parts:
            shard = next(s for s in samples.store.sources[part.source] if s.stem.name == part.shard)
            start = int(shard.document_starts[part.document]) + part.first_token
            assert (shard.tokens[start : start + part.tokens] == tokens[at : at + part.tokens]).all()
            at += part.tokens
