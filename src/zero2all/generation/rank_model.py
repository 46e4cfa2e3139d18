"""The model as generation sees it: on one device, or over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.model import KVCache, ModelInputs, Z2all
from zero2all.model.blocks import ScoredTargets
from zero2all.model.decode_step import DecodeStep
from zero2all.model.kv_cache import Branches
from zero2all.model.rope_table import depends_on_length
from zero2all.parallel import ParallelModel
from zero2all.parallel.pipeline_parallel import broadcast_from_head

SYNC_PASSES = 4  # forward passes between two questions whether a rank still generates


class Chosen(NamedTuple):
    """The next token of each row, and its log-probability."""

    tokens_B: Tensor
    logprobs_B: Tensor


class LocalModel:
    """A model on one device."""

    sequence_multiple = 1

    def __init__(self, model: Z2all) -> None:
        self._model, self.config, self.device = model, model.config, model.rotary_2SE.device
        self._supported = DecodeStep.supports(model)
        self._decode_step: DecodeStep | None = None

    def eval_mode(self) -> AbstractContextManager[None]:
        return nullcontext()

    def generate_logits(self, tokens_BS: Tensor, cache: KVCache, counts_B: Tensor | None) -> Tensor | None:
        if tokens_BS.shape[1] == 1 and counts_B is None and cache.longest and self._supports_decode_step():
            self._decode_step = self._decode_step or DecodeStep(self._model)
            return self._decode_step(tokens_BS[:, 0], cache)[:, None]
        logits: Tensor = self._model(ModelInputs(tokens_BS, cache=cache, counts_B=counts_B))
        return logits

    def _supports_decode_step(self) -> bool:
        return self._supported and not self._model.training and not torch.is_autocast_enabled(self.device.type)

    def wait_for_others(self, on_pass: Callable[[], None]) -> None:
        """There are none."""

    def broadcast(self, chosen: Chosen | None, rows: int) -> Chosen:
        assert chosen is not None
        return chosen

    def score(
        self, tokens_BS: Tensor, counts_B: Tensor, scored: ScoredTargets, branches: Branches | None = None
    ) -> Tensor:
        """The losses of targets, and 1 where a target is the likeliest token: [2, N]. Rows are padded on the right."""
        cache: KVCache | Branches | None = branches
        if depends_on_length(self.config):  # else padding never changes what stands before it
            cache = KVCache(tokens_BS.shape[0], tokens_BS.shape[1], self.device)
        scores: Tensor = self._model(ModelInputs(tokens_BS, cache=cache, counts_B=counts_B, scored=scored))
        return scores


class RankModel:
    """A model of the trainer, over ranks or on one device, in the precision that it is trained in.

    Ranks that read the same samples generate the same: one has the logits and chooses, so that none can differ. Those
    that read others may have prompts of their own.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._model, self.config, self.device = model, model.config, model.mesh.device
        self.sequence_multiple = model.sequence_multiple
        sharded = model.mesh.dims.dp_shard > 1
        self._shards = model.mesh.get_mesh("dp_shard").get_group() if sharded else None
        self._passes = 0

    def eval_mode(self) -> AbstractContextManager[None]:
        return self._model.eval_mode()

    def generate_logits(self, tokens_BS: Tensor, cache: KVCache, counts_B: Tensor | None) -> Tensor | None:
        if self._passes % SYNC_PASSES == 0:
            self._any_working(working=True)
        self._passes += 1
        return self._model.generate_logits(tokens_BS, cache, counts_B)

    def wait_for_others(self, on_pass: Callable[[], None]) -> None:
        """Run the forward passes that ranks with more to generate run: their weights are sharded over this one too."""
        tokens_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        while self._shards is not None:
            if self._passes % SYNC_PASSES == 0 and not self._any_working(working=False):
                return
            self._passes += 1
            self._model.generate_logits(tokens_11, KVCache(1, self.sequence_multiple, self.device))
            on_pass()

    def _any_working(self, *, working: bool) -> bool:
        if self._shards is None:
            return working
        flag = torch.tensor(int(working), device=self.device)
        dist.all_reduce(flag, group=self._shards)
        return bool(flag)

    def broadcast(self, chosen: Chosen | None, rows: int) -> Chosen:
        """What the rank with the head has chosen. Both in one message: fp64 holds ids and log-probabilities exactly."""
        message = torch.empty(2, rows, dtype=torch.float64, device=self.device)
        if chosen is not None:
            message = torch.stack([chosen.tokens_B.double(), chosen.logprobs_B.double()])
        broadcast_from_head(message, self._model.recipe, self._model.mesh)
        return Chosen(message[0].long(), message[1].float())

    def score(
        self, tokens_BS: Tensor, counts_B: Tensor, scored: ScoredTargets, branches: Branches | None = None
    ) -> Tensor:
        """Score as on one device. With a KV cache, since every rank then has all positions, whatever the layout."""
        rows, length = tokens_BS.shape
        cache = branches or KVCache(rows, length + self.sequence_multiple - 1, self.device)
        scores = self._model.generate_logits(tokens_BS, cache, counts_B, scored)
        if scores is None:
            scores = torch.empty(2, len(scored.targets_N), device=self.device)
        broadcast_from_head(scores, self._model.recipe, self._model.mesh)
        return scores


def as_rank_model(model: Z2all | ParallelModel) -> LocalModel | RankModel:
    return LocalModel(model) if isinstance(model, Z2all) else RankModel(model)
