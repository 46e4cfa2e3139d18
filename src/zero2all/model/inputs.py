"""What a forward pass computes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from zero2all.model.blocks import ScoredTargets
from zero2all.model.kv_cache import Branches, KVCache
from zero2all.model.ops.cross_entropy import SoftTargets


@dataclass(frozen=True)
class ModelInputs:
    """Tokens, and what is wanted of them. ``model(tokens)`` is short for ``model(ModelInputs(tokens))``.

    A batch has M micro-batches; one forward pass has one.

    >>> losses = model(ModelInputs(tokens, targets, doc_starts_BS=document_starts(is_first)))
    """

    tokens_BS: Tensor
    targets_BS: Tensor | None = None
    """Then the model returns the loss of each token instead of logits."""
    doc_starts_BS: Tensor | None = None
    """``document_starts``: positions see only their own document."""
    cu_seqlens_MN: Tensor | None = None
    """``document_cu_seqlens`` of each micro-batch: kernels for GPUs then need no host sync for documents."""
    soft: SoftTargets | None = None
    """The gradient also includes the distance to a teacher."""
    dropout_seeds_M: Tensor | None = None
    """In main memory. Dropout masks are a function of the seed of a micro-batch and the layer, so there is no state of
    a random number generator to save."""
    cache: KVCache | Branches | None = None
    """The tokens follow those in it; the caller calls ``cache.advance`` afterwards."""
    counts_B: Tensor | None = None
    """Rows of different lengths are padded on the right: row b has ``counts_B[b]`` tokens, and only the logits of its
    last one are returned, [B, 1, V]."""
    scored: ScoredTargets | None = None
    """Only these targets are scored: the losses, and 1 where a target is the likeliest token, [2, N]."""
    likeliest: int = 0
    """The ids and log-probabilities of that many tokens are returned, [2, B, S, K]."""

    def map(self, change: Callable[[Tensor], Tensor]) -> ModelInputs:
        """With every tensor of the batch changed; decoding state and seeds stay."""

        def changed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        soft = self.soft
        if soft is not None:
            soft = soft._replace(ids_BSK=change(soft.ids_BSK), logps_BSK=change(soft.logps_BSK))
        return replace(
            self,
            tokens_BS=change(self.tokens_BS),
            targets_BS=changed(self.targets_BS),
            doc_starts_BS=changed(self.doc_starts_BS),
            cu_seqlens_MN=changed(self.cu_seqlens_MN),
            soft=soft,
        )

    def batch_tensors(self) -> dict[str, Tensor]:
        """The tensors whose rows are divided over micro-batches, without the teacher's and the seeds."""
        names = ("tokens_BS", "targets_BS", "doc_starts_BS", "cu_seqlens_MN")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def micro_batch(self, first: int, size: int) -> ModelInputs:
        """The rows [first, first + size): one micro-batch of ``size``."""
        rows, number = slice(first, first + size), first // size
        one = self.map(lambda tensor: tensor[rows])
        return replace(
            one,
            cu_seqlens_MN=None if self.cu_seqlens_MN is None else self.cu_seqlens_MN[number, None],
            dropout_seeds_M=None if self.dropout_seeds_M is None else self.dropout_seeds_M[number, None],
        )
