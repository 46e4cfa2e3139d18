"""A model's shape as a Hugging Face config, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, ValidationError

from zero2all.base.errors import UsageError
from zero2all.base.records import first_problem, parse_record
from zero2all.recipe import ModelConfig, MoeConfig, RopeScaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
# Fields of each type of RoPE scaling, called the same here and in transformers. Those that no recipe has are constants.
ROPE_FIELDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}

# A config comes from anywhere, and a model is built of it, if only without its weights: sizes that no model has would
# take all memory or overflow.
Width = Annotated[int, Field(ge=1, le=1 << 20)]
Layers = Annotated[int, Field(ge=0, le=10_000)]
Experts = Annotated[int, Field(ge=0, le=1 << 16)]
Positions = Annotated[int, Field(ge=1, le=1 << 31)]


@dataclass(frozen=True)
class HFArchitecture:
    """The field of any ``config.json`` that says how the others are to be read."""

    model_type: str | None = None


@dataclass(frozen=True)
class HFRope:
    """``rope_parameters`` of transformers 5, or ``rope_scaling`` of transformers 4."""

    rope_type: str | None = None
    type: str | None = None
    """``rope_type`` in older files."""
    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    partial_rotary_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = True


@dataclass(frozen=True)
class HFConfig:
    """The fields of a ``config.json`` that are read, with the defaults of transformers."""

    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    vocab_size: Positions
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    max_position_embeddings: Positions = 2048
    rope_theta: float | None = None
    rope_parameters: HFRope | None = None
    rope_scaling: HFRope | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float | None = 0.0
    tie_word_embeddings: bool = False
    use_sliding_window: bool | None = None
    sliding_window: int | None = None
    max_window_layers: Layers | None = None
    layer_types: list[str] | None = None
    initializer_range: float = 0.02
    hidden_act: str | None = "silu"
    mlp_bias: bool | None = False
    decoder_sparse_step: int | None = 1
    use_qk_norm: bool = False
    partial_rotary_factor: float | None = None


@dataclass(frozen=True)
class HFMoeConfig:
    """The fields of a ``config.json`` that describe experts."""

    num_experts_per_tok: int
    moe_intermediate_size: Width
    num_experts: Experts | None = None
    num_local_experts: Experts | None = None
    """``num_experts`` in some files."""
    mlp_only_layers: list[int] | None = None
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.0


@dataclass(frozen=True)
class HFGlmMoeConfig:
    """The same of GLM-4-MoE: a sigmoid router with a bias, and shared experts."""

    num_experts_per_tok: int
    moe_intermediate_size: Width
    n_routed_experts: Experts | None = None
    num_local_experts: Experts | None = None
    n_shared_experts: Experts = 1
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    num_nextn_predict_layers: int | None = 0


def hf_incompatibility(config: ModelConfig) -> str | None:
    """Why no standard architecture computes what this model does, or None if one does."""
    moe = config.moe
    if config.final_logit_softcapping is not None:
        return "none of them has this soft-cap: leave model.final_logit_softcapping out"
    if config.sliding_window is not None and not (config.qk_norm or config.qkv_bias):
        return "a sliding window needs model.qk_norm or model.qkv_bias, as in Qwen3 and Qwen2"
    if moe is None:
        return None
    if moe.scoring_func == "sigmoid":
        return _glm_incompatibility(config, moe)
    if not config.qk_norm:
        return "experts with a softmax router need model.qk_norm, as in Qwen3-MoE"
    if config.full_attention_interval is not None:
        return "with experts, Qwen3-MoE has a sliding window in every layer: leave model.full_attention_interval out"
    if moe.n_shared_experts or moe.load_balancing == "bias":
        return (
            "shared experts and load_balancing: bias need model.moe.scoring_func: sigmoid, as in GLM-4-MoE; a softmax "
            "router has neither, as in Qwen3-MoE"
        )
    return None


def _glm_incompatibility(config: ModelConfig, moe: MoeConfig) -> str | None:
    if config.sliding_window is not None:
        return "with a sigmoid router there is no sliding window, as in GLM-4-MoE: leave model.sliding_window out"
    if not moe.n_shared_experts:
        return "a sigmoid router needs shared experts, as in GLM-4-MoE: set model.moe.n_shared_experts"
    return None


def hf_model_type(config: ModelConfig) -> str:
    """The model_type that computes the same."""
    reason = hf_incompatibility(config)
    if reason is not None:
        raise UsageError(f"no standard architecture computes what this model does: {reason}")
    if config.moe is not None:
        return "glm4_moe" if config.moe.scoring_func == "sigmoid" else "qwen3_moe"
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
        "attention_dropout": config.attention_dropout,
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
    elif kind == "glm4_moe":
        values["use_qk_norm"] = config.qk_norm
    else:
        values["use_sliding_window"] = config.sliding_window is not None
        values["sliding_window"] = config.sliding_window
        values["max_window_layers"] = 0 if config.sliding_window is not None else config.num_hidden_layers
    if kind in ("qwen2", "qwen3"):
        kinds = ("full_attention", "sliding_attention")
        values["layer_types"] = [
            kinds[config.layer_window(layer) is not None] for layer in range(config.num_hidden_layers)
        ]
    if (moe := config.moe) is not None:
        values |= _glm_moe_values(moe) if kind == "glm4_moe" else _qwen_moe_values(moe)
    return values


def _qwen_moe_values(moe: MoeConfig) -> dict[str, Any]:
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "mlp_only_layers": [*range(moe.first_k_dense_replace)],
        "decoder_sparse_step": 1,
        "router_aux_loss_coef": moe.router_aux_loss_coef if moe.load_balancing == "aux" else 0.0,
        "output_router_logits": False,
    }


def _glm_moe_values(moe: MoeConfig) -> dict[str, Any]:
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "n_shared_experts": moe.n_shared_experts,
        "first_k_dense_replace": moe.first_k_dense_replace,
        "norm_topk_prob": moe.norm_topk_prob,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }


def _rope_parameters(config: ModelConfig) -> dict[str, str | float]:
    scaling = config.rope_scaling
    values: dict[str, str | float] = {"rope_theta": config.rope_theta}
    if hf_model_type(config) == "glm4_moe":
        values["partial_rotary_factor"] = 1.0  # the default is one half
    if scaling is None:
        return {"rope_type": "default", **values}
    given = {name: getattr(scaling, name) for name in ROPE_FIELDS[scaling.rope_type] if name != "attention_factor"}
    return {"rope_type": scaling.rope_type, **values, **given}


def from_hf_config(values: object, source: object = "config.json") -> ModelConfig:
    """Our shape from a ``config.json`` of transformers 4 or 5, or an error that names what we do not compute."""
    try:
        return _model_config(values, source)
    except ValidationError as error:
        raise UsageError(f"{source}: {first_problem(error)}; no model of the Z2all decoder has that") from error


def _model_config(values: object, source: object) -> ModelConfig:
    kind = parse_record(HFArchitecture, values, source).model_type
    if kind not in ARCHITECTURES:
        raise UsageError(f"model_type is {kind!r}; the Z2all decoder computes {', '.join(ARCHITECTURES)}")
    config = parse_record(HFConfig, values, source)
    _refuse_other_values(config, "", hidden_act="silu", mlp_bias=False, decoder_sparse_step=1)
    rope = config.rope_parameters or config.rope_scaling or HFRope()
    if kind == "glm4_moe":
        _refuse_partial_rotary(rope, config)
    context = config.max_position_embeddings
    scaling = _scaling(rope, context)
    if scaling is not None and scaling.rope_type == "dynamic":
        context = int(context * scaling.factor)
    window, full_attention_interval = _windows(kind, config)
    heads = config.num_attention_heads
    return ModelConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=config.num_key_value_heads or heads,
        head_dim=config.head_dim if config.head_dim != config.hidden_size / heads else None,
        max_position_embeddings=context,
        vocab_size=config.vocab_size,
        rope_theta=rope.rope_theta or config.rope_theta or 10000.0,
        rope_scaling=scaling,
        rms_norm_eps=config.rms_norm_eps,
        qkv_bias=kind == "qwen2" or config.attention_bias,
        qk_norm=kind in ("qwen3", "qwen3_moe") or (kind == "glm4_moe" and config.use_qk_norm),
        tie_word_embeddings=config.tie_word_embeddings,
        sliding_window=window,
        full_attention_interval=full_attention_interval,
        attention_dropout=config.attention_dropout or 0.0,
        moe=_moe(kind, values, source),
        initializer_range=config.initializer_range,
    )


def _refuse_other_values(record: HFConfig | HFRope | HFGlmMoeConfig, prefix: str, **computed: object) -> None:
    for name, value in computed.items():
        if (given := getattr(record, name)) != value:
            raise UsageError(f"{prefix}{name} is {given!r}; the Z2all decoder only computes {value!r}")


def _scaling(rope: HFRope, context: int) -> RopeScaling | None:
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if rope.partial_rotary_factor is not None:
        _refuse_other_values(rope, "rope ", partial_rotary_factor=1.0)
    _refuse_other_values(rope, "rope ", mscale=None, mscale_all_dim=None, truncate=True)
    if kind not in ROPE_FIELDS:
        raise UsageError(f"rope_type is {kind!r}; the Z2all decoder computes default, {', '.join(ROPE_FIELDS)}")
    given = {name: value for name in ROPE_FIELDS[kind] if (value := getattr(rope, name)) is not None}
    constants = {name: given.pop(name) for name in [*given] if name not in RopeScaling.model_fields}
    if kind == "dynamic":
        given["original_max_position_embeddings"] = context
    scaling = RopeScaling.model_validate({"rope_type": kind, **given})
    _refuse_other_values(rope, "rope ", **{name: getattr(scaling, name) for name in constants})
    return scaling


def _windows(kind: str, config: HFConfig) -> tuple[int | None, int | None]:
    """The window, and every how many layers there is none."""
    layers = config.num_hidden_layers
    window = config.sliding_window if config.use_sliding_window else None
    if window is None or kind == "qwen3_moe":
        return window, None
    full_until = layers if config.max_window_layers is None else config.max_window_layers
    kinds = config.layer_types or ["full_attention"] * full_until + ["sliding_attention"] * (layers - full_until)
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


def _refuse_partial_rotary(rope: HFRope, config: HFConfig) -> None:
    factor = rope.partial_rotary_factor or config.partial_rotary_factor or 0.5
    if factor != 1:
        raise UsageError(f"partial_rotary_factor is {factor}; the Z2all decoder only computes 1.0")


def _moe(kind: str, values: object, source: object) -> MoeConfig | None:
    if kind == "qwen3_moe":
        return _qwen_moe(parse_record(HFMoeConfig, values, source))
    return _glm_moe(parse_record(HFGlmMoeConfig, values, source)) if kind == "glm4_moe" else None


def _glm_moe(config: HFGlmMoeConfig) -> MoeConfig:
    num_experts = config.n_routed_experts or config.num_local_experts
    if num_experts is None:
        raise UsageError("n_routed_experts is missing")
    _refuse_other_values(config, "", routed_scaling_factor=1.0, n_group=1, topk_group=1)
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        n_shared_experts=config.n_shared_experts,
        first_k_dense_replace=config.first_k_dense_replace,
        norm_topk_prob=config.norm_topk_prob,
        scoring_func="sigmoid",
        load_balancing="bias",
    )


def _qwen_moe(config: HFMoeConfig) -> MoeConfig:
    num_experts = config.num_experts or config.num_local_experts
    if num_experts is None:
        raise UsageError("num_experts is missing")
    dense = sorted(config.mlp_only_layers or [])
    if dense != list(range(len(dense))):
        raise UsageError(f"mlp_only_layers is {dense}; the Z2all decoder has dense layers only at the front")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        first_k_dense_replace=len(dense),
        norm_topk_prob=config.norm_topk_prob,
        router_aux_loss_coef=config.router_aux_loss_coef,
    )
