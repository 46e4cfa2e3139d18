"""Export to a Hugging Face directory of a standard architecture, so that no consumer needs our code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from zero2all.io import write_json
from zero2all.model.z2all import Z2all
from zero2all.recipe import ModelConfig


def hf_config(config: ModelConfig, end_of_text: int | None = None, dtype: str = "float32") -> dict[str, Any]:
    """Llama, or Qwen3 where queries and keys are normed: the shape says which."""
    architecture = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
    if config.qk_norm:
        architecture = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "use_sliding_window": False,
        }
    return {
        **architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,  # read by older consumers
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
        },  # read by transformers 5
        "rms_norm_eps": config.norm_eps,
        "attention_bias": config.qkv_bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "dtype": dtype,
        "use_cache": True,
    }


def hf_weights(model: Z2all) -> dict[str, Tensor]:
    """Our weights under their Hugging Face names."""
    weights = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            if not model.config.tied:  # a tied head is the embedding, and is stored once
                weights[name] = tensor
        else:
            weights[f"model.{name}"] = tensor
    if model.config.qkv_bias:
        # These architectures switch the biases of q, k, v and o together; ours has none on o, which is a zero one.
        for layer in range(model.config.n_layers):
            weights[f"model.layers.{layer}.self_attn.o_proj.bias"] = torch.zeros(model.config.hidden_size)
    return weights


def export_hf(model: Z2all, out: Path, end_of_text: int | None = None, dtype: torch.dtype = torch.float32) -> None:
    """Write ``config.json``, ``generation_config.json`` and ``model.safetensors`` to an existing directory."""
    weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in hf_weights(model).items()}
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    write_json(out / "config.json", hf_config(model.config, end_of_text, str(dtype).removeprefix("torch.")))
    write_json(out / "generation_config.json", {"eos_token_id": end_of_text, "do_sample": False})
