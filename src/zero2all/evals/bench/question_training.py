"""Train on questions without their answers: a model that has seen the answers recalls them afterwards.

A model that has not cannot learn them from the questions, so its accuracy stays where it was.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from zero2all.console import progress
from zero2all.evals.bench.evaluate import choice_queries
from zero2all.evals.bench.items import Form
from zero2all.evals.bench.tasks import Task
from zero2all.evals.target import EvalTarget
from zero2all.model import IGNORE_INDEX, Z2all

LEARNING_RATE = 1e-4  # a tenth of what a small model is pretrained with, so that little is forgotten
BATCH_SIZE = 16
PASSES = 2  # over the questions


def train_on_questions(target: EvalTarget, task: Task, form: Form, seed: int = 0) -> EvalTarget:
    """The target with a copy of its model, trained on the questions and options of a task, never on an answer."""
    tokenizer, limit = target.tokenizer, target.model.config.max_position_embeddings
    contexts = [query.context for query in choice_queries(task, task.choice_items, form, shots=0)]
    texts = [[tokenizer.eos_token_id, *tokenizer.encode(context)][-limit:] for context in contexts]
    model = deepcopy(target.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    with progress("training on questions without answers", PASSES * len(texts)) as advance:
        for batch in _batches(texts, seed):
            _step(model, optimizer, batch)
            advance(len(batch))
    return replace(target, model=model.eval())


def _batches(texts: Sequence[list[int]], seed: int) -> Iterator[list[list[int]]]:
    rng = random.Random(seed)
    for _ in range(PASSES):
        order = list(texts)
        rng.shuffle(order)
        for start in range(0, len(order), BATCH_SIZE):
            yield order[start : start + BATCH_SIZE]


def _step(model: Z2all, optimizer: torch.optim.Optimizer, batch: list[list[int]]) -> None:
    tokens_BS, targets_BS = _pad(batch, model.rotary_2SE.device)
    losses = model(tokens_BS, targets_BS=targets_BS)
    (losses.sum() / (targets_BS != IGNORE_INDEX).sum()).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _pad(batch: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [B, S] each."""
    size = max(2, *(len(text) for text in batch)) - 1
    tokens_BS = torch.zeros(len(batch), size, dtype=torch.int64)
    targets_BS = torch.full((len(batch), size), IGNORE_INDEX)
    for row, text in enumerate(batch):
        tokens_BS[row, : len(text) - 1] = torch.tensor(text[:-1])
        targets_BS[row, : len(text) - 1] = torch.tensor(text[1:])
    return tokens_BS.to(device), targets_BS.to(device)
