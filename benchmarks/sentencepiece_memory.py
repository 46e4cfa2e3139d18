"""Peak memory of the trainer ``sentencepiece`` by the size of its text, with a line fitted: a fixed part and a slope.

    python benchmarks/sentencepiece_memory.py corpus/zh/*.jsonl --sizes 5 20 --algorithm bpe

Each size is trained in a process of its own; its memory before training is subtracted.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import sentencepiece

from zero2all.tokenizer.train_sentencepiece import TRAINER_OPTIONS, split_lines


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
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines(paths, int(megabytes * 1e6)), model_writer=io.BytesIO(), model_type=algorithm,
        vocab_size=8192, **TRAINER_OPTIONS,
    )  # fmt: skip
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--sizes", type=float, nargs="+", default=[5.0, 10.0, 20.0], help="MB of text")
    parser.add_argument("--algorithm", default="bpe")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if missing := [str(path) for path in options.text if not path.is_file()]:
        parser.error(f"no file at {', '.join(missing)}")
    if options.child:
        sys.stdout.write(f"{train_once(options.text, options.sizes[0], options.algorithm)}\n")
        return
    peaks = []
    for size in options.sizes:
        words = [sys.executable, __file__, *map(str, options.text), "--child", "--algorithm", options.algorithm]
        done = subprocess.run([*words, "--sizes", str(size)], capture_output=True, text=True, check=True)
        peaks.append(float(done.stdout.split()[-1]))
        sys.stdout.write(f"{size:g} MB of text: {peaks[-1]:.0f} MB, {peaks[-1] / size:.1f} bytes for each byte\n")
    if len(peaks) > 1:
        slope, fixed = np.polyfit(options.sizes, peaks, 1)
        sys.stdout.write(f"{options.algorithm}: {fixed:.0f} MB and {slope:.1f} bytes for each byte of text\n")


if __name__ == "__main__":
    main()
