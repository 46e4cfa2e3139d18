"""Architectures that other engines read, by the name that transformers has for them."""

from __future__ import annotations

from typing import Any

from tests.model.helpers import EXPERTS

GLM = {**EXPERTS, "scoring_func": "sigmoid", "load_balancing": "bias", "n_shared_experts": 1}
GLM_DENSE_LAYER = {**GLM, "first_k_dense_replace": 1, "n_shared_experts": 2, "norm_topk_prob": False}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama, yarn": {"rope_scaling": YARN},
    "llama, llama3 rope": {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    },
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "tie_word_embeddings": True},
    "qwen3-moe": {"qk_norm": True, "moe": EXPERTS},
    "glm4-moe": {"moe": GLM},
    "glm4-moe, tied, balanced by a loss": {"tie_word_embeddings": True, "moe": {**GLM, "load_balancing": "aux"}},
    "glm4-moe, qk-norm, bias, dense layer": {"qk_norm": True, "qkv_bias": True, "moe": GLM_DENSE_LAYER},
}
