"""Loss, perplexity and bits per byte of a model on the validation set and on test sets.

Data-parallel ranks share the batches, which are the same for any number of ranks; sums are reduced once at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zero2all.base.console import progress
from zero2all.base.errors import UsageError
from zero2all.evals.scored_text import Array, EvalText, Packed, Row, Scoring, Stream, Windowed, read_stream
from zero2all.model import IGNORE_INDEX, ModelInputs, Z2all, document_starts
from zero2all.model.rope_table import depends_on_length
from zero2all.parallel import ParallelModel
from zero2all.recipe import Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenShard, TokenStore, verify_store
from zero2all.track.eval_record import LossEvaluation, LossMetrics

BATCH_TOKENS = 16384  # of one forward pass
MAX_BATCH_ROWS = 16  # of one forward pass: small batches divide evenly over ranks
UNIGRAM_TOKENS = 2_000_000_000  # over all shards: some 20 seconds, and more would not change the metric
UNIGRAM_SHARDS = 4096  # of which they are; a store of terabytes has more, and each is a file to open


def evaluate_bpb(
    model: Z2all | ParallelModel,
    tokenizer: Tokenizer,
    recipe: Recipe,
    test_sets: Mapping[str, TokenShard] | None = None,
) -> LossEvaluation:
    """The loss on the recipe's validation set and on test sets, in packed sequences of ``train.seq_len``.

    >>> evaluation = evaluate_bpb(run.load_model(), run.tokenizer(), run.recipe)
    >>> evaluation.bits_per_byte, evaluation.sources["zh"].perplexity

    Of the validation set ``evals.tokens`` are scored, an equal part of each source; of a test set everything.
    End-of-text tokens are context, never scored, so only the bytes of the text count. In fine-tuning, only what
    the assistant writes is scored of a conversation. The unigram model gives each token its share of the training
    tokens, with add-one smoothing.

    Every rank of a parallel model calls this with the same arguments and gets the same result.
    """
    texts = [*validation_texts(recipe), *texts_of_test_sets(test_sets or {})]
    return evaluate_texts(model, tokenizer, texts, packed_scoring(recipe), unigram_nats(recipe, tokenizer, model))


def packed_scoring(recipe: Recipe) -> Packed:
    """Sequences as in training."""
    return Packed(recipe.train.seq_len, recipe.train.masks_documents, recipe.train.end_of_text_first)


def validation_texts(recipe: Recipe) -> list[EvalText]:
    """The sources of the validation set."""
    store = TokenStore(recipe.tokens_dir, "valid")
    store.require_full_sequence(recipe.train.seq_len)
    verify_store(store)
    budget = max(recipe.train.seq_len, recipe.evals.tokens // len(store.sources))
    cut = recipe.train.conversations == "cut"
    return [
        EvalText(name, "source", shards, budget, answers_only=not cut and store.kinds[name] != "text")
        for name, shards in store.sources.items()
    ]


def texts_of_test_sets(test_sets: Mapping[str, TokenShard]) -> list[EvalText]:
    return [EvalText(name, "test set", [shard]) for name, shard in test_sets.items()]


def unigram_nats(recipe: Recipe, tokenizer: Tokenizer, model: Z2all | ParallelModel | None = None) -> Array:
    """-log of each token's share of the training tokens. The ranks of a parallel model count a part of them each."""
    fingerprint = TokenStore(recipe.tokens_dir, "train").fingerprint
    mesh = model.mesh if isinstance(model, ParallelModel) else None
    rank, ranks = (0, 1) if mesh is None else (mesh.rank, mesh.dims.world_size)
    counts = count_tokens(recipe.tokens_dir, fingerprint, tokenizer.vocab_size, rank, ranks)
    if isinstance(model, ParallelModel):
        counts = model.mesh.sum_over_ranks(torch.from_numpy(counts)).numpy()
    counts = counts + 1
    nats: Array = -np.log(counts / counts.sum())
    return nats


@torch.no_grad()
def evaluate_texts(
    model: Z2all | ParallelModel,
    tokenizer: Tokenizer,
    texts: Sequence[EvalText],
    scoring: Scoring,
    unigram: Array | None,
) -> LossEvaluation:
    """The loss on texts that were tokenized with the model's tokenizer."""
    length, context = scoring.seq_len if isinstance(scoring, Packed) else scoring.window, model.config
    if length > context.max_position_embeddings:
        raise UsageError(
            f"{length} tokens are more than the context of the model ({context.max_position_embeddings}): "
            "give a smaller --window"
        )
    byte_lengths = np.array(tokenizer.token_byte_lengths)
    streams = [read_stream(text, tokenizer.eos_token_id, scoring) for text in texts]
    if not any(stream.rows for stream in streams):
        raise UsageError("there is nothing to evaluate on: give test sets or a validation set")
    nats = _score_streams(model, streams, byte_lengths, scoring)
    sums = {
        (text.kind, text.name): _sum_units(stream, of_stream, byte_lengths, unigram)
        for text, stream, of_stream in zip(texts, streams, nats, strict=True)
        if stream.rows
    }
    sources = {name: part for (kind, name), part in sums.items() if kind == "source"}
    test_sets = {name: part for (kind, name), part in sums.items() if kind == "test set"}
    total = _metrics(list((sources or test_sets).values()))
    return LossEvaluation(
        **vars(total),
        sources={name: _metrics([part]) for name, part in sources.items()},
        test_sets={name: _metrics([part]) for name, part in test_sets.items()},
        scoring=str(scoring),
    )


@dataclass(frozen=True)
class _Batch:
    """Rows of streams, padded to the longest."""

    inputs_BS: Tensor
    targets_BS: Tensor
    """IGNORE_INDEX where a token is not scored."""
    units_BS: Tensor
    """Over all streams."""
    doc_starts_BS: Tensor | None
    """None if attention crosses documents."""


def _score_streams(
    model: Z2all | ParallelModel, streams: Sequence[Stream], byte_lengths: Array, scoring: Scoring
) -> list[Array]:
    """The loss of each unit of each stream, in nats; the same on every rank."""
    firsts = np.cumsum([0, *(_num_units(stream) for stream in streams)])
    rows = [(row, number) for number, stream in enumerate(streams) for row in stream.rows]
    rows.sort(key=lambda item: item[0].length, reverse=True)  # little padding, and memory is short at once or never
    batches = _split_rows(rows, equal_lengths=isinstance(scoring, Windowed) and depends_on_length(model.config))
    # Sequences have the length of training, which all layouts can divide.
    width = scoring.seq_len if isinstance(scoring, Packed) else None
    masks_documents = isinstance(scoring, Packed) and scoring.document_mask
    rank, ranks = (model.mesh.dp_rank, model.mesh.dims.dp) if isinstance(model, ParallelModel) else (0, 1)
    nats = torch.zeros(int(firsts[-1]), dtype=torch.float64)
    with progress("evaluating the loss", len(batches)) as advance:
        for first in range(0, len(batches), ranks):
            # Sharded weights are gathered by all ranks at once: one without a batch repeats the first, uncounted.
            mine = first + rank
            batch = _make_batch(
                batches[mine % len(batches)], streams, firsts, byte_lengths, width, masks_documents=masks_documents
            )
            losses_BS = _compute_losses(model, batch).cpu().double()  # a Mac has no fp64
            if mine < len(batches):
                scored = batch.targets_BS != IGNORE_INDEX
                nats.index_add_(0, batch.units_BS[scored], losses_BS[scored])
            advance(min(ranks, len(batches) - first))
    if isinstance(model, ParallelModel):
        nats = model.all_reduce_sum(nats)
    return np.split(nats.numpy(), firsts[1:-1])


def _split_rows(rows: list[tuple[Row, int]], *, equal_lengths: bool) -> list[list[tuple[Row, int]]]:
    """Batches of rows that are sorted by length; ``equal_lengths``: without padding, which would change positions."""
    batches: list[list[tuple[Row, int]]] = []
    for row, number in rows:
        width = batches[-1][0][0].length if batches else 0
        is_full = not batches or len(batches[-1]) >= min(MAX_BATCH_ROWS, max(1, BATCH_TOKENS // width))
        if is_full or (equal_lengths and row.length != width):
            batches.append([])
        batches[-1].append((row, number))
    return batches


def _make_batch(
    rows: list[tuple[Row, int]],
    streams: Sequence[Stream],
    firsts: Array,
    byte_lengths: Array,
    width: int | None,
    *,
    masks_documents: bool,
) -> _Batch:
    shape = (len(rows), width or rows[0][0].length)
    inputs, units = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    targets, is_first = np.full(shape, IGNORE_INDEX, dtype=np.int64), np.zeros(shape, dtype=bool)
    for place, (row, number) in enumerate(rows):
        stream, stop = streams[number], row.start + row.length
        inputs[place, : row.length] = stream.tokens[row.start : stop]
        is_first[place, : row.length] = stream.is_first[row.start : stop]
        wanted = stream.tokens[row.start + 1 : stop + 1]
        mask = stream.mask[row.start + 1 : stop + 1]
        is_scored = mask & (np.arange(row.length) >= row.first_scored) & (byte_lengths[wanted] > 0)
        targets[place, : row.length] = np.where(is_scored, wanted, IGNORE_INDEX)
        units[place, : row.length] = stream.units[row.start + 1 : stop + 1] + firsts[number]
    starts = document_starts(torch.from_numpy(is_first)) if masks_documents else None
    return _Batch(torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(units), starts)


def _compute_losses(model: Z2all | ParallelModel, batch: _Batch) -> Tensor:
    doc_starts_BS = batch.doc_starts_BS
    if isinstance(model, ParallelModel):
        return model.eval_losses(batch.inputs_BS, batch.targets_BS, doc_starts_BS)
    device = model.rotary_2SE.device
    losses: Tensor = model(
        ModelInputs(
            batch.inputs_BS.to(device),
            targets_BS=batch.targets_BS.to(device),
            doc_starts_BS=None if doc_starts_BS is None else doc_starts_BS.to(device),
        )
    )
    return losses


@dataclass(frozen=True)
class _UnitSums:
    """Sums over the scored tokens of each unit of a stream."""

    nats: Array
    tokens: Array
    bytes: Array
    unigram_nats: Array | None
    documents: int


def _num_units(stream: Stream) -> int:
    return int(stream.units.max()) + 1 if len(stream.units) else 0


def _sum_units(stream: Stream, nats: Array, byte_lengths: Array, unigram: Array | None) -> _UnitSums:
    """Units without a scored token, such as those after the last full sequence, are left out."""
    of_targets = slice(stream.targets.start, stream.targets.stop)
    tokens, units = stream.tokens[of_targets], stream.units[of_targets]
    sizes = byte_lengths[tokens] * stream.mask[of_targets]
    scored = sizes > 0

    def sums(units: Array, values: Array) -> Array:
        return np.bincount(units, values, minlength=_num_units(stream))

    counts = sums(units[scored], np.ones(int(scored.sum())))
    kept = counts > 0
    unigram_sums = None if unigram is None else sums(units[scored], unigram[tokens[scored]])[kept]
    return _UnitSums(nats[kept], counts[kept], sums(units, sizes)[kept], unigram_sums, stream.documents)


def _metrics(parts: Sequence[_UnitSums]) -> LossMetrics:
    """Over all units of some streams."""
    nats, tokens, size = (
        float(sum(getattr(part, name).sum() for part in parts)) for name in ("nats", "tokens", "bytes")
    )
    bits = nats / math.log(2) / size
    loss = nats / tokens
    unigram_sums = [part.unigram_nats for part in parts if part.unigram_nats is not None]
    unigram = sum(float(one.sum()) for one in unigram_sums) / math.log(2) / size if unigram_sums else None
    bits_error = ratio_error([(part.nats / math.log(2), part.bytes) for part in parts])
    loss_error = ratio_error([(part.nats, part.tokens) for part in parts])
    return LossMetrics(
        bits_per_byte=round(bits, 6),
        bytes=int(size),
        loss=round(loss, 6),
        perplexity=round(math.exp(loss), 4) if loss < 700 else None,
        tokens=int(tokens),
        num_documents=sum(part.documents for part in parts),
        bits_per_byte_error=None if bits_error is None else round(bits_error, 6),
        loss_error=None if loss_error is None else round(loss_error, 6),
        unigram_bits_per_byte=None if unigram is None else round(unigram, 6),
        below_unigram=None if unigram is None else round(1 - bits / unigram, 6),
    )


def ratio_error(strata: Sequence[tuple[Array, Array]]) -> float | None:
    """Standard error of the ratio of two sums over units, by the delta method; None if a stratum has one unit.

    >>> ratio_error([(np.array([1.0, 3.0]), np.array([1.0, 1.0]))])
    1.0

    Strata, such as sources, have a fixed share in the sums: only the spread inside each of them counts.
    """
    total = sum(float(denominators.sum()) for _, denominators in strata)
    ratio = sum(float(numerators.sum()) for numerators, _ in strata) / total
    variance = 0.0
    for numerators, denominators in strata:
        if len(numerators) < 2:
            return None
        residuals = numerators - ratio * denominators
        variance += len(residuals) * float(residuals.var(ddof=1))
    return math.sqrt(variance) / total


@lru_cache(maxsize=1)
def count_tokens(tokens_dir: Path, fingerprint: str, vocab_size: int, rank: int, ranks: int) -> Array:
    """The part of a rank. Counted once, however often a run is evaluated; the fingerprint detects a store that
    was rebuilt."""
    shards = [shard for source_shards in TokenStore(tokens_dir, "train").sources.values() for shard in source_shards]
    shards = shards[:: -(-len(shards) // UNIGRAM_SHARDS)]
    counts = np.zeros(vocab_size)
    for shard in shards[rank::ranks]:
        counts += np.bincount(shard.read(0, UNIGRAM_TOKENS // len(shards)), minlength=vocab_size)
    return counts
