from __future__ import annotations

import torch

from zero2all.model import Z2all
from zero2all.recipe import ModelConfig

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 320,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def make(seed: int = 0, **changes: object) -> Z2all:
    """A small model with wide weights and real biases and norms, so that a mistake in any shows in the logits."""
    model = Z2all(ModelConfig.model_validate({**SMALL, **changes})).init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, bias in model.named_buffers():
            if name.endswith(".mlp.bias"):
                bias.add_(torch.randn(bias.shape, generator=generator) * 0.1)
    return model.eval()


def some_tokens(rows: int = 2, length: int = 40, seed: int = 1, below: int = 320) -> torch.Tensor:
    return torch.randint(0, below, (rows, length), generator=torch.Generator().manual_seed(seed))
