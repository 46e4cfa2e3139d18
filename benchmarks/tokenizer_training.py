"""Our tokenizer training beside that of Hugging Face and sentencepiece, on the same documents.

    pip install sentencepiece
    python -m benchmarks tokenizer_training --documents runs/mine/documents --megabytes 100 --vocabulary 32768 \\
        --valid zh=valid/zh.jsonl --valid en=valid/en.jsonl --valid code=valid/code.jsonl --work /tmp/compare

Each trainer runs in a process of its own, one after the other; metrics are its CPU-seconds and its peak resident
memory. ``ours-exact`` has max_han_run and sampling off, and its merges are compared one by one with those of ``hf``.
Bytes per token are measured on the validation files (JSONL with a field text or content, or plain text).
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
from benchmarks.common import benchmark_parser, command, peak_bytes, read_child, show_json
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from zero2all.base.io import read_json
from zero2all.recipe import TokenizerRecipe
from zero2all.tokenizer import train_tokenizer
from zero2all.tokenizer.vocabulary import PATTERNS, SPECIAL_TOKENS
from zero2all.tokenizer.word_count import select_documents

UNLIMITED = 1 << 40  # of memory: no sampling


def sample(documents: Path, size: int) -> Iterator[str]:
    """The documents that our trainer takes for a sample of this size."""
    sources = read_json(documents / "manifest.json")["splits"]["train"].values()
    share = min(1.0, size / sum(source["bytes"] for source in sources))
    for source in sources:
        for shard in source["shards"]:
            with pq.ParquetFile(documents / "train" / shard) as file:
                for batch in file.iter_batches(batch_size=256, columns=["gid", "content"]):
                    selected = select_documents(batch.column("gid"), share)
                    for text, is_selected in zip(batch.column("content").to_pylist(), selected, strict=True):
                        if is_selected:
                            yield text


def train_ours(documents: Path, out: Path, size: int, vocabulary: int, **options: int) -> None:
    train_tokenizer(TokenizerRecipe(vocab_size=vocabulary, train_bytes=size, **options), documents, out)


def train_hf(documents: Path, out: Path, size: int, vocabulary: int, pattern: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[pattern]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL_TOKENS), min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sample(documents, size), trainer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))


def train_sentencepiece(documents: Path, out: Path, size: int, vocabulary: int) -> None:
    import sentencepiece

    out.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in sample(documents, size) for line in text.split("\n") if line),
        model_prefix=str(out / "model"),
        vocab_size=vocabulary - len(SPECIAL_TOKENS),
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.9995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        max_sentence_length=1 << 20,
        minloglevel=2,
    )


TRAINERS: dict[str, Callable[[Path, Path, int, int], None]] = {
    "ours": train_ours,
    "ours-exact": partial(train_ours, max_han_run=0, max_memory=UNLIMITED),
    "hf": partial(train_hf, pattern="zh-en-code"),
    "hf-gpt2": partial(train_hf, pattern="gpt2"),
    "hf-qwen2": partial(train_hf, pattern="qwen2"),
    "sentencepiece": train_sentencepiece,
}


def encoder(directory: Path) -> Callable[[str], int]:
    """How many tokens a text has."""
    if (directory / "model.model").exists():
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(directory / "model.model"))
        # It knows no newline: one token for each is what byte fallback gives.
        return lambda text: sum(len(processor.encode(line)) for line in text.split("\n")) + text.count("\n")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def read_validation(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [text]
    records = [json.loads(line) for line in text.split("\n") if line]
    return [record.get("text") or record["content"] for record in records]


def merges(directory: Path) -> list[list[str]]:
    found: list[list[str]] = read_json(directory / "tokenizer.json")["model"]["merges"]
    return found


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--valid", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--one", choices=TRAINERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        start = time.perf_counter()
        TRAINERS[options.one](options.documents, options.work, int(options.megabytes * 1e6), options.vocabulary)
        used = resource.getrusage(resource.RUSAGE_SELF)
        metrics = {
            "cpu_s": round(used.ru_utime + used.ru_stime, 1),
            "wall_s": round(time.perf_counter() - start, 1),
            "peak_mib": round(peak_bytes() / 2**20),
        }
        show_json(metrics)
        return
    domains = {name: read_validation(Path(path)) for name, _, path in (entry.partition("=") for entry in options.valid)}
    for name in options.trainers:
        directory = options.work / name
        size = ("--documents", options.documents, "--megabytes", options.megabytes, "--vocabulary", options.vocabulary)
        ran = read_child(command("tokenizer_training", *size, "--work", directory, "--one", name))
        tokens = encoder(directory)
        metrics = {
            domain: round(sum(len(text.encode()) for text in texts) / sum(map(tokens, texts)), 4)
            for domain, texts in domains.items()
        }
        show_json({"trainer": name, **ran, **metrics})
    if {"ours-exact", "hf"} <= set(options.trainers):
        ours, theirs = merges(options.work / "ours-exact"), merges(options.work / "hf")
        same = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(theirs))
        show_json({"merges": [len(ours), len(theirs)], "equal_up_to": same})
