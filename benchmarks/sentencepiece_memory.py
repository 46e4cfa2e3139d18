"""Peak memory of the trainer ``sentencepiece`` by the size of its text, with a line fitted: a fixed part and a slope.

    python -m benchmarks sentencepiece_memory corpus/zh/*.jsonl --sizes 5 20 --algorithm bpe

Each size is trained in a process of its own; its memory before training is subtracted.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import sentencepiece
from benchmarks.common import benchmark_parser, command, peak_bytes, read_child, show

from zero2all.tokenizer.sentencepiece_vocabulary import TRAINER_OPTIONS, split_lines


def lines(paths: list[Path], limit: int) -> Iterator[str]:
    used = 0
    for path in paths:
        for record in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            text = json.loads(record) if path.suffix == ".jsonl" and record.strip() else record
            for line in split_lines(text if isinstance(text, str) else str(text.get("text") or text.get("content"))):
                used += len(line.encode())
                yield line
                if used >= limit:
                    return


def train_once(paths: list[Path], megabytes: float, algorithm: str) -> float:
    """MB of the peak over what the process had before."""
    before = peak_bytes()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines(paths, int(megabytes * 1e6)), model_writer=io.BytesIO(), model_type=algorithm,
        vocab_size=8192, **TRAINER_OPTIONS,
    )  # fmt: skip
    return (peak_bytes() - before) / 1e6


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--sizes", type=float, nargs="+", default=[5.0, 10.0, 20.0], help="MB of text")
    parser.add_argument("--algorithm", default="bpe")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if missing := [str(path) for path in options.text if not path.is_file()]:
        parser.error(f"no file at {', '.join(missing)}")
    if options.child:
        show(f"{train_once(options.text, options.sizes[0], options.algorithm)}")
        return
    peaks = []
    for size in options.sizes:
        words = command("sentencepiece_memory", *options.text, "--child", "--algorithm", options.algorithm)
        peaks.append(read_child([*words, "--sizes", str(size)]))
        show(f"{size:g} MB of text: {peaks[-1]:.0f} MB, {peaks[-1] / size:.1f} bytes for each byte")
    if len(peaks) > 1:
        slope, fixed = np.polyfit(options.sizes, peaks, 1)
        show(f"{options.algorithm}: {fixed:.0f} MB and {slope:.1f} bytes for each byte of text")
