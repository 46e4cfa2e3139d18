"""The teacher of distillation: its likeliest tokens for each row, computed once and kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero2all.checkpoint import RankGroup
from zero2all.console import say
from zero2all.errors import UsageError
from zero2all.hardware import dtype_name
from zero2all.io import fingerprint, write_json
from zero2all.model.ops.soft_loss import likeliest_tokens
from zero2all.model.weights import load_model
from zero2all.recipe import ModelConfig
from zero2all.tokens.token_store import Array
from zero2all.train.initial_weights import find_weights, open_weights
from zero2all.units import show_bytes

BATCH_TOKENS = 8192  # of one forward pass of the teacher
CACHE = "teacher"
DTYPES: dict[str, np.dtype[Any]] = {
    ".ids": np.dtype(np.uint32),
    ".logps": np.dtype(np.float16),
    ".done": np.dtype(np.uint8),
}


@dataclass(frozen=True)
class TeacherRows:
    """The likeliest tokens of some rows."""

    ids_BSK: Tensor
    logps_BSK: Tensor


@dataclass(frozen=True)
class TeacherIdentity:
    """The function that a teacher computes: different weights at the same path are a different teacher."""

    weights: str
    """Checksum."""
    config: dict[str, Any]
    """With the kernels: weights say nothing about RoPE, windows or scales."""
    dtype: str
    """Of computation."""
    device: str
    """Its type: kernels, and so the last bits, are its own."""


class Teacher:
    """A frozen model on this rank's device."""

    def __init__(self, path: Path, config: ModelConfig, top_k: int, device: torch.device, ranks: RankGroup) -> None:
        location = ranks.on_rank0(lambda: find_weights(path))  # a run that is being trained may write another meanwhile
        weights = open_weights(location)
        if weights.config.vocab_size != config.vocab_size:
            raise UsageError(
                f"train.objective.distill.teacher: {location.path} has {weights.config.vocab_size} tokens, and the "
                f"model {config.vocab_size}: teacher and student need the same tokenizer"
            )
        self.top_k = top_k
        parts = ranks.on_all_ranks(lambda: weights.checksums(ranks.rank, ranks.world_size))
        self.model = load_model(weights, device).eval()
        self.identity = TeacherIdentity(
            fingerprint({name: digest for part in parts for name, digest in part.items()}),
            weights.config.model_dump(mode="json"),
            dtype_name(next(self.model.parameters()).dtype),
            device.type,
        )

    @torch.no_grad()
    def likeliest(self, tokens_BS: Tensor, doc_starts_BS: Tensor | None) -> TeacherRows:
        device = self.model.rotary_2SE.device
        per_pass = max(1, BATCH_TOKENS // tokens_BS.shape[1])
        ids, logps = [], []
        for first in range(0, len(tokens_BS), per_pass):
            rows = slice(first, first + per_pass)
            starts = None if doc_starts_BS is None else doc_starts_BS[rows].to(device)
            logits = self.model(tokens_BS[rows].to(device), doc_starts_BS=starts)
            of_rows = likeliest_tokens(logits, self.top_k)
            ids.append(of_rows[0])
            logps.append(of_rows[1])
        return TeacherRows(torch.cat(ids), torch.cat(logps))


@dataclass(frozen=True)
class TeacherCacheKey:
    """Everything that changes what the teacher expects of a row, or how it is stored."""

    teacher: TeacherIdentity
    samples: str
    """The fingerprint of the dataset: which tokens are in which row."""
    seq_len: int
    top_k: int
    masks_documents: bool
    """Whether the teacher sees the document of a token alone, from where the dataset lets it start."""
    end_of_text_first: bool
    version: int = 2
    """Counts changes of how rows are computed from the same inputs."""

    @property
    def name(self) -> str:
        return fingerprint(asdict(self))


class TeacherCache:
    """Rows of a stage on disk: token ids, log-probabilities in fp16, and which rows are there.

    Files are sparse, so that rows that no run reads take no space. Ranks write different rows.
    """

    def __init__(self, directory: Path, rows: dict[str, int], seq_len: int, top_k: int, ranks: RankGroup) -> None:
        self._names = sorted(rows)
        self._paths = {name: directory / f"{number}" for number, name in enumerate(self._names)}
        self._shapes = {name: (count, seq_len, top_k) for name, count in rows.items()}
        ranks.on_rank0(lambda: self._create(directory))

    def _create(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name, path in self._paths.items():
            count, seq_len, top_k = self._shapes[name]
            for suffix, dtype in DTYPES.items():
                size = dtype.itemsize * (1 if suffix == ".done" else seq_len * top_k)
                with open(path.with_suffix(suffix), "ab") as file:
                    file.truncate(max(1, count * size))
        write_json(directory / "sources.json", self._names)
        size = sum(6 * int(np.prod(shape)) for shape in self._shapes.values())
        say(f"the teacher's likeliest tokens are kept in {directory}: up to {show_bytes(size)}")

    def read(self, located: Sequence[tuple[str, int]]) -> tuple[Array, Array, Array]:
        """Ids, log-probabilities, and which rows are there."""
        _, seq_len, top_k = next(iter(self._shapes.values()))
        shape = (len(located), seq_len, top_k)
        ids, logps = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
        there = np.zeros(len(located), dtype=bool)
        for place, (name, row) in enumerate(located):
            there[place] = self._read(name, ".done", row)[0] == 1
            if there[place]:
                ids[place] = self._read(name, ".ids", row).reshape(shape[1:])
                logps[place] = self._read(name, ".logps", row).reshape(shape[1:])
        return ids, logps, there

    def write(self, located: Sequence[tuple[str, int]], ids: Array, logps: Array) -> None:
        for place, (name, row) in enumerate(located):
            self._write(name, ".ids", row, ids[place])
            self._write(name, ".logps", row, logps[place])
            self._write(name, ".done", row, np.ones(1))  # last, so that a killed process leaves no half row

    # Not mapped into memory: on a full disk a write to a sparse mapping ends the process with a bus error.

    def _read(self, name: str, suffix: str, row: int) -> Array:
        count = 1 if suffix == ".done" else int(np.prod(self._shapes[name][1:]))
        dtype = DTYPES[suffix]
        return np.fromfile(
            self._paths[name].with_suffix(suffix), dtype=dtype, count=count, offset=row * count * dtype.itemsize
        )

    def _write(self, name: str, suffix: str, row: int, values: Array) -> None:
        data = values.astype(DTYPES[suffix]).tobytes()
        with open(self._paths[name].with_suffix(suffix), "r+b") as file:
            file.seek(row * len(data))
            file.write(data)
