"""What islands send of the difference of their weights: fp32, bf16, or int8 with a scale for each block of values."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zero2all.errors import Z2aError

ExchangeDtype = Literal["fp32", "bf16", "int8"]
BLOCK = 256  # values that share a scale: 1.6 % more bytes
MAX_CODE = 127
MIN_CODE = -128  # which no island of ours sends


def encoded_bytes(count: int, dtype: ExchangeDtype) -> int:
    """Of ``count`` values."""
    return {"fp32": 4 * count, "bf16": 2 * count, "int8": count + 4 * _blocks(count)}[dtype]


def encode(values: Tensor, dtype: ExchangeDtype) -> Tensor:
    """A flat fp32 tensor as bytes; an error if a value is not finite: nobody should average with it."""
    blocks = _in_blocks(values)
    low, high = torch.aminmax(blocks, dim=1)
    largest = torch.maximum(high.abs_(), low.abs_())  # not finite if a value of the block is not
    if not bool(torch.isfinite(largest).all()):
        raise Z2aError("the weights of this island have become infinite or not a number: they are not sent to others")
    if dtype == "fp32":
        return values.clone().view(torch.uint8)
    if dtype == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    scales = largest / MAX_CODE
    # Blocks of zeros have no scale. Division, not a product with the inverse: the largest value must not exceed 127.
    codes = (blocks / torch.where(scales > 0, scales, 1.0)[:, None]).round_().clamp_(-MAX_CODE, MAX_CODE)
    payload = codes.to(torch.int8).flatten()[: len(values)]
    return torch.cat([scales.view(torch.uint8), payload.view(torch.uint8)])


def decode(encoded: Tensor, count: int, dtype: ExchangeDtype) -> Tensor:
    """The same on every machine, bit by bit; an error if it is not what ``encode`` makes."""
    if len(encoded) != encoded_bytes(count, dtype):
        raise Z2aError(f"an island has sent {len(encoded)} bytes, which are not {count} values in {dtype}")
    if dtype == "int8":
        head = 4 * _blocks(count)
        scales, codes = encoded[:head].clone().view(torch.float32), encoded[head:].view(torch.int8)
        blocks = torch.zeros(_blocks(count) * BLOCK)
        blocks[:count] = codes
        blocks.view(-1, BLOCK).mul_(scales[:, None])
        values, checked = blocks[:count], scales * -MIN_CODE
    else:
        values = encoded.clone().view(torch.float32 if dtype == "fp32" else torch.bfloat16).to(torch.float32)
        checked = values
    if not bool(torch.isfinite(checked).all()):
        raise Z2aError("an island has sent values that are not finite")
    return values


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _in_blocks(values: Tensor) -> Tensor:
    missing = _blocks(len(values)) * BLOCK - len(values)
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)
