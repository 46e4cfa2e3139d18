"""Tables of rotary positions, plain and stretched for longer text, as transformers computes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zero2all.recipe import ModelConfig, RopeScaling


def rotary_table(config: ModelConfig, length: int, device: torch.device | None = None) -> Tensor:
    """cos and sin of the angles of positions [0, length), fp32 [2, length, head_size]."""
    frequencies, factor = _frequencies(config, length, device)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()]) * factor


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians that a position turns each pair of dimensions."""
    return _frequencies(config, config.max_position_embeddings, None)[0]


def depends_on_length(config: ModelConfig) -> bool:
    return config.rope_scaling is not None and config.rope_scaling.rope_type == "dynamic"


def _frequencies(config: ModelConfig, length: int, device: torch.device | None) -> tuple[Tensor, float]:
    """Radians a position turns each pair of dimensions, and what multiplies cos and sin."""
    theta, size, scaling = config.rope_theta, config.head_size, config.rope_scaling
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    if scaling is None:
        return 1.0 / theta**exponents, 1.0
    if scaling.rope_type == "linear":
        return 1.0 / theta**exponents / scaling.factor, 1.0
    original = scaling.original_max_position_embeddings or config.max_position_embeddings
    if scaling.rope_type == "dynamic":
        # Neural tangent kernel view: only as much as this length needs, mostly in the slow dimensions.
        stretch = scaling.factor * max(length, original) / original - (scaling.factor - 1)
        return 1.0 / (theta * stretch ** (size / (size - 2))) ** exponents, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(1.0 / theta**exponents, scaling, original), 1.0
    return _yarn(theta**exponents, scaling, original, theta)


def _llama3(frequencies: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    """Short wavelengths stay, long ones are stretched, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    blend = original / wavelengths - scaling.low_freq_factor
    blend = (blend / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(wide: Tensor, scaling: RopeScaling, original: int, theta: float) -> tuple[Tensor, float]:
    """https://arxiv.org/abs/2309.00071: the same blend by turns over the original context, and a cooler softmax."""
    size = 2 * len(wide)

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), size - 1)
    ramp = (torch.arange(len(wide), device=wide.device, dtype=torch.float32) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    return (1 / (scaling.factor * wide)) * ramp + (1 / wide) * (1 - ramp), scaling.attention_factor
