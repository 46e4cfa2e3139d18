"""Concurrent streams of ``z2a serve`` beside llama.cpp's server, with the same model, in turns.

    python -m benchmarks serve RUN [--streams 16] [--tokens 64] [--threads 2]

Both compute in f32 with as many slots as streams. Prints tokens per second over all streams and the time to the first
token (median and largest); needs the packages openai, gguf and xllamacpp.
"""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import torch
from benchmarks.common import benchmark_parser, show, take_turns
from openai import DefaultHttpxClient, OpenAI
from tests.generation.serve.servers import KEY, serve

from zero2all.base.charts.table import markdown_table
from zero2all.export import export_run
from zero2all.export.run_export import LlamaCpp
from zero2all.generation.serve.api_answers import ServedModel
from zero2all.generation.serve.engine import ServingEngine
from zero2all.train import Run

ROUNDS = 3


def measure(url: str, name: str, streams: int, tokens: int) -> tuple[float, float, float]:
    """Tokens a second, and the median and the largest time to the first token."""
    ready, counts, firsts = threading.Barrier(streams), [0] * streams, [0.0] * streams

    def ask(number: int) -> None:
        client = OpenAI(base_url=f"{url}/v1", api_key=KEY, http_client=DefaultHttpxClient(trust_env=False), timeout=600)
        ready.wait()
        begin = time.perf_counter()
        for part in client.completions.create(
            model=name, prompt=f"Story {number}: once upon a time", max_tokens=tokens, temperature=1.0, stream=True,
            stream_options={"include_usage": True}, seed=number, extra_body={"ignore_eos": True},
        ):  # fmt: skip
            firsts[number] = firsts[number] or time.perf_counter() - begin
            if part.usage is not None:
                counts[number] = part.usage.completion_tokens

    begin = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(ask, range(streams)))
    return sum(counts) / (time.perf_counter() - begin), median(firsts), max(firsts)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    run = Run.open(options.run)
    tokenizer = run.tokenizer()
    engine = ServingEngine(run.load_model(), tokenizer, options.streams, options.streams)
    with tempfile.TemporaryDirectory() as folder, serve(engine, ServedModel("m", tokenizer, None)) as server:
        export_run(run, Path(folder) / "gguf", format="gguf", dtype="f32", check=False)
        other = LlamaCpp(next((Path(folder) / "gguf").glob("*.gguf")), slots=options.streams)
        urls = {"zero2all": server.url, "llama.cpp": other.address}
        sides = {name: partial(measure, url, "m", options.streams, options.tokens) for name, url in urls.items()}
        found = take_turns(sides, ROUNDS, warm_up=1)
    rows = []
    for name, turns in found.items():
        speed, first, largest = map(median, zip(*turns, strict=True))
        rows.append((name, f"{speed:.0f}", f"{first:.2f} s", f"{largest:.2f} s"))
    show(markdown_table(("server", "tok/s of all streams", "first token, median", "largest"), rows))
