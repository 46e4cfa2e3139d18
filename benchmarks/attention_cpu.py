"""Forms of causal attention on a CPU, forward and backward, by length: what ``model.ops.attention=sdpa`` chooses from.

    python -m benchmarks attention_cpu                              # fp32 and bf16, 64 to 1024 tokens, one thread

Contenders: torch's kernel as it is (sdpa), what the model uses (ours), and plain matrix products in the type of the
inputs that keep all scores (plain). They take turns; a time is the fastest of ``--rounds``, in CPU seconds of one
thread, so that other work on the machine is not in it. The model's choice depends on shape and type alone, never on a
time that it measured itself: a resumed run must compute the same.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

import torch
from benchmarks.common import benchmark_parser, show_json, take_turns
from torch import Tensor
from torch.nn import functional as F

from zero2all.model.ops.attention import SdpaMask, attend_sdpa

TOKENS = 2048
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads that share keys are rows of one product."""
    batch, heads, length, size = q.shape
    rows = q.reshape(batch, k.shape[1], -1, size)
    scores = (rows @ k.mT).view(batch, heads, length, length) * size**-0.5 + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    out: Tensor = weights.view(batch, k.shape[1], -1, length) @ v
    return out.view(q.shape)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend_sdpa(q, k, v, SdpaMask())


def seconds(attend: Attend, inputs: list[Tensor], grad: Tensor) -> tuple[float, float]:
    begin = time.process_time()
    out = attend(*inputs)
    middle = time.process_time()
    torch.autograd.grad(out, inputs, grad)
    return middle - begin, time.process_time() - middle


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for length in options.lengths:
            shapes = [
                (TOKENS // length, length, heads, options.head_size) for heads in (options.heads, options.kv_heads)
            ]
            made = [torch.randn(shapes[number], dtype=dtype).transpose(1, 2) for number in (0, 1, 1, 0)]
            inputs, grad = [tensor.requires_grad_() for tensor in made[:3]], made[3]
            mask = torch.full((length, length), -math.inf, dtype=dtype).triu(1)
            contenders: dict[str, Attend] = {"sdpa": sdpa, "ours": ours, "plain": functools.partial(plain, mask)}
            times = take_turns(
                {name: functools.partial(seconds, attend, inputs, grad) for name, attend in contenders.items()},
                options.rounds,
            )
            best = {name: map(min, zip(*found, strict=True)) for name, found in times.items()}
            milliseconds = {name: [round(1000 * value, 1) for value in both] for name, both in best.items()}
            row = {"dtype": str(dtype), "length": length, "forward and backward, ms": milliseconds}
            show_json(row)
