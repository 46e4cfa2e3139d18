"""A model as a GGUF file, which llama.cpp and what is built on it read (https://github.com/ggml-org/ggml)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from zero2all.base.console import progress
from zero2all.base.errors import UsageError, Z2aError, need
from zero2all.model import Z2all
from zero2all.model.hf_config import hf_model_type
from zero2all.model.hf_weights import EXPERT_BIAS, HF_EXPERT_BIAS, hf_names, zero_tensors
from zero2all.model.rope_table import rope_frequencies
from zero2all.model.weights import VOCABULARY_WEIGHTS, WeightReader
from zero2all.recipe import ModelConfig
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.tokenizer_json import BYTE_TOKEN
from zero2all.tokenizer.vocabulary import IM_END, PAD, PATTERNS

GGUFDtype = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
GGUF_DTYPES: tuple[GGUFDtype, ...] = get_args(GGUFDtype)
ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "qwen3_moe": "QWEN3MOE", "glm4_moe": "GLM4_MOE"}
BLOCK = 32  # values that share a scale in q8_0 and q4_0

PRE_TOKENIZERS = {"zh-en-code": "smaug-bpe", "qwen2": "qwen2", "gpt2": "gpt-2"}
"""The name that llama.cpp has for each of our patterns."""


class TokenType(IntEnum):
    """The token types of GGUF."""

    NORMAL = 1
    CONTROL = 3
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GGUFVocabulary:
    model: str
    """``gpt2`` (byte-level BPE) or ``llama`` (sentencepiece)."""
    pre_tokenizer: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    """Scores for sentencepiece: a merge that comes first has the highest."""
    space_before: bool


def gguf_vocabulary(tokenizer: Tokenizer, rows: int) -> GGUFVocabulary:
    """``rows`` counts the embedding's rows; ids without a token are unused."""
    vocabulary = tokenizer.vocabulary
    if vocabulary.definition["model"].get("type", "BPE") != "BPE":
        raise UsageError("a unigram tokenizer cannot be written to GGUF: export with --format hf")
    tokens = [f"[PAD{id}]" for id in range(rows)]
    types = [int(TokenType.UNUSED)] * rows
    for token, id in vocabulary.ids.items():
        is_byte = vocabulary.is_sentencepiece and BYTE_TOKEN.fullmatch(token)
        tokens[id], types[id] = token, TokenType.BYTE if is_byte else TokenType.NORMAL
    for token, id in tokenizer.special_ids.items():
        tokens[id], types[id] = token, TokenType.CONTROL
    merges = vocabulary.merges
    if vocabulary.is_sentencepiece:
        ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(merges)))}
        scores = [-float(ranks.get(token, 0)) for token in tokens]
        return GGUFVocabulary("llama", "default", tokens, types, [], scores, vocabulary.space_before != "never")
    return GGUFVocabulary(
        "gpt2", _pre_tokenizer(tokenizer), tokens, types, [" ".join(pair) for pair in merges], [], False
    )


def _pre_tokenizer(tokenizer: Tokenizer) -> str:
    try:
        pattern = tokenizer.vocabulary.pattern
    except Z2aError:
        pattern = ""
    for name, known in PATTERNS.items():
        if pattern == known:
            return PRE_TOKENIZERS[name]
    raise UsageError(
        "llama.cpp has no pre-tokenizer that splits text as this tokenizer does; it knows the tokenizer.pattern values "
        f"{', '.join(PRE_TOKENIZERS)}. Export with --format hf"
    )


def add_vocabulary(writer: Any, tokenizer: Tokenizer, rows: int, begin_id: int | None) -> None:
    """``begin_id``: the token that text begins with, None if it begins with none."""
    vocabulary = gguf_vocabulary(tokenizer, rows)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_before)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    special = tokenizer.special_ids
    if IM_END in special:
        writer.add_eot_token_id(special[IM_END])
    if PAD in special:
        writer.add_pad_token_id(special[PAD])
    # Without one, llama.cpp would take its default, which is some other token.
    writer.add_bos_token_id(tokenizer.eos_token_id if begin_id is None else begin_id)
    writer.add_add_bos_token(begin_id is not None)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of the file, and where its values come from."""

    name: str
    weight: str | None
    """The weight of ours; None: zeros, for what other models have and ours does not."""
    shape: tuple[int, ...]
    dtype: GGUFDtype
    heads: int | None = None
    """Rows are put into another order by heads of this number; see ``_interleave``."""

    def values(self, weights: WeightReader) -> np.ndarray[Any, Any]:
        if self.weight is None:
            return np.zeros(self.shape, np.float32)
        values = weights.read(self.weight, (0,) * len(self.shape), self.shape).float()
        return (values if self.heads is None else _interleave(values, self.heads)).contiguous().numpy()


def gguf_incompatibility(config: ModelConfig) -> str | None:
    """Why llama.cpp does not compute what this model does, although transformers does; None if it does."""
    moe, scaling = config.moe, config.rope_scaling
    if config.sliding_window is not None:
        return "it has no sliding window for this architecture (model.sliding_window)"
    if config.qkv_bias and config.qk_norm and moe is None:
        return "its Qwen3 has no biases (model.qkv_bias with model.qk_norm)"
    own_head_size = config.head_size * config.num_attention_heads != config.hidden_size
    if own_head_size and config.qkv_bias and not config.qk_norm and moe is None:
        return "its Qwen2 has heads of hidden_size / num_attention_heads (model.head_dim)"
    if scaling is not None and scaling.rope_type == "dynamic":
        return "it has no dynamic RoPE scaling (model.rope_scaling.rope_type)"
    if scaling is not None and scaling.rope_type == "llama3" and hf_model_type(config) != "llama":
        return "it has llama3 RoPE scaling only for Llama (model.rope_scaling.rope_type)"
    if moe is not None and hf_model_type(config) == "qwen3_moe":
        if not moe.norm_topk_prob:
            return "its Qwen3-MoE always normalizes the weights of experts (model.moe.norm_topk_prob: true)"
        if moe.first_k_dense_replace:
            return "its Qwen3-MoE has no dense layers (model.moe.first_k_dense_replace: 0)"
    return None


def write_gguf(
    path: Path, weights: WeightReader, tokenizer: Tokenizer, dtype: GGUFDtype, name: str, begin_id: int | None
) -> None:
    """Write a model to ``path``; one tensor is in memory at a time.

    ``begin_id`` is the token that text begins with, or None.
    """
    gguf, config = need("gguf", "gguf"), weights.config
    if (reason := gguf_incompatibility(config)) is not None:
        raise UsageError(f"llama.cpp does not compute what this model does: {reason}; export with --format hf")
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[hf_model_type(config)]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"])
    if dtype.startswith("q"):
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, gguf, config)
    _add_rope(writer, gguf, config)
    add_vocabulary(writer, tokenizer, config.vocab_size or tokenizer.vocab_size, begin_id)
    tensors = list(_tensors(config, gguf.get_tensor_name_map(architecture, config.num_hidden_layers), dtype))
    factors = _rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for tensor in tensors:
        _announce(writer, gguf, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    with progress(f"writing {path.name}", len(tensors)) as bar:
        for tensor in tensors:
            writer.write_tensor_data(_encode(gguf, tensor.values(weights), tensor.dtype))
            bar(1)
    writer.close()


def _add_shape(writer: Any, gguf: Any, config: ModelConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if (moe := config.moe) is None:
        return
    writer.add_expert_count(moe.num_experts)
    writer.add_expert_used_count(moe.num_experts_per_tok)
    writer.add_expert_feed_forward_length(moe.moe_intermediate_size)
    if hf_model_type(config) == "glm4_moe":
        writer.add_leading_dense_block_count(moe.first_k_dense_replace)
        writer.add_expert_shared_count(moe.n_shared_experts)
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_weights_norm(moe.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_nextn_predict_layers(0)


def _add_rope(writer: Any, gguf: Any, config: ModelConfig) -> None:
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_size)
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type == "llama3":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType[scaling.rope_type.upper()])
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.rope_type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings or config.max_position_embeddings)
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)


def _rope_factors(config: ModelConfig) -> np.ndarray[Any, Any] | None:
    """What llama.cpp divides the frequencies by, where it does not compute the scaling itself."""
    if config.rope_scaling is None or config.rope_scaling.rope_type != "llama3":
        return None
    plain = rope_frequencies(config.model_copy(update={"rope_scaling": None}))
    return (plain / rope_frequencies(config)).float().numpy()


def _tensors(config: ModelConfig, names: Any, dtype: GGUFDtype) -> Iterator[GGUFTensor]:
    with torch.device("meta"):
        weights = Z2all(config).state_dict()
    permutes = hf_model_type(config) == "llama"
    for ours, weight in weights.items():
        if not hf_names(ours, config):
            continue
        rows = config.vocab_size if ours in VOCABULARY_WEIGHTS and config.vocab_size else len(weight)
        shape = (rows, *weight.shape[1:])
        heads = None
        if permutes and ours.endswith("q_proj.weight"):
            heads = config.num_attention_heads
        elif permutes and ours.endswith("k_proj.weight"):
            heads = config.num_key_value_heads
        yield GGUFTensor(_gguf_name(ours, names), ours, shape, _tensor_dtype(ours, shape, dtype), heads)
    for name, shape in zero_tensors(config).items():
        ours = name.removeprefix("model.").replace(HF_EXPERT_BIAS, EXPERT_BIAS)
        yield GGUFTensor(_gguf_name(ours, names), None, shape, "f32")


def _gguf_name(ours: str, names: Any) -> str:
    if ours.endswith(EXPERT_BIAS):
        ours = f"{ours.removesuffix(EXPERT_BIAS)}.mlp.gate.e_score_correction.bias"
    name = names.get_name(ours if ours.startswith("lm_head") else f"model.{ours}", try_suffixes=(".weight", ".bias"))
    if name is None:
        raise UsageError(f"llama.cpp has no tensor for {ours}: export with --format hf")
    return str(name) if name.endswith((".weight", ".bias")) else f"{name}.weight"  # experts have no suffix here


def _tensor_dtype(name: str, shape: tuple[int, ...], dtype: GGUFDtype) -> GGUFDtype:
    if len(shape) == 1 or name.endswith("mlp.gate.weight"):
        return "f32"  # small, and a near tie between experts must not turn on rounding
    if dtype.startswith("q") and shape[-1] % BLOCK:
        return "f16"
    return "q8_0" if dtype == "q4_0" and name in VOCABULARY_WEIGHTS else dtype  # the most sensitive matrices


def _announce(writer: Any, gguf: Any, tensor: GGUFTensor) -> None:
    if tensor.dtype in ("f32", "f16"):
        kind = np.dtype(np.float32 if tensor.dtype == "f32" else np.float16)
        writer.add_tensor_info(tensor.name, tensor.shape, kind, math.prod(tensor.shape) * kind.itemsize)
        return
    quantization = gguf.GGMLQuantizationType[tensor.dtype.upper()]
    shape = gguf.quant_shape_to_byte_shape(tensor.shape, quantization)
    writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), math.prod(shape), quantization)


def _encode(gguf: Any, values: np.ndarray[Any, Any], dtype: GGUFDtype) -> np.ndarray[Any, Any]:
    encoded: np.ndarray[Any, Any] = gguf.quantize(values, gguf.GGMLQuantizationType[dtype.upper()])
    return encoded


def _interleave(weight: Tensor, heads: int) -> Tensor:
    """The rows of a head as llama.cpp's Llama rotates them: neighbours are a pair, where ours are half a head apart."""
    return weight.view(heads, 2, len(weight) // heads // 2, -1).transpose(1, 2).reshape(weight.shape)
