"""What a rank keeps of its tokens until the backward pass: activations of the blocks, and the loss.

Estimates for eager kernels as on CPU; torch.compile and some GPU kernels keep less.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero2all.model.cost.flops import Recompute
from zero2all.model.ops.chunked_loss import chunk_rows, subchunk_rows
from zero2all.recipe import ModelConfig


@dataclass(frozen=True)
class ActivationShards:
    """How the activations of a block are divided over ranks."""

    tp: int = 1
    sp: bool = True
    """With tp, norms and residual stream are sharded too."""
    gathered_keys: int = 1
    """Keys and values that attention keeps, as a multiple of the rank's own: cp may gather all."""

    @property
    def stream(self) -> int:
        """Ranks over which the residual stream is divided."""
        return self.tp if self.sp else 1


@dataclass(frozen=True)
class ActivationPolicy:
    """Which activations of a block stay until its backward pass."""

    recompute: Recompute = "none"
    every: int = 1
    """With ``full``, the number of blocks that are recomputed together."""
    offload: bool = False
    """One offloaded block is computed while another is copied."""
    score_bytes: int = 0
    """Bytes that attention keeps for each token and head (``dropout_score_bytes``)."""


ONE_RANK = ActivationShards()
KEEP_ALL = ActivationPolicy()


def activation_bytes(
    config: ModelConfig,
    tokens: int,
    *,
    half: bool,
    policy: ActivationPolicy = KEEP_ALL,
    layers: Sequence[int] | None = None,
    micro_batches: float = 1.0,
    shards: ActivationShards = ONE_RANK,
) -> int:
    """What the blocks ``layers`` (default: all) keep of micro-batches of ``tokens`` tokens until the backward pass.

    ``micro_batches`` are those that a pipeline rank has run forward and not backward; only one is recomputed at a time.
    """
    element = 2 if half else 4
    layers = list(range(config.num_hidden_layers) if layers is None else layers)
    end = _norm_bytes(config, element, shards) if config.num_hidden_layers - 1 in layers else 0
    stream = _stream_bytes(config, element) // shards.stream
    scores = policy.score_bytes * config.num_attention_heads // shards.tp
    blocks = []
    for layer in layers:
        saved, recomputed = _block_bytes(config, layer, element, shards) + scores, 0
        if policy.recompute != "none":
            products = _product_bytes(config, layer, element, shards) if policy.recompute == "selective" else 0
            kept = stream + products
            saved, recomputed = kept, max(0, saved - kept)  # what is kept is not computed again
        blocks.append(BlockActivations(saved, recomputed, policy.offload and is_offloaded(layer, config)))
    if policy.recompute == "full":
        runs = consecutive_runs(layers)
        starts = itertools.accumulate(map(len, runs), initial=0)
        blocks = [
            group
            for start, run in zip(starts, runs, strict=False)
            for group in recomputed_groups(blocks[start : start + len(run)], policy.every)
        ]
    if config.mtp_weight:  # its block, made like the last one, is not checkpointed
        blocks.append(BlockActivations(_block_bytes(config, config.num_hidden_layers - 1, element, shards) + scores))
    return round(tokens * (held_bytes(blocks, micro_batches) + end))


def dropout_score_bytes(config: ModelConfig, seq_len: int, device: torch.device) -> int:
    """What attention with dropout keeps of a token and head: a CPU has no fused kernel for it, so its weights, their
    mask and their product stay for the whole sequence, in fp32. GPU kernels draw the mask again instead."""
    return 3 * 4 * seq_len if config.attention_dropout and device.type == "cpu" else 0


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of one block."""

    saved: int
    """From its forward to its backward pass."""
    recomputed: int = 0
    """Only during its backward pass."""
    offloaded: bool = False


def consecutive_runs(layers: Sequence[int]) -> list[list[int]]:
    """The layers of each pipeline stage of a rank.

    >>> consecutive_runs([0, 1, 4, 5])
    [[0, 1], [4, 5]]
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] + 1 == layer:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def recomputed_groups(blocks: Sequence[BlockActivations], size: int) -> list[BlockActivations]:
    """Blocks that are recomputed together: only the input of the first one is kept, and then all of them are there."""
    groups = [blocks[start : start + size] for start in range(0, len(blocks), size)]
    return [
        BlockActivations(
            first.saved, first.recomputed + sum(block.saved + block.recomputed for block in rest), first.offloaded
        )
        for first, *rest in groups
    ]


def held_bytes(blocks: Sequence[BlockActivations], micro_batches: float) -> float:
    """What blocks, in the order of forward, hold at the worst moment."""
    kept, again, moved = 0, 0, 0
    for block in blocks:
        if block.offloaded:
            moved = max(moved, block.saved)
        saved = 0 if block.offloaded else block.saved
        kept += saved
        again = max(block.recomputed, again - saved)  # backward has freed the layers after
    return micro_batches * kept + 2 * moved + again


def is_offloaded(layer: int, config: ModelConfig) -> bool:
    """All layers but the last, which the backward pass needs at once."""
    return layer < config.num_hidden_layers - 1


def loss_bytes(config: ModelConfig, tokens: int, *, half: bool, device: torch.device, tp: int = 1) -> int:
    """Logits that the loss has at one time: all of them in its reference and over tp ranks, else of a chunk, with
    the gradients of the head (in fp32) and of its input, which such a loss computes along with itself."""
    rows = config.padded_vocab_size
    if tp > 1:
        return all_logits_bytes(config, tokens) // tp
    if config.ops.cross_entropy == "reference":
        return all_logits_bytes(config, tokens)
    element, hidden = 2 if half else 4, config.hidden_size
    chunk, in_fp32 = (min(tokens, count(rows, device)) for count in (chunk_rows, subchunk_rows))
    product = 2 * hidden if half and device.type == "cpu" else 0  # a GPU adds it to the gradient as it computes it
    return rows * (element * chunk + 4 * in_fp32 + 4 * hidden + product) + element * tokens * hidden


def all_logits_bytes(config: ModelConfig, tokens: int) -> int:
    """In fp32: themselves, their log-softmax, their gradient."""
    return 3 * 4 * tokens * config.padded_vocab_size


def _norm_bytes(config: ModelConfig, element: int, shards: ActivationShards) -> int:
    """The residual before the norm, and the copy of its output that the matrices read, which tp gathers."""
    return _stream_bytes(config, element) // shards.stream + element * config.hidden_size


def _stream_bytes(config: ModelConfig, element: int) -> int:
    return (4 if config.residual_fp32 else element) * config.hidden_size


def _block_bytes(config: ModelConfig, layer: int, element: int, shards: ActivationShards) -> int:
    hidden, moe = config.hidden_size, config.moe
    queries, keys = config.num_attention_heads * config.head_size, config.num_key_value_heads * config.head_size
    # q, k, v, and what comes out, by heads and by tokens
    sharded = element * (3 * queries + 2 * keys * shards.gathered_keys)
    if config.qk_norm:
        sharded += element * (queries + keys)
    wide, routed = config.intermediate_size, 0
    if moe is not None and config.is_moe_layer(layer):
        wide = (moe.num_experts_per_tok + moe.n_shared_experts) * moe.moe_intermediate_size
        # The router reads fp32, and only shared experts the norm's output as it is.
        routed = 4 * hidden - (0 if element == 2 and moe.n_shared_experts else element * hidden)
        routed += 2 * element * moe.num_experts_per_tok * hidden  # tokens brought to their experts, and back
    sharded += 4 * element * wide  # gate, up, silu(gate) and their product
    dropped = 2 * hidden // shards.stream if config.residual_dropout else 0  # masks of a byte
    return 2 * _norm_bytes(config, element, shards) + sharded // shards.tp + routed + dropped


def _product_bytes(config: ModelConfig, layer: int, element: int, shards: ActivationShards) -> int:
    """Outputs of matrix products and attention, which selective checkpointing keeps."""
    hidden, moe = config.hidden_size, config.moe
    queries, keys = config.num_attention_heads * config.head_size, config.num_key_value_heads * config.head_size
    sharded = 2 * queries + 2 * keys  # q, k, v and attention
    whole = 2 * hidden  # out of attention and feed-forward layer
    if shards.tp > 1:  # partial sums: kept before and after their reduce-scatter, not if they are all-reduced in place
        whole = whole + whole // shards.tp if shards.sp else 0
    if moe is not None and config.is_moe_layer(layer):
        sharded += 2 * (moe.num_experts_per_tok + moe.n_shared_experts) * moe.moe_intermediate_size
        whole = hidden * (1 + moe.num_experts_per_tok + min(1, moe.n_shared_experts)) + moe.num_experts
    else:
        sharded += 2 * config.intermediate_size
    return element * (sharded // shards.tp + whole)
