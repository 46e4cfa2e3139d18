"""Model shapes by size.

``z2all-…``: names count parameters without the embedding tables; the reference 1.1b counts one of its two. Rules behind
the numbers: head size 64, at most 4 query heads a KV head, intermediate near 8/3 of hidden and a multiple of 64, depth
growing with width. The others have the shape of a published model, and its name counts all parameters.
"""

from __future__ import annotations

from typing import Any


def _shape(
    hidden_size: int, intermediate_size: int, layers: int, heads: int, kv_heads: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        **more,
    }


_QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}

PRESETS: dict[str, dict[str, Any]] = {
    "z2all-3m": _shape(192, 512, 7, 3, 1, 512, tie_word_embeddings=True),
    "z2all-10m": _shape(320, 896, 9, 5, 5, 1024, tie_word_embeddings=True),
    "z2all-25m": _shape(512, 1408, 8, 8, 4, 1024, tie_word_embeddings=True),
    "z2all-85m": _shape(768, 2048, 13, 12, 4, 2048, tie_word_embeddings=True),
    "z2all-300m": _shape(1024, 2816, 26, 16, 4, 2048),
    # The reference shape. With its 64,320-row embedding and untied head it has 1,255,499,776 parameters.
    "z2all-1.1b": _shape(2048, 5632, 22, 32, 8, 2048, vocab_size=64320, rope_theta=10000.0),
    "7b": _shape(4096, 11008, 32, 32, 32, 4096, vocab_size=32000),  # Llama 2 7B
    "13b": _shape(5120, 13824, 40, 40, 40, 4096, vocab_size=32000),  # Llama 2 13B
    "30b": _shape(6656, 17920, 60, 52, 52, 2048, vocab_size=32000),  # LLaMA 33B
    "70b": _shape(8192, 28672, 80, 64, 8, 4096, vocab_size=32000),  # Llama 2 70B
    # Qwen3-30B-A3B at the context of its first pretraining stages; 3.3B parameters are active.
    "30b-a3b": _shape(2048, 6144, 48, 32, 4, 4096, vocab_size=151936, head_dim=128, qk_norm=True, moe=_QWEN3_EXPERTS),
}
"""Fields of ``model`` by the name of the preset."""
SHAPE_FIELDS = {name for preset, shape in PRESETS.items() if preset.startswith("z2all-") for name in shape}
"""Fields that every preset replaces; others, such as ``moe``, only one that sets them."""
