"""Log-probabilities of answers without a gradient: of the reference, for validation, for KTO's divergence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import torch

from zero2all.console import progress
from zero2all.model import IGNORE_INDEX, document_starts
from zero2all.parallel import ParallelModel
from zero2all.tokens.conversation_rows import best_fit_decreasing
from zero2all.tokens.token_store import Array

BATCH_TOKENS = 16384  # of one forward pass of a rank

ReadSequence = Callable[[int], tuple[Array, Array]]
"""The tokens of a sequence, and which of them are targets."""


def score_answers(
    model: ParallelModel, lengths: Array, read: ReadSequence, seq_len: int, label: str | None = None
) -> Array:
    """The log-probability of the targets of each sequence, in fp64; NaN if it is longer than ``seq_len`` + 1.

    Every rank calls it with the same arguments and gets the same result. Sequences are packed as in training, so that
    the model computes as it does there. With ``label`` a progress bar is shown.
    """
    used = np.flatnonzero(lengths <= seq_len + 1)
    order, starts = best_fit_decreasing(lengths[used], seq_len + 1)
    rows = [used[order[begin:end]] for begin, end in pairwise(starts)]
    per_batch, mesh = max(1, BATCH_TOKENS // seq_len), model.mesh
    batches = [rows[first : first + per_batch] for first in range(0, len(rows), per_batch)]
    logps = torch.zeros(len(lengths), dtype=torch.float64)
    with progress(label, len(batches)) if label else nullcontext(lambda count: None) as advance:
        for first in range(0, len(batches), mesh.dims.dp):
            # Sharded weights are gathered by all ranks at once: one without a batch repeats the first, uncounted.
            mine = first + mesh.dp_rank
            own = batches[mine % len(batches)]
            tokens = np.empty((len(own), seq_len + 1), dtype=np.int64)
            numbers = np.full((len(own), seq_len + 1), -1, dtype=np.int64)
            is_first = np.zeros((len(own), seq_len + 1), dtype=bool)
            for row, members in enumerate(own):
                begin = 0
                for number in members.tolist():
                    ids, mask = read(number)
                    tokens[row, begin : begin + len(ids)] = ids
                    numbers[row, begin : begin + len(ids)] = np.where(mask, number, -1)
                    is_first[row, begin] = True
                    begin += len(ids)
                tokens[row, begin:], is_first[row, begin:] = ids[-1], True  # padding
            inputs, numbers_BS = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(numbers[:, 1:])
            targets = torch.from_numpy(tokens[:, 1:].copy())
            targets[numbers_BS < 0] = IGNORE_INDEX
            doc_starts_BS = document_starts(torch.from_numpy(is_first[:, :-1]))
            losses_BS = model.eval_losses(inputs, targets, doc_starts_BS).cpu().double()  # a Mac has no fp64
            if mine < len(batches):
                scored = numbers_BS >= 0
                logps.index_add_(0, numbers_BS[scored], -losses_BS[scored])
            advance(min(mesh.dims.dp, len(batches) - first))
    summed: Array = model.all_reduce_sum(logps.to(_reduce_device(model))).cpu().numpy()
    summed[lengths > seq_len + 1] = np.nan
    return summed


def _reduce_device(model: ParallelModel) -> torch.device:
    return model.mesh.device if model.mesh.device.type == "cuda" else torch.device("cpu")
