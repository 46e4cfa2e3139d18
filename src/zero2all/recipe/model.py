"""The shape of the model and how its operations are computed."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from zero2all.recipe.presets import PRESETS
from zero2all.recipe.types import Positive, Section


class OpsRecipe(Section):
    """Which form of each operation computes it. All forms give the same result; ``auto`` takes the best that runs."""

    attention: Literal["auto", "flash", "flex", "sdpa", "reference"] = "auto"
    norm: Literal["auto", "liger", "torch", "reference"] = "auto"
    rope: Literal["auto", "liger", "torch", "reference"] = "auto"
    swiglu: Literal["auto", "liger", "torch", "reference"] = "auto"
    cross_entropy: Literal["auto", "liger", "chunked", "torch", "reference"] = "auto"
    experts: Literal["auto", "grouped", "reference"] = "auto"


class RopeScaling(Section):
    """Rotary positions for text longer than a model was trained on, computed as transformers does."""

    type: Literal["linear", "dynamic", "yarn", "llama3"]
    factor: Positive
    """How many times longer."""
    original_context: int | None = Field(None, ge=1)
    """The context before; every type but linear needs it."""
    low_freq_factor: Positive = 1.0
    """llama3: wavelengths above original_context / this are scaled in full."""
    high_freq_factor: Positive = 4.0
    """llama3: wavelengths below original_context / this stay as they are."""
    beta_fast: Positive = 32.0
    """yarn: dimensions that turn more often than this over the original context stay as they are."""
    beta_slow: Positive = 1.0
    """yarn: those that turn less often are scaled in full."""
    attention_factor: Positive | None = None
    """yarn: multiplies cos and sin; 0.1 ln(factor) + 1 if not given."""

    @model_validator(mode="after")
    def _knows_where_it_starts(self) -> Self:
        if self.type != "linear" and self.original_context is None:
            raise ValueError(f"{self.type} needs original_context, the context of the model before")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be above low_freq_factor")
        return self


class MoeConfig(Section):
    """A mixture of experts: each token goes to the few experts that its router scores highest. None is dropped."""

    experts: int = Field(ge=2)
    top_k: int = Field(ge=1)
    """Experts for each token."""
    expert_intermediate: int = Field(ge=8)
    """Width of one expert; top_k x this is what a token goes through."""
    shared_experts: int = Field(0, ge=0)
    """Experts that every token goes through besides."""
    first_dense: int = Field(0, ge=0)
    """How many of the first layers have the plain feed-forward part of intermediate_size."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    """Weights of a token's experts add up to one."""
    balance: Literal["aux", "bias", "none"] = "aux"
    """How the load is evened: a loss in the gradient, or a bias on the choice that each step moves a little."""
    aux_weight: float = Field(0.01, ge=0)
    """Weight of the balance loss; it is 1 where all experts get the same."""
    bias_rate: Positive = 0.001
    """How far a step moves the bias."""

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k ({self.top_k}) is more than there are experts ({self.experts})")
        return self


class ModelConfig(Section):
    """The shape of the decoder. Give a preset, single fields, or a preset with some fields changed."""

    preset: str | None = None
    """A named shape; any field given beside it wins."""
    hidden_size: int = Field(192, ge=8)
    intermediate_size: int = Field(512, ge=8)
    n_layers: int = Field(7, ge=1)
    n_heads: int = Field(3, ge=1)
    n_kv_heads: int = Field(1, ge=1)
    """Fewer than ``n_heads`` is grouped-query attention."""
    head_dim: int | None = None
    """Size of one head; ``hidden_size / n_heads`` if not given."""
    context: int = Field(512, ge=8)
    """Longest sequence."""
    vocab_size: int | None = None
    """Tokens of the vocabulary; taken from the tokenizer if not given. The tables have rows up to the next multiple
    of 64; those past the vocabulary never count."""
    rope_theta: Positive = 10000.0
    """Base of the rotary positions' wavelengths; a higher one reaches farther."""
    rope_scaling: RopeScaling | None = None
    """Stretch the rotary positions of a model that was trained on shorter text."""
    norm_eps: Positive = 1e-5
    qkv_bias: bool = False
    """A bias on the query, key and value projections."""
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys."""
    tied: bool = False
    """One matrix for embedding and output head."""
    residual_fp32: bool = True
    """Keep the residual stream in fp32 under bf16."""
    sliding_window: int | None = Field(None, ge=1)
    """Layers see only this many positions back, themselves included."""
    global_every: int | None = Field(None, ge=2)
    """With a sliding window: every n-th layer sees everything all the same."""
    logit_softcap: Positive | None = None
    """Bend logits smoothly into (-cap, cap), as ``cap * tanh(logits / cap)``."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the squared log-sum-exp of the logits, which keeps them from drifting. In the gradient, not in the
    loss that is reported; 1e-4 is usual."""
    mtp_weight: float = Field(0.0, ge=0)
    """Weight of the loss of a further block that predicts the token after next; 0 has no such block. Export leaves
    it out."""
    moe: MoeConfig | None = None
    """A mixture of experts in place of the feed-forward part."""
    init_std: Positive = 0.02
    """Spread of the initial weights; those that write to the residual stream are scaled by depth."""
    mup_base: int | None = Field(None, ge=8)
    """Width transfer (muP): the hidden_size at which the learning rate was tuned; initial weights and rates of the
    matrices are scaled so that it fits this width too. For AdamW, with untied embeddings."""
    ops: OpsRecipe = OpsRecipe()

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

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})")
        if self.head_dim is None and self.hidden_size % self.n_heads:
            raise ValueError(f"hidden_size ({self.hidden_size}) must be a multiple of n_heads ({self.n_heads})")
        if self.head_size % 2:
            raise ValueError(f"head size ({self.head_size}) must be even for rotary positions")
        return self

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.global_every is not None and self.sliding_window is None:
            raise ValueError("global_every says which layers have no sliding window: set sliding_window too")
        if self.moe is not None and self.moe.first_dense >= self.n_layers:
            raise ValueError(
                f"moe.first_dense ({self.moe.first_dense}) leaves none of {self.n_layers} layers to experts"
            )
        return self

    @model_validator(mode="after")
    def _width_transfer_is_untied(self) -> Self:
        if self.mup_base is not None and self.tied:
            raise ValueError("mup_base scales the head and not the embedding: set tied=false")
        return self

    @property
    def narrower(self) -> float:
        """How much narrower the model was on which the learning rate was tuned; 1 without width transfer."""
        return 1.0 if self.mup_base is None else self.mup_base / self.hidden_size

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.n_heads

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the head: GPUs are fast where this is a multiple of 64."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not set: take it from the tokenizer")
        return -(-self.vocab_size // 64) * 64

    def window(self, layer: int) -> int | None:
        """How many positions a layer sees, or None for all."""
        full = self.global_every is not None and (layer + 1) % self.global_every == 0
        return None if full else self.sliding_window

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.moe.first_dense
