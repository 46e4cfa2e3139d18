"""Model shapes by size. Names count parameters without the embedding tables; the reference 1.1b counts one of its two.

Rules behind the numbers: head size 64, at most 4 query heads a KV head, intermediate
near 8/3 of hidden and a multiple of 64, depth growing with width.
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


PRESETS: dict[str, dict[str, Any]] = {
    "z2all-3m": _shape(192, 512, 7, 3, 1, 512, tie_word_embeddings=True),
    "z2all-10m": _shape(320, 896, 9, 5, 5, 1024, tie_word_embeddings=True),
    "z2all-25m": _shape(512, 1408, 8, 8, 4, 1024, tie_word_embeddings=True),
    "z2all-85m": _shape(768, 2048, 13, 12, 4, 2048, tie_word_embeddings=True),
    "z2all-300m": _shape(1024, 2816, 26, 16, 4, 2048),
    # The reference shape. With its 64,320-row embedding and untied head it has 1,255,499,776 parameters.
    "z2all-1.1b": _shape(2048, 5632, 22, 32, 8, 2048, vocab_size=64320, rope_theta=10000.0),
}
"""Fields of ``model`` by the name of the preset."""
