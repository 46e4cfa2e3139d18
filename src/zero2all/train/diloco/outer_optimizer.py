"""The outer optimizer of DiLoCo (https://arxiv.org/abs/2311.08105, streaming: https://arxiv.org/abs/2501.18512).

An island trains its weights w with its own, inner optimizer. The outer weights W are the same on all islands. A
fragment is exchanged like this::

    d  = W - w + residual               the pseudo-gradient, sent as q = round(d); residual = d - q
    g  = mean of q over the islands present
    m  = momentum * m + g               Nesterov
    W' = W - lr * (g + momentum * m)    the outer step

Then w = W'; or, with inner steps during the exchange, w = w + (W' - w at its start), which keeps their progress.
Products and sums are separate operations in a fixed order: a fused one rounds differently, and machines that differ
must still compute the same W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from zero2all.base.errors import Z2aError
from zero2all.checkpoint.state_dict import local_shard, wrap_local_like
from zero2all.parallel.mesh import shard_range
from zero2all.recipe.sync import SyncRecipe

ExchangeDtype = Literal["fp32", "bf16", "int8"]
BLOCK = 256  # values that share a scale: 1.6% more bytes
MAX_CODE = 127
MIN_CODE = -128  # which no island of ours sends


def encoded_bytes(count: int, dtype: ExchangeDtype) -> int:
    """The encoded size of ``count`` values."""
    return {"fp32": 4 * count, "bf16": 2 * count, "int8": count + 4 * _blocks(count)}[dtype]


def encode(values: Tensor, dtype: ExchangeDtype) -> Tensor:
    """A flat fp32 tensor as bytes; an error if a value is not finite: nobody should average with it."""
    blocks = _in_blocks(values)
    low, high = torch.aminmax(blocks, dim=1)
    largest = torch.maximum(high.abs_(), low.abs_())  # not finite if a value of the block is not
    if not bool(torch.isfinite(largest).all()):
        raise Z2aError("the weights of this island have become infinite or not a number: they are not sent to others")
    if dtype == "fp32":
        return values.clone().view(torch.uint8)
    if dtype == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    scales = largest / MAX_CODE
    # Blocks of zeros have no scale. Division, not a product with the inverse: the largest value must not exceed 127.
    codes = (blocks / torch.where(scales > 0, scales, 1.0)[:, None]).round_().clamp_(-MAX_CODE, MAX_CODE)
    payload = codes.to(torch.int8).flatten()[: len(values)]
    return torch.cat([scales.view(torch.uint8), payload.view(torch.uint8)])


def decode(encoded: Tensor, count: int, dtype: ExchangeDtype) -> Tensor:
    """The same on every machine, bit by bit; an error if it is not what ``encode`` makes."""
    if len(encoded) != encoded_bytes(count, dtype):
        raise Z2aError(f"an island has sent {len(encoded)} bytes, which are not {count} values in {dtype}")
    if dtype == "int8":
        head = 4 * _blocks(count)
        scales, codes = encoded[:head].clone().view(torch.float32), encoded[head:].view(torch.int8)
        blocks = torch.zeros(_blocks(count) * BLOCK)
        blocks[:count] = codes
        blocks.view(-1, BLOCK).mul_(scales[:, None])
        values, checked = blocks[:count], scales * -MIN_CODE
    else:
        values = encoded.clone().view(torch.float32 if dtype == "fp32" else torch.bfloat16).to(torch.float32)
        checked = values
    if not bool(torch.isfinite(checked).all()):
        raise Z2aError("an island has sent values that are not finite")
    return values


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _in_blocks(values: Tensor) -> Tensor:
    missing = _blocks(len(values)) * BLOCK - len(values)
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


@dataclass(frozen=True)
class ReplicaShare:
    """Replicas of an island (``dp_replicate``) hold the same weights: each exchanges a part of them with the other
    islands, over the slow network, and they tell each other the result."""

    replica: int = 0
    replicas: int = 1
    add_up: Callable[[Tensor], Tensor] = lambda own: own
    """The sum over the replicas."""

    def part(self, size: int) -> slice:
        """This replica's part of a fragment: whole blocks, so that all replicas round as if they sent everything."""
        first, last = shard_range(-(-size // BLOCK), self.replica, self.replicas)
        return slice(first * BLOCK, min(last * BLOCK, size))

    def whole(self, own: Tensor, size: int) -> Tensor:
        """The parts of all replicas, of this one's. Exactly: to each value the others add zeros."""
        if self.replicas == 1:
            return own
        found = torch.zeros(size)
        found[self.part(size)] = own
        return self.add_up(found)


class OuterOptimizer:
    """Outer weights and momentum of what this rank holds, in main memory; one flat tensor for each fragment.

    >>> outer = OuterOptimizer(model, 12, recipe.parallel.sync)
    >>> own = outer.encode(0, outer.start_exchange(0))
    >>> norm = outer.update(0, [own, *received])
    >>> outer.merge(0)
    """

    def __init__(self, model: nn.Module, layers: int, recipe: SyncRecipe, share: ReplicaShare | None = None) -> None:
        self.recipe, self.share = recipe, share or ReplicaShare()
        self.fragments = [
            Fragment(part, is_lossy=recipe.exchange_dtype != "fp32", has_overlap=recipe.overlap > 0)
            for part in split_fragments(exchanged_tensors(model), layers, recipe.fragments)
        ]
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Begin with the weights as they are."""
        for fragment in self.fragments:
            fragment.outer.copy_(fragment.read_weights())
            fragment.momentum.zero_()
            fragment.reset_local_state()

    @torch.no_grad()
    def start_exchange(self, number: int) -> Tensor:
        """The pseudo-gradient of this island since the last exchange."""
        fragment = self.fragments[number]
        weights = fragment.read_weights()
        pseudo_gradient = fragment.rounded_outer().sub_(weights)
        if fragment.pending is not None:
            fragment.pending.copy_(weights)
        return pseudo_gradient

    @torch.no_grad()
    def encode(self, number: int, pseudo_gradient: Tensor) -> Tensor:
        """What this rank sends of the pseudo-gradient, in bytes. May run in a thread, next to inner steps."""
        fragment, dtype = self.fragments[number], self.recipe.exchange_dtype
        if fragment.residual is None:
            return encode(pseudo_gradient[self.share.part(fragment.size)], dtype)
        pseudo_gradient += fragment.residual
        everything = encode(pseudo_gradient, dtype)
        fragment.next_residual = pseudo_gradient - decode(everything, fragment.size, dtype)
        return (
            everything if self.share.replicas == 1 else encode(pseudo_gradient[self.share.part(fragment.size)], dtype)
        )

    @torch.no_grad()
    def update(self, number: int, parts: Sequence[Tensor]) -> list[float]:
        """The outer step with what every island present has sent, in the order of islands, this one included; the
        squared norm of the average, for each tensor of the fragment."""
        fragment, recipe = self.fragments[number], self.recipe
        own = range(fragment.size)[self.share.part(fragment.size)]
        mean = decode(parts[0], len(own), recipe.exchange_dtype)
        for part in parts[1:]:
            mean += decode(part, len(own), recipe.exchange_dtype)
        mean = self.share.whole(mean.div_(len(parts)), fragment.size)
        fragment.momentum.mul_(recipe.outer_momentum).add_(mean)
        fragment.outer.sub_((fragment.momentum * recipe.outer_momentum).add_(mean).mul_(recipe.outer_lr))
        if fragment.pending is not None:
            torch.sub(fragment.outer, fragment.pending, out=fragment.pending)
        if fragment.residual is not None and fragment.next_residual is not None:
            fragment.residual.copy_(fragment.next_residual)
        fragment.next_residual = None
        views = fragment.views(mean).values()
        return [float(torch.linalg.vector_norm(view, dtype=torch.float64)) ** 2 for view in views]

    @torch.no_grad()
    def discard(self, number: int) -> None:
        """An exchange that started has no result: as if it had not started."""
        fragment = self.fragments[number]
        fragment.next_residual = None
        if fragment.pending is not None:
            fragment.pending.zero_()

    @torch.no_grad()
    def merge(self, number: int, *, exactly: bool = False) -> None:
        """Into the weights that are trained; ``exactly``: they become the outer weights."""
        fragment = self.fragments[number]
        if fragment.pending is None or exactly:
            fragment.write_weights(fragment.outer)
        else:
            fragment.write_weights(fragment.read_weights() + fragment.pending)
        if fragment.pending is not None:
            fragment.pending.zero_()

    @property
    def shared_tensors(self) -> list[Tensor]:
        """What is the same on all islands: an island that was away takes them over."""
        return [tensor for fragment in self.fragments for tensor in (fragment.outer, fragment.momentum)]

    def adopt_shared(self) -> None:
        """After ``shared_tensors`` were filled: continue from them."""
        for number, fragment in enumerate(self.fragments):
            self.merge(number, exactly=True)
            fragment.reset_local_state()

    def state_tensors(self) -> dict[str, Tensor]:
        """The live tensors, under names and with shards that do not depend on the parallel layout."""
        found = {}
        for fragment in self.fragments:
            for name, flat in fragment.state().items():
                for key, view in fragment.views(flat).items():
                    found[f"{name}.{key}"] = wrap_local_like(fragment.weights[key], view)
        return found


class Fragment:
    """Some of the weights, exchanged together."""

    def __init__(self, weights: dict[str, Tensor], *, is_lossy: bool, has_overlap: bool) -> None:
        self.weights = weights
        self._shapes = {name: local_shard(tensor).shape for name, tensor in weights.items()}
        self.size = sum(shape.numel() for shape in self._shapes.values())
        self.outer, self.momentum = torch.zeros(self.size), torch.zeros(self.size)
        self.residual = torch.zeros(self.size) if is_lossy else None
        self.pending = torch.zeros(self.size) if has_overlap else None
        """The weights at the beginning of an exchange; after it, what is added to them when it is merged; else 0."""
        self.next_residual: Tensor | None = None
        """Until the outstanding exchange completes."""

    def reset_local_state(self) -> None:
        """Clear what only this island has."""
        self.next_residual = None
        for own in (self.residual, self.pending):
            if own is not None:
                own.zero_()

    def state(self) -> dict[str, Tensor]:
        found = {"outer": self.outer, "momentum": self.momentum, "residual": self.residual, "pending": self.pending}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        found, at = {}, 0
        for name, shape in self._shapes.items():
            found[name] = flat[at : at + shape.numel()].view(shape)
            at += shape.numel()
        return found

    def read_weights(self) -> Tensor:
        flat = torch.empty(self.size)
        for name, view in self.views(flat).items():
            view.copy_(local_shard(self.weights[name]))
        return flat

    def write_weights(self, flat: Tensor) -> None:
        for name, view in self.views(flat).items():
            local_shard(self.weights[name]).copy_(view)

    def rounded_outer(self) -> Tensor:
        """The outer weights as the model stores them: what bf16 weights cannot hold is no progress of the island."""
        flat = self.outer.clone()
        for name, view in self.views(flat).items():
            view.copy_(view.to(self.weights[name].dtype))
        return flat


def exchanged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What training changes: trained weights, and buffers of a checkpoint, such as the biases of experts."""
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    stored = model.state_dict().keys()
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in stored and tensor.is_floating_point()}
    return trained | buffers


def split_fragments(tensors: Mapping[str, Tensor], layers: int, count: int) -> list[dict[str, Tensor]]:
    """Neighbouring blocks together; the embedding with the first, norm and head with the last."""
    found: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, tensor in tensors.items():
        place = 0 if "embed_tokens" in name else count - 1
        if name.startswith("layers."):
            place = int(name.split(".")[1]) * count // layers
        found[place][name] = tensor
    return found


def exchange_offset(fragment: int, recipe: SyncRecipe) -> int:
    """Fragments take turns, spread evenly over ``every`` steps."""
    return fragment * recipe.every // recipe.fragments


def fragment_due(done: int, recipe: SyncRecipe) -> int | None:
    """The fragment whose exchange begins after ``done`` steps."""
    for fragment in range(recipe.fragments):
        if done > 0 and (done + exchange_offset(fragment, recipe)) % recipe.every == 0:
            return fragment
    return None
