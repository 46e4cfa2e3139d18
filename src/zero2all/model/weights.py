"""Stored weights, read part by part: each rank of a sharded model reads only its own shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from zero2all.base.errors import Z2aError
from zero2all.model.lora import ADAPTER_MARK
from zero2all.model.z2all import Z2all
from zero2all.recipe import ModelConfig
from zero2all.recipe.optimizer_plugin import ROUTER

CHUNK_ROWS = 256
VOCABULARY_WEIGHTS = ("embed_tokens.weight", "lm_head.weight")


class WeightReader(Protocol):
    """Weights under the names of ``Z2all.state_dict``."""

    config: ModelConfig
    """The model that they are of."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None if there is no such weight."""

    def read(self, name: str, begin: Sequence[int], size: Sequence[int]) -> Tensor:
        """The part of a weight that begins at the index ``begin``, in the dtype in which it is stored."""


class StoredWeights(WeightReader, Protocol):
    """Weights in a directory: ``HFWeights`` or ``CheckpointWeights``."""

    path: Path
    dtype: str
    """The dtype, such as ``bfloat16``; several are separated by commas."""

    def checksums(self, rank: int, world_size: int) -> dict[str, str]:
        """SHA-256 of every ``world_size``-th file, from ``rank`` on. Raises if one differs from the recorded checksum.

        All ranks together read each file once.
        """


class ModelWeights:
    """The weights of a model in memory."""

    def __init__(self, model: Z2all) -> None:
        self.config, self._weights = model.config, model.state_dict()

    def shape(self, name: str) -> tuple[int, ...] | None:
        weight = self._weights.get(name)
        return None if weight is None else tuple(weight.shape)

    def read(self, name: str, begin: Sequence[int], size: Sequence[int]) -> Tensor:
        weight: Tensor = self._weights[name]
        return weight[part_slices(begin, size)]


class MergedAdapters:
    """The same weights with the adapters (``model.lora``) added to their matrices, in fp32."""

    def __init__(self, stored: WeightReader) -> None:
        self._stored, self._lora = stored, stored.config.lora
        self.config = stored.config.model_copy(update={"lora": None})

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._stored.shape(name)

    def read(self, name: str, begin: Sequence[int], size: Sequence[int]) -> Tensor:
        part = self._stored.read(name, begin, size)
        prefix = name.removesuffix(".weight")
        names = [f"{prefix}{ADAPTER_MARK}{matrix}" for matrix in "AB"]
        shapes = [self._stored.shape(adapter) for adapter in names]
        if self._lora is None or shapes[0] is None or shapes[1] is None:
            return part
        rank = self._lora.rank
        a = self._stored.read(names[0], (0, begin[1]), (rank, size[1]))
        b = self._stored.read(names[1], (begin[0], 0), (size[0], rank))
        return part.float() + self._lora.alpha / rank * b.float() @ a.float()


class GrownVocabulary:
    """The same weights for another vocabulary size.

    ``new_tokens`` has the old tokens that each new one is made of: its rows in embedding and head begin as the mean of
    theirs, so it starts as what the model knows of its parts. One without them, such as a reserved name, begins as the
    mean of all old rows, which favours no token. Rows that only pad a matrix are zero where none are stored.
    """

    def __init__(self, stored: WeightReader, config: ModelConfig, new_tokens: Mapping[int, Sequence[int]]) -> None:
        self._stored, self.config, self._new_tokens = stored, config, new_tokens
        for name in VOCABULARY_WEIGHTS:
            shape = stored.shape(name)
            if shape is not None and shape[0] < (stored.config.vocab_size or 0):
                raise Z2aError(f"{name} has {shape[0]} rows for {stored.config.vocab_size} tokens")

    def shape(self, name: str) -> tuple[int, ...] | None:
        shape = self._stored.shape(name)
        if shape is None or name not in VOCABULARY_WEIGHTS:
            return shape
        return (self.config.padded_vocab_size, *shape[1:])

    def read(self, name: str, begin: Sequence[int], size: Sequence[int]) -> Tensor:
        shape = self._stored.shape(name)
        if shape is None or name not in VOCABULARY_WEIGHTS:
            return self._stored.read(name, begin, size)
        first, end = begin[0], begin[0] + size[0]
        new = [token for token in self._new_tokens if first <= token < end]
        if not new and end <= shape[0]:
            return self._stored.read(name, begin, size)
        rows = torch.zeros(*size)
        if (count := min(end, shape[0]) - first) > 0:
            rows[:count] = self._stored.read(name, begin, (count, *size[1:]))
        if new:
            old = self._stored.read(name, (0, *begin[1:]), (min(self._new_tokens), *size[1:]))
            # In chunks: a conversion of the full matrix to fp32 would take more memory than the matrix.
            sums = [chunk.sum(0, dtype=torch.float32) for chunk in torch.split(old, CHUNK_ROWS)]
            mean = torch.stack(sums).sum(0) / len(old)
            for token in new:
                parts = self._new_tokens[token]
                rows[token - first] = old[list(parts)].float().mean(0) if parts else mean
        return rows


def part_slices(begin: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + count) for first, count in zip(begin, size, strict=True))


def unstored_weights(reader: WeightReader) -> list[str]:
    """The weights of the model that are not stored. They are parts that only training uses; others are an error."""
    with torch.device("meta"):
        needed = Z2all(reader.config).state_dict()
    if reader.config.tie_word_embeddings:
        del needed["lm_head.weight"]
    missing = [name for name in needed if reader.shape(name) is None]
    # Multi-token prediction is not exported; the bias of experts starts at zero, an adapter as none.
    optional = [
        name for name in missing if name.startswith("mtp.") or name.endswith(".mlp.bias") or ADAPTER_MARK in name
    ]
    if required := [name for name in missing if name not in optional]:
        raise Z2aError(f"{len(required)} weights are missing, such as {required[0]}")
    for name, weight in needed.items():
        if (shape := reader.shape(name)) not in (None, tuple(weight.shape)):
            raise Z2aError(f"{name} has shape {shape}; the model needs {tuple(weight.shape)}")
    return missing


def complete_weights(reader: WeightReader) -> GrownVocabulary:
    """The same weights with a padded vocabulary; an error if the model needs others, if only to train."""
    padded = GrownVocabulary(reader, reader.config, {})
    if missing := unstored_weights(padded):
        raise Z2aError(f"{len(missing)} weights are missing, such as {missing[0]}")
    return padded


def whole_tensor(tensor: Tensor) -> tuple[Sequence[int], Tensor]:
    return (0,) * tensor.ndim, tensor


@torch.no_grad()
def load_weights(
    weights: Mapping[str, Tensor],
    reader: WeightReader,
    local_part: Callable[[Tensor], tuple[Sequence[int], Tensor]] = whole_tensor,
) -> None:
    """Fill the weights of a model in place; those that are not stored stay as they are.

    ``local_part`` is where the part of a tensor that this rank holds begins, and the part. Beside the model, one part
    of one weight is in memory.
    """
    for name, weight in weights.items():
        if reader.shape(name) is None or (name == "lm_head.weight" and reader.config.tie_word_embeddings):
            continue
        begin, part = local_part(weight)
        if not part.numel():
            continue
        values = reader.read(name, begin, tuple(part.shape))
        if not torch.stack(values.aminmax()).isfinite().all():  # without a copy of the values
            raise Z2aError(f"{name} has values that are not finite")
        part.copy_(values)
        del values  # before the next one is read


def set_weight_dtype(model: Z2all, dtype: torch.dtype) -> None:
    """Store the weights in another dtype. Routers stay in fp32: see ``Router``."""
    for name, parameter in model.named_parameters():
        if ROUTER not in name:
            parameter.data = parameter.data.to(dtype)  # in place, so that a tied weight stays one


def load_model(reader: WeightReader, device: str | torch.device = "cpu") -> Z2all:
    """A model in fp32 on one device.

    >>> model = load_model(HFWeights(Path("Qwen3-0.6B")))
    """
    padded = complete_weights(reader)
    with torch.device("meta"):
        model = Z2all(reader.config)
    model = model.to_empty(device=device).init_buffers()
    load_weights(model.state_dict(), padded)
    return model.eval()


def grow_embeddings(model: Z2all, subtoken_ids: Sequence[Sequence[int]]) -> Z2all:
    """A copy of ``model`` with one new row per entry of ``subtoken_ids``: the mean of the rows of these old tokens.

    So a new token starts as what the model knows of its parts. Without subtokens (a reserved name) it starts as the
    mean of all rows, which no text has and which favours nothing.

    >>> grown = grow_embeddings(model, decompose_new_tokens(Tokenizer("old"), Tokenizer("new")))
    """
    before = model.config.vocab_size or 0
    config = model.config.model_copy(update={"vocab_size": before + len(subtoken_ids)})
    grown = Z2all(config).to(model.embed_tokens.weight.device, model.embed_tokens.weight.dtype)
    new_tokens = dict(enumerate(subtoken_ids, before))
    load_weights(grown.state_dict(), GrownVocabulary(ModelWeights(model), config, new_tokens))
    return grown
