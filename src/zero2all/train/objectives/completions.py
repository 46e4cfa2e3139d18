"""The completions that a run compares, and their log-probabilities: by the model of the step, for validation, by the
reference model (computed once and kept in the run directory), and for KTO of completions to other prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zero2all.base.console import progress, say
from zero2all.base.errors import Z2aError
from zero2all.base.io import atomic_path, fingerprint, read_record, write_record
from zero2all.base.machine.devices import dtype_name
from zero2all.checkpoint import InitialWeights, RankGroup
from zero2all.model import IGNORE_INDEX, document_starts
from zero2all.parallel import ParallelModel
from zero2all.recipe import ModelConfig, Recipe
from zero2all.recipe.objective import ObjectiveRecipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore
from zero2all.tokens.conversation_rows import ConversationRows, best_fit_decreasing
from zero2all.tokens.token_store import Array, Split
from zero2all.train.data_loader import Batch
from zero2all.train.initial_weights import load_initial_weights
from zero2all.train.objectives.preference import CompletionBatch
from zero2all.train.plan import Plan
from zero2all.train.run import Run

BATCH_TOKENS = 16384  # of one forward pass of a rank
REFERENCE = "reference"  # the directory of its log-probabilities in a run
MANIFEST = "reference.json"


class MismatchedCompletions:
    """For each document of a source, its prompt with the completion of the next document that has a different prompt.

    Documents with the same prompt are the two of a pair, or several ratings of one prompt, anywhere in the source. The
    pairing depends on the store alone, so that the reference scores each once.
    """

    def __init__(self, rows: ConversationRows, source: str) -> None:
        self.seq_len, self._rows = rows.seq_len, rows
        used = rows.used_documents
        prompts, sizes = [], np.zeros((len(used), 2), dtype=np.int64)
        for place, number in enumerate(used.tolist()):
            tokens, mask = rows.read_document(number)
            targets = np.flatnonzero(mask)
            prompts.append(hashlib.sha256(tokens[: targets[0]].tobytes()).digest())
            sizes[place] = targets[0], targets[-1] + 1 - targets[0]
        partners = _next_different(prompts)
        if partners is None:
            raise Z2aError(
                f"all conversations of {source} have the same prompt, and KTO needs completions to different prompts: "
                f"leave {source} out of train.mixture, or put it into one source with other prompts"
            )
        self._next = np.full(len(rows.document_lengths), -1, dtype=np.int64)
        self._next[used] = used[partners]
        self.lengths = np.full(len(rows.document_lengths), np.iinfo(np.int64).max, dtype=np.int64)
        self.lengths[used] = sizes[:, 0] + sizes[partners, 1] + 1

    def read(self, number: int) -> tuple[Array, Array]:
        """Tokens, and which of them are the completion."""
        tokens, mask = self._rows.read_document(number)
        other, other_mask = self._rows.read_document(int(self._next[number]))
        prompt = tokens[: int(mask.argmax())]
        places = np.flatnonzero(other_mask)
        completion, completion_mask = (values[places[0] : places[-1] + 1] for values in (other, other_mask))
        return (  # with an end-of-text token, as every document ends
            np.concatenate([prompt, completion, tokens[-1:]]),
            np.concatenate([np.zeros(len(prompt), dtype=bool), completion_mask, [False]]),
        )


def _next_different(prompts: list[bytes]) -> Array | None:
    """The place of the next prompt, around the end, that is different from each; None if all are the same."""
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    kinds = np.array([numbers[prompt] for prompt in prompts], dtype=np.int64)
    changes = np.flatnonzero(kinds != np.roll(kinds, -1))  # the next one is different
    if len(kinds) and not len(changes):
        return None
    found = changes[np.searchsorted(changes, np.arange(len(kinds))) % max(1, len(changes))]
    return (found + 1) % max(1, len(kinds))


ReadSequence = Callable[[int], tuple[Array, Array]]
"""The tokens of a sequence, and which of them are targets."""


def score_completions(
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


@dataclass(frozen=True)
class ReferenceManifest:
    """What the files in the directory were computed from."""

    key: str
    names: list[str]
    """Split and source of each file, in the order of their numbers."""


Reference = Mapping[str, Array]
"""The log-probability of each document's completion in fp64, by split and source, such as ``train/pairs`` or
``mismatched/pairs``."""


def reference_key(
    init_fingerprint: str | None, stores: list[str], seq_len: int, dtype: str, *, mismatched: bool
) -> str:
    """The number counts changes of how completions are packed, masked and paired."""
    return fingerprint([2, init_fingerprint, stores, seq_len, dtype, mismatched])


def read_reference(directory: Path, key: str) -> Reference | None:
    """What is stored, if it was computed from the same."""
    path = directory / MANIFEST
    if not path.exists():
        return None
    manifest = read_record(ReferenceManifest, path)
    if manifest.key != key:
        return None
    try:
        arrays = [np.load(directory / f"{number}.npy", allow_pickle=False) for number in range(len(manifest.names))]
    except (OSError, ValueError):
        return None
    return dict(zip(manifest.names, arrays, strict=True))


def compute_reference(
    model: ParallelModel,
    rows: Mapping[tuple[Split, str], ConversationRows],
    mismatched: Mapping[str, MismatchedCompletions],
) -> Reference:
    """With the model as it is now; every rank calls it."""
    logps = {}
    for (split, source), of_source in rows.items():
        logps[f"{split}/{source}"] = score_completions(
            model,
            of_source.document_lengths,
            of_source.read_document,
            of_source.seq_len,
            f"reference log-probabilities of {source} ({split})",
        )
    for source, pairs in mismatched.items():
        logps[f"mismatched/{source}"] = score_completions(
            model, pairs.lengths, pairs.read, pairs.seq_len, f"reference divergence of {source}"
        )
    return logps


def write_reference(directory: Path, key: str, reference: Reference) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST).unlink(missing_ok=True)
    for number, array in enumerate(reference.values()):
        with atomic_path(directory / f"{number}.npy") as partial, open(partial, "wb") as file:
            np.save(file, array, allow_pickle=False)
    write_record(directory / MANIFEST, ReferenceManifest(key, list(reference)))


def objective_config(config: ModelConfig, objective: ObjectiveRecipe) -> ModelConfig:
    """The config with a loss kernel that can weigh tokens differently: Liger's gradient assumes equal weights."""
    if not objective.weighs_tokens or config.ops.cross_entropy != "auto":
        return config
    return config.model_copy(update={"ops": config.ops.model_copy(update={"cross_entropy": "chunked"})})


class CompletionSources:
    """The rows of both splits of all sources that a run trains on, and the reference if the objective needs one."""

    def __init__(self, recipe: Recipe, plan: Plan, *, mismatched: bool) -> None:
        self.seq_len = max(stage.seq_len for stage in recipe.train.resolved_stages())
        self.fingerprints: list[str] = []
        self.rows: dict[tuple[Split, str], ConversationRows] = {}
        per_example = 2 if recipe.train.conversations == "pairs" else 1
        for split in ("train", "valid"):
            store = TokenStore(recipe.tokens_dir, split)
            self.fingerprints.append(store.fingerprint)
            for name in plan.sources:
                shards = store.sources.get(name, [])
                self.rows[split, name] = ConversationRows(shards, self.seq_len, per_example=per_example)
        self.mismatched: dict[str, MismatchedCompletions] = {}
        if mismatched:
            self.mismatched = {name: MismatchedCompletions(self.rows["train", name], name) for name in plan.sources}
        self.reference: Reference | None = None

    def reference_of(self, split: str, source: str) -> Array | None:
        """None if the objective needs none."""
        return None if self.reference is None else self.reference[f"{split}/{source}"]

    def completion_batch(self, batch: Batch, device: torch.device) -> CompletionBatch:
        """The completions of a rank's rows; rows of padding have none."""
        assert batch.completions is not None
        rows = batch.completions.rows
        shape = (len(batch.inputs), max(1, max((len(row.documents) for row in rows), default=1)))
        segments = np.zeros(batch.inputs.shape, dtype=np.int64)
        lengths, desirable = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=bool)
        reference = np.zeros(shape)
        for place, (row, source) in enumerate(zip(rows, batch.sources, strict=False)):
            segments[place] = row.segments[1:]
            count = len(row.documents)
            lengths[place, :count], desirable[place, :count] = row.lengths, row.desirable
            if (logps := self.reference_of("train", source)) is not None:
                reference[place, :count] = logps[row.documents]
        columns = (segments, lengths, desirable, reference.astype(np.float32))
        return CompletionBatch(*map(torch.from_numpy, columns)).to(device)

    def validation_completions(self, model: ParallelModel) -> tuple[Tensor, CompletionBatch] | None:
        """Log-probabilities of all completions of the validation set, as one row of them; None if there are none."""
        logps, reference, lengths, desirable = [], [], [], []
        for (split, source), rows in self.rows.items():
            if split != "valid":
                continue
            used, label = rows.used_documents, f"answers of {source} (validation)"
            scores = score_completions(model, rows.document_lengths, rows.read_document, rows.seq_len, label)
            logps.append(scores[used])
            of_source = self.reference_of("valid", source)
            reference.append((np.zeros(len(scores)) if of_source is None else of_source)[used])
            lengths.append(rows.document_targets[used])
            desirable.append(rows.document_desirable[used])
        if not sum(map(len, logps)):
            return None
        columns = [torch.from_numpy(np.concatenate(parts))[None] for parts in (lengths, desirable, reference)]
        empty = torch.zeros(1, 0, dtype=torch.int64)
        return torch.from_numpy(np.concatenate(logps))[None], CompletionBatch(empty, *columns)


def open_reference(
    run: Run, model: ParallelModel, tokenizer: Tokenizer, completions: CompletionSources, ranks: RankGroup
) -> InitialWeights | None:
    """Set the reference of a run: as stored, or computed with the initial weights, which must be those that it began
    with. Returns these weights if the model has them now, because the reference was computed."""
    directory, init = run.directory / REFERENCE, run.recipe.train.init
    assert init is not None
    key_of = partial(
        reference_key,
        stores=completions.fingerprints,
        seq_len=completions.seq_len,
        dtype=dtype_name(model.dtype),
        mismatched=bool(completions.mismatched),
    )
    recorded = ranks.on_rank0(run.initial_weights)
    if recorded is not None:
        key = key_of(recorded.fingerprint)
        stored = ranks.on_rank0(lambda: read_reference(directory, key))
        if stored is not None:
            completions.reference = stored
            return None
    loaded = load_initial_weights(init, model, tokenizer, ranks)
    if recorded is not None and recorded.fingerprint != loaded.fingerprint:
        raise Z2aError(
            f"{loaded.path} is not what {run.directory} began with, and the log-probabilities by it are not in "
            f"{directory}: restore it, or train another run (--name)"
        )
    completions.reference = reference = compute_reference(model, completions.rows, completions.mismatched)
    key = key_of(loaded.fingerprint)
    ranks.on_rank0(lambda: write_reference(directory, key, reference))
    say(f"reference log-probabilities of {sum(map(len, reference.values())):,} completions are in {directory}")
    return loaded
