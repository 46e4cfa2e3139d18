"""Speed, memory and parity of the encoding backends, on your tokenizer and text.

    python -m benchmarks tokenizer_encode speed  TOKENIZER zh=zh.jsonl en=en.jsonl code=code.jsonl
    python -m benchmarks tokenizer_encode memory TOKENIZER zh=raw/zh --mb 500 --engines gigatoken
    python -m benchmarks tokenizer_encode build  TOKENIZER zh=raw/zh en=raw/en code=raw/code
    python -m benchmarks tokenizer_encode alike  TOKENIZER all=raw

``speed``: each backend through our interface and bare, alternating in one process. ``memory``: one process encodes text
with ever new words, through our interface and then, in another process, bare. ``build``: ``z2a tokens build`` against
the bare backend on the same documents. ``alike``: every line of the text, and random byte strings, on every backend:
same ids, and an exact round trip. A path is anything that ``z2a corpus build`` reads. Prints one JSON object;
MB are 10^6 bytes of UTF-8.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import benchmark_parser, median_ratio, show_json, take_turns

from zero2all.base.tasks import available_cores
from zero2all.corpus import build_corpus
from zero2all.corpus.ingest import document_texts
from zero2all.recipe import CorpusRecipe, SourceRecipe, TokensRecipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.backends import BackendName
from zero2all.tokens import build_tokens
from zero2all.tokens.build_store import cached_tokenizer, load_tokenizer

BACKENDS: tuple[BackendName, ...] = ("gigatoken", "tiktoken", "hf")
BATCH = 256  # documents, as in tokens build
Encode = Callable[[list[str]], Any]


def bare(name: str, tokenizer: Tokenizer) -> Encode:
    """The backend's own fastest call, as in its documentation."""
    vocabulary = tokenizer.vocabulary
    if name == "gigatoken":
        import gigatoken

        return gigatoken.Tokenizer.from_json(vocabulary.json).encode_batch
    if name == "tiktoken":
        import tiktoken

        encoding = tiktoken.Encoding(
            "bare", pat_str=vocabulary.pattern, mergeable_ranks=vocabulary.ranks, special_tokens={}
        )
        return lambda texts: encoding.encode_ordinary_batch(texts, num_threads=available_cores())
    import tokenizers

    reference = tokenizers.Tokenizer.from_str(vocabulary.json)
    return lambda texts: [one.ids for one in reference.encode_batch_fast(texts, add_special_tokens=False)]


def in_batches(encode: Encode, texts: Sequence[str]) -> None:
    for start in range(0, len(texts), BATCH):
        encode(list(texts[start : start + BATCH]))


def seconds(work: Callable[..., Any], *given: Any) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work(*given)
    return time.perf_counter() - wall, time.process_time() - cpu


def megabytes(texts: Sequence[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def up_to(texts: Iterator[str], limit: float) -> list[str]:
    size, taken = 0.0, []
    for text in texts:
        taken.append(text)
        size += len(text.encode()) / 1e6
        if size >= limit:
            break
    return taken


def speed(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for domain, path in options.text.items():
        texts = up_to(document_texts([path]), options.mb)
        size = megabytes(texts)
        results[domain] = {"mb": round(size, 2)}
        for name in options.engines:
            tokenizer = Tokenizer(options.tokenizer, backend=name)
            sides = {"ours": tokenizer.encode_batch, "bare": bare(name, tokenizer)}
            for encode in sides.values():
                in_batches(encode, texts[:BATCH])  # made and checked before the clock runs
            turns = {side: partial(seconds, in_batches, encode, texts) for side, encode in sides.items()}
            results[domain][name] = speeds(size, take_turns(turns, options.rounds, alternate=True))
    return results


def speeds(size: float, taken: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Of the best turn of each side: MB per second, and per CPU-second, which other work changes less.

    The ratio is the median over rounds: the two turns of a round meet the same machine, the best ones may not.
    """
    wall = {side: min(wall for wall, _ in turns) for side, turns in taken.items()}
    cpu = {side: min(cpu for _, cpu in turns) for side, turns in taken.items()}
    ratio = median_ratio((cpu for _, cpu in taken["bare"]), (cpu for _, cpu in taken["ours"]))
    return {
        **{f"{side}_mb_s": round(size / wall[side], 1) for side in taken},
        **{f"{side}_mb_cpu_s": round(size / cpu[side], 1) for side in taken},
        "ours_to_bare": round(ratio, 3),
    }


def new_words(texts: list[str], limit: float) -> Iterator[list[str]]:
    """The text again and again, each time with 8% of its Han characters exchanged for others of the same batch."""
    done = 0.0
    for turn in itertools.count():
        for first in range(0, len(texts), BATCH):
            batch = texts[first : first + BATCH]
            flat = np.frombuffer("".join(batch).encode("utf-32-le"), np.uint32).copy()
            han = np.flatnonzero((flat >= 0x4E00) & (flat <= 0x9FFF))
            if turn and len(han):
                rng = np.random.default_rng([turn, first])
                places = han[rng.random(len(han)) < 0.08]
                flat[places] = flat[rng.choice(han, len(places))]
            text, bounds = flat.tobytes().decode("utf-32-le"), [0, *itertools.accumulate(map(len, batch))]
            yield (changed := [text[start:stop] for start, stop in itertools.pairwise(bounds)])
            done += megabytes(changed)
            if done >= limit:
                return


def resident() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) // 1000


def memory_of(side: str, name: str, directory: Path, path: str, limit: float, answers: Any) -> None:
    tokenizer = Tokenizer(directory, backend=name)  # type: ignore[arg-type]
    encode = tokenizer.encode_batch if side == "ours" else bare(name, tokenizer)
    texts = list(document_texts([path]))
    before, most, cpu, size = resident(), 0, 0.0, 0.0
    for batch in new_words(texts, limit):
        cpu += seconds(encode, batch)[1]
        size += megabytes(batch)
        most = max(most, resident())
    answers.put({"mb": round(size), "mb_cpu_s": round(size / cpu, 2), "rss_mb_before": before, "rss_mb_most": most})


def memory(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    context = multiprocessing.get_context("spawn")
    for (domain, path), name, side in itertools.product(options.text.items(), options.engines, ("ours", "bare")):
        answers = context.Queue()
        given = (side, name, options.tokenizer, path, options.mb, answers)
        process = context.Process(target=memory_of, args=given)
        process.start()
        results[f"{domain} {name} {side}"] = answers.get()
        process.join()
    return results


def build(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root:
        documents = Path(root) / "documents"
        sources = [SourceRecipe(name=name, paths=[path]) for name, path in options.text.items()]
        build_corpus(CorpusRecipe(sources=sources, holdout=0, filters=[]), documents)
        texts = list(document_texts([str(documents / "train")]))
        tokenizer = Tokenizer(options.tokenizer)
        size = megabytes(texts)
        taken: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": []}
        for number in range(options.rounds):
            encode = bare(tokenizer.backend.name, tokenizer)
            cached_tokenizer.cache_clear()
            _ = load_tokenizer(options.tokenizer).backend  # as new as the bare one, and ready
            taken["bare"].append(seconds(in_batches, encode, texts))
            out = Path(root) / f"tokens-{number}"
            taken["ours"].append(seconds(build_tokens, TokensRecipe(), documents, options.tokenizer, out))
    return {"engine": tokenizer.backend.name, "mb": round(size, 1), **speeds(size, taken)}


def alike(options: argparse.Namespace) -> dict[str, Any]:
    tokenizers = {name: Tokenizer(options.tokenizer, backend=name) for name in BACKENDS}
    reference, rng = tokenizers["hf"], random.Random(0)
    strings = [rng.randbytes(rng.randint(0, 200)) for _ in range(options.strings)]
    results: dict[str, Any] = {
        "byte strings": len(strings),
        "byte strings that did not come back": sum(
            reference.decode_bytes(reference.encode_bytes(data)) != data for data in strings
        ),
    }
    texts = itertools.chain(
        (data.decode("utf-8", "replace") for data in strings),
        (line for path in options.text.values() for text in document_texts([path]) for line in text.splitlines(True)),
    )
    counts = dict.fromkeys(("texts", "mb", "not back", *(f"differ: {name}" for name in BACKENDS[:2])), 0.0)
    while lines := list(itertools.islice(texts, 20_000)):
        encoded = {name: tokenizer.encode_batch(lines) for name, tokenizer in tokenizers.items()}
        counts["texts"] += len(lines)
        counts["mb"] += megabytes(lines)
        counts["not back"] += sum(
            reference.decode(ids.tolist()) != line for ids, line in zip(encoded["hf"], lines, strict=True)
        )
        for name in BACKENDS[:2]:
            pairs = zip(encoded[name], encoded["hf"], strict=True)
            counts[f"differ: {name}"] += sum(not np.array_equal(ours, theirs) for ours, theirs in pairs)
    return {**results, **{name: round(count) for name, count in counts.items()}}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("what", choices=["speed", "memory", "build", "alike"])
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("text", nargs="+", help="name=path")
    parser.add_argument("--mb", type=float, default=20.0, help="text of each domain for speed; to encode for memory")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side; speeds are of the best")
    parser.add_argument("--engines", nargs="+", default=list(BACKENDS), choices=BACKENDS, help="for speed, memory")
    parser.add_argument("--strings", type=int, default=100_000, help="random byte strings for alike")
    options = parser.parse_args()
    options.text = dict(given.split("=", 1) for given in options.text)
    work = {"speed": speed, "memory": memory, "build": build, "alike": alike}[options.what]
    show_json(work(options), indent=2)
