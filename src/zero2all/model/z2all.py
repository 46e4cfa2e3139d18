"""The Z2all decoder: pre-norm RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts. One device.

It knows nothing of parallelism. Parameters have the names of Hugging Face Llama without the
leading ``model.``, so that export is a renaming. Shapes: B batch, S sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero2all.model.blocks import Attention, FeedForward, LMHead, OpsModule, RMSNorm
from zero2all.model.inputs import ModelInputs
from zero2all.model.kv_cache import Branches, KVCache
from zero2all.model.lora import ADAPTER_MARK, freeze_all_but_adapters, initial_adapter_std
from zero2all.model.moe import MoE, RoutingStats, balance_loss
from zero2all.model.ops import Ops, choose_kernels
from zero2all.model.ops.attention import MaskInputs, SdpaMask, with_dense_mask
from zero2all.model.ops.kernels import IGNORE_INDEX
from zero2all.model.rope_table import depends_on_length, rotary_table
from zero2all.recipe import ModelConfig, MoeConfig, OpsRecipe, RopeScaling

Masks = Mapping[int | None, Any]
"""Attention masks by window."""


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.window, self.dropout = config.layer_window(layer), config.residual_dropout
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module = (
            MoE(config.moe, config.hidden_size)
            if config.moe is not None and config.is_moe_layer(layer)
            else FeedForward(config.hidden_size, config.intermediate_size, config.lora)
        )

    def forward(
        self, x_BSD: Tensor, rotary: Tensor, mask: Any = None, cache: KVCache | Branches | None = None
    ) -> tuple[Tensor, RoutingStats | None]:
        """The residual stream, and with experts in training the routing statistics."""
        keep_attended = keep_added = None
        if self.dropout and self.training and cache is None:
            # Drawn before attention: selective checkpointing keeps its output, so that a recomputed forward draws no
            # numbers for attention dropout.
            keep_attended, keep_added = self._draw_keep(x_BSD), self._draw_keep(x_BSD)
        attended = self.self_attn(self.input_layernorm(x_BSD), rotary, mask, cache)
        x_BSD = x_BSD + self._drop(attended, keep_attended).to(x_BSD.dtype)
        normed, routed = self.post_attention_layernorm(x_BSD), None
        if isinstance(self.mlp, MoE):
            added, routed = self.mlp(normed)
        else:
            added = self.mlp(normed)
        return x_BSD + self._drop(added, keep_added).to(x_BSD.dtype), routed

    def _draw_keep(self, x_BSD: Tensor) -> Tensor:
        """Which elements of the residual stream's shape dropout keeps: one byte each until the backward pass."""
        return torch.empty_like(x_BSD, dtype=torch.bool).bernoulli_(1 - self.dropout)

    def _drop(self, x_BSD: Tensor, keep_BSD: Tensor | None) -> Tensor:
        return x_BSD if keep_BSD is None else torch.where(keep_BSD, x_BSD / (1 - self.dropout), 0.0)


class MTPModule(nn.Module):
    """Multi-token prediction: the token after the next, from a position's state and the next token
    (https://arxiv.org/abs/2412.19437).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.state_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.token_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = Block(config, config.num_hidden_layers - 1)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BSD: Tensor, next_BSD: Tensor, rotary: Tensor, mask: Any) -> tuple[Tensor, RoutingStats | None]:
        both = torch.cat([self.state_norm(x_BSD), self.token_norm(next_BSD)], dim=-1)
        out, routed = self.block(self.proj(both).to(x_BSD.dtype), rotary, mask)
        return self.norm(out), routed


class Z2all(OpsModule):
    """The decoder-only transformer, dense or with a mixture of experts.

    >>> model = Z2all(ModelConfig(preset="z2all-3m", vocab_size=4096)).init_weights(seed=0)
    >>> model(torch.zeros(1, 8, dtype=torch.int64)).shape  # logits
    torch.Size([1, 8, 4096])
    """

    rotary_2SE: Tensor
    has_auxiliary_losses = True
    """Whether training adds the gradients of balance loss, z-loss and multi-token prediction."""
    blocks_per_group = 1
    recompute_group: Callable[..., Any] | None = None
    """Runs a group of blocks so that backward recomputes it from its input (``parallel.activation_checkpoint``)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = LMHead(config)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.mtp = MTPModule(config) if config.mtp_weight else None
        if config.lora is not None:
            freeze_all_but_adapters(self)
        self.register_buffer("rotary_2SE", rotary_table(config, config.max_position_embeddings), persistent=False)
        device = self.embed_tokens.weight.device
        # Nothing is computed on the meta device, and a kernel for GPUs is valid there: see ``init_buffers``.
        named = config.model_copy(update={"ops": OpsRecipe()}) if device.type == "meta" else config
        self.set_ops(choose_kernels(named, device))

    def set_ops(self, ops: Ops) -> None:
        """Compute with these kernels from here on."""
        for module in self.modules():
            if isinstance(module, OpsModule):
                module.ops = ops

    def init_buffers(self, device: torch.device | None = None) -> Z2all:
        """Set what is not a weight, on the device that computes: by default where the weights are. For a model built on
        the meta device."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight  # to_empty() after a meta build makes two of it
        device = device or self.embed_tokens.weight.device
        self.set_ops(choose_kernels(self.config, device))
        self.rotary_2SE = rotary_table(self.config, self.config.max_position_embeddings, device)
        for layer in self._moe_layers():
            for buffer in layer.buffers(recurse=False):
                buffer.zero_()
        return self

    @torch.no_grad()
    def init_weights(self, seed: int, device: torch.device | None = None) -> Z2all:
        """Fill every parameter, each from (seed, its name), so that a part gets the weights of the full model.

        Works on a model that was built on the meta device too. ``device`` as in ``init_buffers``.
        """
        self.init_buffers(device)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            elif ADAPTER_MARK in name:
                _init_normal(parameter, initial_adapter_std(name, parameter), f"{seed}/{name}")
            else:
                std = self._initial_std(name)
                # Experts one by one: a device may hold only some of them.
                parts = (
                    {name: parameter} if parameter.dim() < 3 else {f"{name}.{n}": p for n, p in enumerate(parameter)}
                )
                for part, values in parts.items():
                    _init_normal(values, std, f"{seed}/{part}")
        return self

    def _initial_std(self, name: str) -> float:
        std = self.config.initializer_range
        if name.removesuffix(".weight").endswith(("o_proj", "down_proj")):
            # Each block adds twice to the residual stream; this keeps its variance from growing with depth.
            std /= math.sqrt(2 * self.config.num_hidden_layers)
        # Width transfer (https://arxiv.org/abs/2203.03466): hidden matrices by the root of the width, the head by it.
        if name.startswith("lm_head"):
            return std * self.config.mup_width_mult
        return std if name.startswith("embed_tokens") else std * math.sqrt(self.config.mup_width_mult)

    def forward(
        self, inputs: ModelInputs | Tensor, targets_BS: Tensor | None = None, cache: KVCache | Branches | None = None
    ) -> Tensor:
        """Logits [B, S, V], or with targets the loss of each token [B, S] in fp32, zero where it is IGNORE_INDEX.

        Losses stay apart so that the caller divides by the tokens of the global batch and can report by source. In
        training the gradient includes the auxiliary losses, for each token its share of them; the values are
        cross-entropy alone. ``ModelInputs`` says what else can be asked for.
        """
        if isinstance(inputs, Tensor):
            inputs = ModelInputs(inputs, targets_BS, cache=cache)
        rotary, masks = self._positions(inputs)
        x_BSD = self.residual(self.embed_tokens(inputs.tokens_BS))
        x_BSD, routings = self._run_layers(x_BSD, rotary, masks, inputs)
        if inputs.targets_BS is None:
            logits: Tensor = self.lm_head(
                self.norm(x_BSD), counts_B=inputs.counts_B, scored=inputs.scored, likeliest=inputs.likeliest
            )
            return logits
        with_auxiliary = self.training and self.has_auxiliary_losses
        losses: Tensor = self.lm_head(self.norm(x_BSD), inputs.targets_BS, with_z_loss=with_auxiliary, soft=inputs.soft)
        if not with_auxiliary or not (self.config.moe or self.mtp):
            return losses
        extra = torch.zeros(inputs.targets_BS.shape, device=x_BSD.device)
        if self.mtp is not None:
            _seed_dropout(inputs, self.config.num_hidden_layers)
            mtp_losses, routed = self._mtp_losses(self.mtp, x_BSD, inputs, rotary, masks)
            extra = extra + self.config.mtp_weight * mtp_losses
            routings += _record_expert_load(self.mtp.block, routed)
        if routings and self.config.moe is not None and self.config.moe.load_balancing == "aux":
            extra = extra + self._balance_losses(self.config.moe, routings, inputs.targets_BS)
        return losses + (extra - extra.detach())

    def _positions(self, inputs: ModelInputs) -> tuple[Tensor, Masks]:
        """Rotary table and attention masks: of a sequence from its start, or of what follows a KV cache."""
        length, cache = inputs.tokens_BS.shape[1], inputs.cache
        end = length if cache is None else cache.longest + length
        if end > self.config.max_position_embeddings:
            raise ValueError(
                f"{end} positions are more than the model's context of {self.config.max_position_embeddings}"
            )
        if cache is None:
            masks = self.attention_masks(length, inputs.doc_starts_BS, inputs.cu_seqlens_MN)
            return self.rotary(length, inputs.doc_starts_BS), masks
        counts = length if inputs.counts_B is None else inputs.counts_B
        rotary = self.cached_rotary(cache.next_positions(length), cache.lengths_B + counts)
        return rotary, {window: cache.mask(window) for window in self._windows()}

    def _balance_losses(self, moe: MoeConfig, routings: list[RoutingStats], targets_BS: Tensor) -> Tensor:
        """Each token's share of the load-balancing loss of all layers."""
        counts_LE = torch.stack([routed.counts_E for routed in routings])
        counts_LE, weights_BS = self.balance_inputs(counts_LE, targets_BS != IGNORE_INDEX)
        total = torch.zeros((), device=weights_BS.device)
        for counts_E, routed in zip(counts_LE, routings, strict=True):
            assert routed.mean_score_E is not None
            total = total + balance_loss(counts_E, routed.mean_score_E)
        return moe.router_aux_loss_coef * total * weights_BS

    def balance_inputs(self, counts_LE: Tensor, wanted_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of each layer's experts, and how often each position counts in the balance loss.

        Here as given. Context parallelism replaces it: the rows of a micro-batch are on several ranks.
        """
        return counts_LE, wanted_BS

    def _run_layers(
        self, x_BSD: Tensor, rotary: Tensor, masks: Masks, inputs: ModelInputs
    ) -> tuple[Tensor, list[RoutingStats]]:
        """The residual stream after all blocks, and the routing statistics of their experts."""
        routings: list[RoutingStats] = []
        blocks = [block for block in self.layers if isinstance(block, Block)]
        for first in range(0, len(blocks), self.blocks_per_group):
            group = blocks[first : first + self.blocks_per_group]
            run: Callable[..., Any] = _run_blocks
            if self.recompute_group is not None and torch.is_grad_enabled():
                run = functools.partial(self.recompute_group, _run_blocks)
            x_BSD, statistics = run(group, x_BSD, rotary, masks, inputs)
            for layer, routed in zip(group, statistics, strict=True):
                routings += _record_expert_load(layer, routed)
        return x_BSD, routings

    def attention_masks(
        self, length: int, doc_starts_BS: Tensor | None, cu_seqlens_MN: Tensor | None = None
    ) -> dict[int | None, Any]:
        """Attention masks by window: layers with the same window share one."""
        device = self.rotary_2SE.device
        rows = MaskInputs(doc_starts_BS, length, None, device, cu_seqlens_MN)
        masks = {window: self.ops.attention.mask_for(rows._replace(window=window)) for window in self._windows()}
        if self.training and self.config.attention_dropout:
            masks = {
                window: with_dense_mask(mask, length, device) if isinstance(mask, SdpaMask) else mask
                for window, mask in masks.items()
            }
        return masks

    def _windows(self) -> set[int | None]:
        return {self.config.layer_window(layer) for layer in range(self.config.num_hidden_layers)}

    def rotary(self, length: int, doc_starts_BS: Tensor | None) -> Tensor:
        """The table for positions [0, length), or [2, B, 1, S, E] with positions counted in documents."""
        table = self.rotary_2SE
        if depends_on_length(self.config):
            table = rotary_table(self.config, length, table.device)
        if doc_starts_BS is None:
            return table[:, :length]
        places = torch.arange(length, device=doc_starts_BS.device) - doc_starts_BS
        return table[:, places, None].transpose(2, 3)

    def cached_rotary(self, positions_BS: Tensor, lengths_B: Tensor) -> Tensor:
        """The table at the positions of each row, [2, B, 1, S, E]; its sequence has ``lengths_B`` positions."""
        if not depends_on_length(self.config):
            return self.rotary_2SE[:, positions_BS][:, :, None]
        rows = [  # positions past the end are padding
            rotary_table(self.config, length, positions.device)[:, positions.clamp(max=length - 1)]
            for length, positions in zip(lengths_B.tolist(), positions_BS, strict=True)
        ]
        return torch.stack(rows, dim=1)[:, :, None]

    def set_rope(self, theta: float, scaling: RopeScaling | None) -> None:
        """Use another RoPE base and scaling from here on: a stage of longer sequences changes them."""
        self.config = self.config.model_copy(update={"rope_theta": theta, "rope_scaling": scaling})
        self.rotary_2SE = rotary_table(self.config, self.config.max_position_embeddings, self.rotary_2SE.device)

    def update_expert_bias(self) -> None:
        """Once per step, after the optimizer: where a bias is used, experts with too little work become likelier."""
        for layer in self._moe_layers():
            layer.update_expert_bias()

    def _moe_layers(self) -> list[MoE]:
        blocks = [*self.layers, *([self.mtp.block] if self.mtp is not None else [])]
        return [block.mlp for block in blocks if isinstance(block.mlp, MoE)]

    def _mtp_losses(
        self, mtp: MTPModule, x_BSD: Tensor, inputs: ModelInputs, rotary: Tensor, masks: Masks
    ) -> tuple[Tensor, RoutingStats | None]:
        """Multi-token prediction losses [B, S], zero where it is not known or of another document."""
        targets_BS, doc_starts_BS = inputs.targets_BS, inputs.doc_starts_BS
        assert targets_BS is not None
        next_BSD = self.residual(self.embed_tokens(targets_BS.clamp(min=0)))
        mask = masks[self.config.layer_window(self.config.num_hidden_layers - 1)]
        after_BS = targets_BS.roll(-1, dims=1)
        after_BS[:, -1] = IGNORE_INDEX
        known = targets_BS != IGNORE_INDEX
        if doc_starts_BS is not None:
            known = known & (doc_starts_BS == doc_starts_BS.roll(-1, dims=1))
        after_BS = torch.where(known, after_BS, IGNORE_INDEX)
        out_BSD, routed = mtp(x_BSD, next_BSD, rotary, mask)
        losses_BS: Tensor = self.lm_head(out_BSD, after_BS, with_z_loss=True)
        return losses_BS, routed

    def residual(self, x: Tensor) -> Tensor:
        """Embeddings in the type of the residual stream."""
        if self.config.residual_fp32:
            return x.float()
        return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x


def _run_blocks(
    blocks: Sequence[Block], x_BSD: Tensor, rotary: Tensor, masks: Masks, inputs: ModelInputs
) -> tuple[Tensor, list[RoutingStats | None]]:
    """The residual stream, and the routing statistics of each block."""
    statistics = []
    for block in blocks:
        _seed_dropout(inputs, block.self_attn.layer)
        x_BSD, routed = block(x_BSD, rotary, masks.get(block.window), inputs.cache)
        statistics.append(routed)
    return x_BSD, statistics


def _seed_dropout(inputs: ModelInputs, layer: int) -> None:
    """Before each layer, so that a pipeline stage draws what the full model would."""
    if inputs.dropout_seeds_M is not None:
        torch.manual_seed(derive_seed(int(inputs.dropout_seeds_M), layer))


def derive_seed(*parts: int) -> int:
    """A seed of its own for each combination of numbers."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest())


def _record_expert_load(block: Block, routed: RoutingStats | None) -> list[RoutingStats]:
    """Add the load of a block's experts, once for each pass; the statistics, if there are any."""
    if routed is None:
        return []
    assert isinstance(block.mlp, MoE)
    block.mlp.load += routed.counts_E
    return [routed]


def _init_normal(values: Tensor, std: float, name: str) -> None:
    own = hashlib.blake2b(name.encode(), digest_size=7).digest()
    values.normal_(0.0, std, generator=torch.Generator(values.device).manual_seed(int.from_bytes(own)))
