"""Memory and time of the loss by form, forward and backward: 64k tokens in the vocabulary, 8,192 in the batch, fp32.

Each form runs in a process of its own, on one thread, and its memory is the peak above what was there before the call.

    python -m benchmarks loss_memory
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from functools import partial

import torch
from benchmarks.common import benchmark_parser, command, peak_bytes, read_child, show_json, take_turns

from zero2all.model.ops import OPS
from zero2all.model.ops.cross_entropy import HeadConfig


def current() -> int:
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * resource.getpagesize()


def measure(form: str, vocab: int, tokens: int, hidden: int, repeats: int, dtype: torch.dtype) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden, generator=generator) * 0.02).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    loss_of = OPS["cross_entropy"][form].load()
    (loss_of(x[:64], weight, targets[:64], HeadConfig(vocab)).sum() / tokens).backward()  # starts threads and kernels
    before, seconds = current(), []
    for _ in range(repeats):
        weight.grad = x.grad = None
        begin = time.process_time()
        (loss_of(x, weight, targets, HeadConfig(vocab)).sum() / tokens).backward()
        seconds.append(time.process_time() - begin)
    return {"cpu_seconds": statistics.median(seconds), "added_bytes": peak_bytes() - before}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--form", default="", help="measure only this one, in this process")
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    sizes = (options.vocab, options.tokens, options.hidden, options.repeats)
    if options.form:
        torch.set_num_threads(1)
        dtype = torch.bfloat16 if options.bf16 else torch.float32
        show_json(measure(options.form, *sizes, dtype))
        return
    forms = ("reference", "chunked", "torch")
    words = command("loss_memory", *sys.argv[1:])
    found = take_turns({form: partial(read_child, [*words, "--form", form]) for form in forms}, options.rounds)
    logits_and_gradient = 2 * 4 * options.vocab * options.tokens
    result = {}
    for form, runs in found.items():
        seconds = statistics.median(run["cpu_seconds"] for run in runs)
        added = statistics.median(run["added_bytes"] for run in runs)
        result[form] = {
            "cpu_seconds": round(seconds, 2),
            "added_mb": round(added / 1e6),
            "of_logits_and_gradient": round(added / logits_and_gradient, 3),
        }
    show_json(result, indent=2)
