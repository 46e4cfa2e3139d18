"""One contender of the benchmark trainer: ``litgpt pretrain`` on a Llama of the same shape, its data in memory.

It runs in a Python of its own, because litgpt wants its own versions of things:

    python3 -m venv litgpt && litgpt/bin/pip install torch==2.13.0 && litgpt/bin/pip install litgpt requests
    python -m benchmarks trainer RUN --peers --litgpt litgpt/bin/python

The shape comes as JSON on the command line; the last line of its output is tokens per second.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from litgpt.args import EvalArgs, LogArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.pretrain import setup
from torch.utils.data import DataLoader, Dataset

WARM = 3  # steps that are not counted, as in trainer.py


class Rows(Dataset[torch.Tensor]):
    """One row again and again, and the moment of each time that it was asked for."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.row, self.moments = torch.randint(0, vocabulary, (length,)), list[float]()

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, number: int) -> torch.Tensor:
        self.moments.append(time.perf_counter())
        return self.row


class InMemory(DataModule):
    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int = -1) -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=self.batch_size)


def main() -> None:
    shape = json.loads(sys.argv[1])
    config = Config(
        name="same-shape",
        block_size=shape["seq_len"],
        vocab_size=shape["vocab_size"],
        padded_vocab_size=shape["vocab_size"],
        n_layer=shape["num_hidden_layers"],
        n_head=shape["num_attention_heads"],
        n_query_groups=shape["num_key_value_heads"],
        n_embd=shape["hidden_size"],
        head_size=shape["head_dim"],
        intermediate_size=shape["intermediate_size"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    rows = Rows(shape["vocab_size"], shape["seq_len"] + 1)
    with tempfile.TemporaryDirectory() as out:
        setup(
            model_name="same-shape",
            model_config=config,
            out_dir=Path(out),
            precision="bf16-mixed" if shape["bf16"] else "32-true",
            data=InMemory(rows),
            train=TrainArgs(
                save_interval=None,
                log_interval=1_000_000,
                global_batch_size=shape["batch_samples"],
                micro_batch_size=shape["micro_batch_size"],
                max_tokens=shape["batch_samples"] * shape["seq_len"] * shape["steps"],
                max_norm=1.0,
            ),
            log=LogArgs(),
            eval=EvalArgs(interval=1_000_000, initial_validation=False, final_validation=False),
            optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "fused": True}},
            devices=1,
            logger_name="csv",
        )
    starts = rows.moments[:: shape["batch_samples"]]
    seconds = [after - before for before, after in pairwise(starts)][WARM:]
    print(json.dumps({"tokens_per_second": shape["batch_samples"] * shape["seq_len"] / median(seconds)}))  # noqa: T201


if __name__ == "__main__":
    main()
