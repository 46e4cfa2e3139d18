"""A model's shape as a Hugging Face config, and back."""

from __future__ import annotations

from typing import Any

from zero2all.errors import UsageError
from zero2all.recipe import ModelConfig, MoeConfig, RopeScaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# Ours in rope_scaling, theirs in rope_parameters.
ROPE_NAMES = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
}


def hf_incompatibility(config: ModelConfig) -> str | None:
    """Why no standard architecture computes what this model does, or None if one does."""
    moe = config.moe
    if config.final_logit_softcapping is not None:
        return "none of them has this soft-cap: leave model.final_logit_softcapping out"
    if config.sliding_window is not None and not (config.qk_norm or config.qkv_bias):
        return "a sliding window needs model.qk_norm or model.qkv_bias, as in Qwen3 and Qwen2"
    if moe is None:
        return None
    if not config.qk_norm:
        return "experts need model.qk_norm, as in Qwen3-MoE"
    if config.full_attention_interval is not None:
        return "with experts, Qwen3-MoE has a sliding window in every layer: leave model.full_attention_interval out"
    if moe.scoring_func != "softmax" or moe.n_shared_experts or moe.load_balancing == "bias":
        return "Qwen3-MoE has a softmax router, no shared experts and no balance bias"
    return None


def hf_model_type(config: ModelConfig) -> str:
    """The model_type that computes the same."""
    reason = hf_incompatibility(config)
    if reason is not None:
        raise UsageError(f"no standard architecture computes what this model does: {reason}")
    if config.moe is not None:
        return "qwen3_moe"
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.qkv_bias else "llama"


def hf_config(config: ModelConfig, end_of_text: int | None = None, dtype: str = "float32") -> dict[str, Any]:
    """``config.json``."""
    kind = hf_model_type(config)
    scaling = config.rope_scaling
    values = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,  # read by older consumers
        "rope_parameters": _rope_parameters(config),  # read by transformers 5
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.qkv_bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "dtype": dtype,
        "use_cache": True,
    }
    if scaling is not None:
        values["rope_scaling"] = values["rope_parameters"]  # read by older consumers
        if scaling.rope_type == "dynamic":
            values["max_position_embeddings"] = scaling.original_max_position_embeddings  # from where on it stretches
    if kind == "llama":
        values["mlp_bias"] = False
    else:
        values["use_sliding_window"] = config.sliding_window is not None
        values["sliding_window"] = config.sliding_window
        values["max_window_layers"] = 0 if config.sliding_window is not None else config.num_hidden_layers
    if kind in ("qwen2", "qwen3"):
        kinds = ("full_attention", "sliding_attention")
        values["layer_types"] = [
            kinds[config.layer_window(layer) is not None] for layer in range(config.num_hidden_layers)
        ]
    if config.moe is not None:
        values |= _moe_values(config.moe)
    return values


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    names = ROPE_NAMES[scaling.rope_type].items()
    given = {theirs: getattr(scaling, ours) for ours, theirs in names if getattr(scaling, ours) is not None}
    return {"rope_type": scaling.rope_type, "rope_theta": config.rope_theta, **given}


def _moe_values(moe: MoeConfig) -> dict[str, Any]:
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "mlp_only_layers": list(range(moe.first_k_dense_replace)),
        "decoder_sparse_step": 1,
        "router_aux_loss_coef": moe.router_aux_loss_coef if moe.load_balancing == "aux" else 0.0,
        "output_router_logits": False,
    }


def from_hf_config(values: dict[str, Any]) -> ModelConfig:
    """Our shape from a ``config.json`` of transformers 4 or 5, or an error that names what we do not compute."""
    kind = values.get("model_type")
    if kind not in ARCHITECTURES:
        raise UsageError(f"model_type is {kind!r}; the Z2all decoder computes {', '.join(ARCHITECTURES)}")
    for name, plain in (("hidden_act", "silu"), ("mlp_bias", False), ("decoder_sparse_step", 1)):
        if values.get(name, plain) != plain:
            raise UsageError(f"{name} is {values[name]!r}; the Z2all decoder only computes {plain!r}")
    layers = values["num_hidden_layers"]
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    context = values.get("max_position_embeddings", 2048)
    scaling = _scaling(rope, context)
    if scaling is not None and scaling.rope_type == "dynamic":
        context = int(context * scaling.factor)
    window, full_attention_interval = _windows(kind, values, layers)
    heads, head_dim = values["num_attention_heads"], values.get("head_dim")
    return ModelConfig(
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=values.get("num_key_value_heads") or heads,
        head_dim=head_dim if head_dim != values["hidden_size"] / heads else None,
        max_position_embeddings=context,
        vocab_size=values["vocab_size"],
        rope_theta=rope.get("rope_theta") or values.get("rope_theta") or 10000.0,
        rope_scaling=scaling,
        rms_norm_eps=values.get("rms_norm_eps", 1e-6),
        qkv_bias=kind == "qwen2" or values.get("attention_bias", False),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        tie_word_embeddings=values.get("tie_word_embeddings", False),
        sliding_window=window,
        full_attention_interval=full_attention_interval,
        moe=_moe(values, layers) if kind == "qwen3_moe" else None,
        initializer_range=values.get("initializer_range", 0.02),
    )


def _scaling(rope: dict[str, Any], context: int) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    extra = {"partial_rotary_factor": 1.0, "mscale": None, "mscale_all_dim": None, "truncate": True}
    for name, plain in extra.items():
        if rope.get(name, plain) != plain:
            raise UsageError(f"rope {name} is {rope[name]!r}; the Z2all decoder only computes {plain!r}")
    if kind not in ROPE_NAMES:
        raise UsageError(f"rope_type is {kind!r}; the Z2all decoder computes default, {', '.join(ROPE_NAMES)}")
    given = {ours: rope[theirs] for ours, theirs in ROPE_NAMES[kind].items() if rope.get(theirs) is not None}
    if kind == "dynamic":
        given["original_max_position_embeddings"] = context
    return RopeScaling(rope_type=kind, **given)


def _windows(kind: str, values: dict[str, Any], layers: int) -> tuple[int | None, int | None]:
    """The window, and every how many layers there is none."""
    window = values.get("sliding_window") if values.get("use_sliding_window") else None
    if window is None or kind == "qwen3_moe":
        return window, None
    full_until = values.get("max_window_layers", layers)
    kinds = values.get("layer_types") or ["full_attention"] * full_until + ["sliding_attention"] * (layers - full_until)
    slides = [kind == "sliding_attention" for kind in kinds[:layers]]
    if not any(slides):
        return None, None
    if all(slides):
        return window, None
    every = slides.index(False) + 1
    if slides != [(layer + 1) % every != 0 for layer in range(layers)]:
        raise UsageError(
            f"layer_types mixes windows in an order that model.full_attention_interval cannot say: {kinds}"
        )
    return window, every


def _moe(values: dict[str, Any], layers: int) -> MoeConfig:
    dense = sorted(values.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise UsageError(f"mlp_only_layers is {dense}; the Z2all decoder has dense layers only at the front")
    return MoeConfig(
        num_experts=values.get("num_experts", values.get("num_local_experts")),
        num_experts_per_tok=values["num_experts_per_tok"],
        moe_intermediate_size=values["moe_intermediate_size"],
        first_k_dense_replace=len(dense),
        norm_topk_prob=values.get("norm_topk_prob", False),
        router_aux_loss_coef=values.get("router_aux_loss_coef", 0.0),
    )
