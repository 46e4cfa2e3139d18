"""The shape of the model and how its operations are computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator, model_validator

from zero2all.base.package_data import read_package_table
from zero2all.recipe.types import Mistake, Positive, Section

PRESETS: dict[str, dict[str, Any]] = read_package_table(__package__, "model_presets.toml")
"""Fields of ``model`` by the name of the preset."""
SHAPE_FIELDS = {name for preset, shape in PRESETS.items() if preset.startswith("z2all-") for name in shape}
"""Fields that every preset replaces; others, such as ``moe``, only one that sets them."""


class OpsRecipe(Section):
    """The kernel for each operation. All give the same result; ``auto`` selects the fastest that runs on this
    machine."""

    attention: Literal["auto", "flash", "sdpa", "reference"] = "auto"
    """Kernel for attention. Change it if ``auto`` selects one that fails or is slower, such as to ``flash`` for
    flash-attn."""
    norm: Literal["auto", "liger", "torch", "reference"] = "auto"
    """Kernel for RMSNorm. Change it if ``auto`` selects one that fails or is slower."""
    rope: Literal["auto", "liger", "torch", "reference"] = "auto"
    """Kernel for RoPE. Change it if ``auto`` selects one that fails or is slower."""
    swiglu: Literal["auto", "liger", "torch", "reference"] = "auto"
    """Kernel for SwiGLU. Change it if ``auto`` selects one that fails or is slower."""
    cross_entropy: Literal["auto", "liger", "chunked", "torch", "reference"] = "auto"
    """Kernel for the output head and cross-entropy. Change it if ``auto`` selects one that fails or is slower;
    ``reference`` keeps all logits in memory."""
    experts: Literal["auto", "grouped", "reference"] = "auto"
    """Kernel for the feed-forward layers of the experts. Change it if ``auto`` selects one that fails or is slower."""


class RopeScaling(Section):
    """RoPE scaling for sequences longer than the model was trained on, computed as in transformers."""

    rope_type: Literal["linear", "dynamic", "yarn", "llama3"]
    """The scaling method. Set it as in the weights of ``train.init``, or to yarn to extend a model of your own."""
    factor: Positive
    """Factor by which the context is extended. Set it to the new context length divided by the original one."""
    original_max_position_embeddings: int | None = Field(None, ge=1)
    """The original context length. Set it for every type except linear, which needs none."""
    # The constants of the papers, which every released checkpoint has; each is in the config.json of its method.
    low_freq_factor: ClassVar[float] = 1.0
    """llama3: wavelengths above original_max_position_embeddings / low_freq_factor are fully scaled."""
    high_freq_factor: ClassVar[float] = 4.0
    """llama3: wavelengths below original_max_position_embeddings / high_freq_factor are not scaled."""
    beta_fast: ClassVar[float] = 32.0
    """yarn: dimensions with more rotations than this over the original context are not scaled."""
    beta_slow: ClassVar[float] = 1.0
    """yarn: dimensions with fewer rotations than this over the original context are fully scaled."""

    @property
    def attention_factor(self) -> float:
        """YaRN's multiplier of cos and sin."""
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def mistakes(self) -> Iterator[Mistake]:
        if self.rope_type != "linear" and self.original_max_position_embeddings is None:
            yield Mistake(
                f"{self.rope_type} needs original_max_position_embeddings, the context of the model before",
                ("rope_type", "original_max_position_embeddings"),
            )


class MoeConfig(Section):
    """Mixture of experts: each token is routed to the experts with the highest router scores. No token is dropped."""

    num_experts: int = Field(ge=2)
    """Number of routed experts. Raise it for more parameters at the same FLOPs per token."""
    num_experts_per_tok: int = Field(ge=1)
    """Number of experts that each token is routed to. Raise it for more FLOPs per token at the same parameters."""
    moe_intermediate_size: int = Field(ge=8)
    """Feed-forward width of one expert. Lower it to have more, smaller experts for the same parameters."""
    n_shared_experts: int = Field(0, ge=0)
    """Number of shared experts, which process every token. Set it with a sigmoid router, which cannot be exported
    without them."""
    first_k_dense_replace: int = Field(0, ge=0)
    """Number of leading layers that are dense, with intermediate_size. Raise it if the first layers do not learn to
    balance their experts."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """How router scores are computed. Set it to sigmoid to export a model with shared experts or
    ``load_balancing: bias``."""
    norm_topk_prob: bool = True
    """Normalize the expert weights of a token so that they sum to one. Turn it off only for weights that were trained
    without it."""
    load_balancing: Literal["aux", "bias", "none"] = "aux"
    """How expert load is balanced: aux (auxiliary loss), bias (auxiliary-loss-free) or none. Set it to bias with pp, or
    if losses must not depend on the micro-batch."""
    router_aux_loss_coef: float = Field(0.01, ge=0)
    """Weight of the auxiliary load-balancing loss, which is 1 at equal load. Raise it if few experts get most tokens,
    and lower it if the loss suffers."""
    bias_update_rate: Positive = 0.001
    """Step size of the expert bias (auxiliary-loss-free balancing). Raise it if few experts get most tokens, and lower
    it if their load oscillates."""

    def mistakes(self) -> Iterator[Mistake]:
        if self.num_experts_per_tok > self.num_experts:
            yield Mistake(
                f"num_experts_per_tok ({self.num_experts_per_tok}) is more than num_experts ({self.num_experts})",
                ("num_experts_per_tok", "num_experts"),
            )


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ATTENTION_TARGETS: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")


class LoraConfig(Section):
    """Low-rank adapters (LoRA): the weights are frozen, and two small matrices beside each target are trained."""

    rank: int = Field(8, ge=1)
    """Rank of the adapters (r). Raise it if full fine-tuning reaches a lower loss."""
    alpha: Positive = 16.0
    """The adapter is scaled by alpha / rank. Raise it in proportion to ``rank`` to keep that scale."""
    target_modules: tuple[LoraTarget, ...] = get_args(LoraTarget)
    """Matrices with an adapter. Default: all of attention and feed-forward. Set it to attention only for a model with
    experts, or to save memory."""

    def mistakes(self) -> Iterator[Mistake]:
        if not self.target_modules or len(set(self.target_modules)) < len(self.target_modules):
            yield Mistake("target_modules must name at least one matrix, each once", ("target_modules",))


class ModelConfig(Section):
    """The model architecture: a preset, single fields, or a preset with some fields overridden."""

    preset: str | None = None
    """Name of a preset. Other fields override its values. Set it to a size that ``z2a plan`` shows to fit your GPUs and
    time."""
    hidden_size: int = Field(192, ge=8)
    """Width of the residual stream. Raise it for a larger model, together with ``num_hidden_layers``."""
    intermediate_size: int = Field(512, ge=8)
    """Width of the feed-forward layers (MLP). Change it with ``hidden_size``; presets have 2.7 to 3.5 times as much."""
    num_hidden_layers: int = Field(7, ge=1)
    """Number of transformer blocks (layers). Raise it for a larger model, together with ``hidden_size``."""
    num_attention_heads: int = Field(3, ge=1)
    """Number of query heads. Change it with ``hidden_size``, so that a head keeps 64 or 128 dimensions."""
    num_key_value_heads: int = Field(1, ge=1)
    """Number of key and value heads; fewer than ``num_attention_heads`` is grouped-query attention. Lower it if the KV
    cache limits generation."""
    head_dim: int | None = None
    """Size of one head. Default: ``hidden_size / num_attention_heads``. Set it if the weights of ``train.init`` have
    another size."""
    max_position_embeddings: int = Field(512, ge=8)
    """Maximum sequence length (context length). Raise it before the first step, to the longest ``seq_len`` of all
    stages."""
    vocab_size: int | None = None
    """Number of tokens in the vocabulary. Default: the size of the tokenizer. Embedding and head are padded to the next
    multiple of 64; padded rows are never predicted. Set it if the weights of ``train.init`` have more rows."""
    rope_theta: Positive = 10000.0
    """Base of the rotary position embedding (RoPE). Raise it for longer sequences, such as to 500000 for 8192
    tokens."""
    rope_scaling: RopeScaling | None = None
    """RoPE scaling for a model that was trained on shorter sequences."""
    rms_norm_eps: Positive = 1e-5
    """Epsilon of RMSNorm. Change it only to match the weights of ``train.init``."""
    qkv_bias: bool = False
    """Add a bias to the query, key and value projections. Turn it on for Qwen2 weights."""
    qk_norm: bool = False
    """Apply RMSNorm to each head of queries and keys. Turn it on if a high learning rate is unstable, or for Qwen3
    weights."""
    tie_word_embeddings: bool = False
    """Share one matrix between embedding and output head. Turn it on for a small model, in which they outweigh the
    blocks."""
    residual_fp32: bool = True
    """Keep the residual stream in fp32 under bf16. Turn it off to save activation memory at lower precision."""
    sliding_window: int | None = Field(None, ge=1)
    """Sliding-window attention: number of positions that a token attends to, including its own. Default: all. Set it if
    attention over long sequences takes too much time."""
    full_attention_interval: int | None = Field(None, ge=2)
    """With a sliding window: every n-th layer has full attention. Set it if the model has to find text beyond the
    window."""
    final_logit_softcapping: Positive | None = None
    """Softcap of the logits: ``cap * tanh(logits / cap)``. Set it if logits grow until training is unstable; the model
    then cannot be exported."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the z-loss, the squared log-sum-exp of the logits, which keeps them from drifting. It affects the
    gradient, not the reported loss. Set it, commonly to 1e-4, if training diverges late."""
    mtp_weight: float = Field(0.0, ge=0)
    """Weight of the multi-token prediction (MTP) loss; 0 disables MTP. The MTP block is not exported. Raise it, such as
    to 0.3, to try whether predicting two tokens helps."""
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of attention weights in training. It needs the attention kernel sdpa or reference, which auto selects.
    Raise it if a small, repeated corpus overfits."""
    residual_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout in training of what attention and the feed-forward layer add to the residual stream. Raise it if a small,
    repeated corpus overfits."""
    moe: MoeConfig | None = None
    """Mixture of experts in place of the feed-forward layers."""
    lora: LoraConfig | None = None
    """Train low-rank adapters (LoRA) in place of the weights, which come from ``train.init``."""
    initializer_range: Positive = 0.02
    """Standard deviation of the initial weights; projections into the residual stream are scaled by depth. Lower it if
    the first loss is far above ln(vocabulary size)."""
    mup_base: int | None = Field(None, ge=8)
    """Base width for muP: the hidden_size at which the learning rate was tuned. Initial weights and learning rates of
    the matrices are scaled so that it transfers to this width. Set it if you tuned on a narrower model, with AdamW and
    untied embeddings."""
    ops: OpsRecipe = OpsRecipe()
    """The kernel for each operation."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(name := values.get("preset"), str):
            return {**PRESETS.get(name, {}), **values}
        return values

    @field_validator("preset")
    @classmethod
    def _preset_exists(cls, name: str | None) -> str | None:
        if name is not None and name not in PRESETS:
            raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
        return name

    def mistakes(self) -> Iterator[Mistake]:
        yield from self._head_mistakes()
        if self.full_attention_interval is not None and self.sliding_window is None:
            yield Mistake(
                "full_attention_interval sets which layers have no sliding window: set sliding_window too",
                ("full_attention_interval", "sliding_window"),
            )
        if self.moe is not None and self.moe.first_k_dense_replace >= self.num_hidden_layers:
            yield Mistake(
                f"moe.first_k_dense_replace ({self.moe.first_k_dense_replace}) leaves none of "
                f"{self.num_hidden_layers} layers to experts",
                ("moe.first_k_dense_replace", "num_hidden_layers"),
            )
        if (
            self.moe is not None
            and self.lora is not None
            and not set(self.lora.target_modules) <= set(ATTENTION_TARGETS)
        ):
            yield Mistake(
                f"experts have no adapters: set lora.target_modules to some of {', '.join(ATTENTION_TARGETS)}",
                ("lora.target_modules", "moe"),
            )
        if self.attention_dropout and self.ops.attention == "flash":
            yield Mistake(
                "the attention kernel flash has no dropout: set ops.attention=auto or sdpa, or attention_dropout=0",
                ("attention_dropout", "ops.attention"),
            )
        if self.mup_base is not None and self.tie_word_embeddings:
            yield Mistake(
                "mup_base scales the head and not the embedding: set tie_word_embeddings=false",
                ("mup_base", "tie_word_embeddings"),
            )

    def _head_mistakes(self) -> Iterator[Mistake]:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            yield Mistake(
                f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})",
                ("num_attention_heads", "num_key_value_heads"),
            )
        if self.head_dim is None and self.hidden_size % heads:
            yield Mistake(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads ({heads})",
                ("num_attention_heads", "hidden_size", "head_dim"),
            )
        elif self.head_size % 2:
            yield Mistake(
                f"head size ({self.head_size}) must be even for rotary positions",
                ("head_dim", "num_attention_heads", "hidden_size"),
            )

    def layout_notes(self) -> Iterator[str]:
        """What is trained differently on a different number of ranks, by more than rounding, and why."""
        if self.has_dropout:
            yield (
                "dropout (model.residual_dropout, model.attention_dropout): ranks draw different masks, so losses "
                "differ between numbers of ranks and sizes of micro-batches"
            )
        if self.moe is not None and self.moe.load_balancing == "aux":
            yield (
                "model.moe.load_balancing=aux: the balance loss is computed for each micro-batch, so losses differ "
                "between sizes of micro-batches. Without train.micro_batch_tokens the number of ranks sets that size"
            )

    @property
    def mup_width_mult(self) -> float:
        """How much narrower the model was on which the learning rate was tuned; 1 without width transfer."""
        return 1.0 if self.mup_base is None else self.mup_base / self.hidden_size

    @property
    def has_dropout(self) -> bool:
        return max(self.attention_dropout, self.residual_dropout) > 0

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the head: GPUs are fast where this is a multiple of 64."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not set: take it from the tokenizer")
        return -(-self.vocab_size // 64) * 64

    def layer_window(self, layer: int) -> int | None:
        """How many positions a layer sees, or None for all."""
        full = self.full_attention_interval is not None and (layer + 1) % self.full_attention_interval == 0
        return None if full else self.sliding_window

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.moe.first_k_dense_replace
