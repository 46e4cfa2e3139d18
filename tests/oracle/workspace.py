"""What every cell of the table trains on: records, models in transformers' format, token stores of all templates."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.oracle.templates import VOCAB_SIZE, WORDS, Template
from zero2all.corpus import build_corpus
from zero2all.recipe import Recipe, parse_recipe
from zero2all.tokenizer.import_export import import_tokenizer
from zero2all.tokens import build_tokens

SEQ_LEN = 192  # of every row: several conversations of most templates
ROWS = 4  # of a step: PP 2 needs four micro-batches
Messages = list[dict[str, str]]

RECIPE = f"""
name: oracle
seed: 3
corpus: {{holdout: 0.0, filters: []}}
model: {{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
  max_position_embeddings: {SEQ_LEN}}}
train:
  steps: 1
  seq_len: {SEQ_LEN}
  batch_tokens: {ROWS * SEQ_LEN}
  micro_batch_tokens: {SEQ_LEN}
  document_mask: true
  precision: fp32
  device: cpu
  optimizer: {{name: sgd, lr: 0.5, momentum: 0.0, weight_decay: 0.0}}
  schedule: {{shape: constant, warmup: 0 steps}}
checkpoint: {{every: 100 steps, flash_every: null}}
track: {{layer_norms_every: null}}
"""


@dataclass(frozen=True)
class Records:
    """Of each kind of source."""

    texts: list[str]
    chats: list[Messages]
    pairs: list[tuple[Messages, str, str]]
    """Prompt, chosen and rejected answer."""
    ratings: list[tuple[Messages, str, bool]]

    def write(self, directory: Path) -> list[dict[str, Any]]:
        """As files of a user; the sources of a recipe."""
        lines: dict[str, list[dict[str, Any]]] = {
            "text": [{"text": text} for text in self.texts],
            "chat": [{"messages": messages} for messages in self.chats],
            "preference": [
                {"prompt": prompt, "chosen": [answer(chosen)], "rejected": [answer(rejected)]}
                for prompt, chosen, rejected in self.pairs
            ],
            "rating": [
                {"prompt": prompt, "completion": [answer(text)], "label": label} for prompt, text, label in self.ratings
            ],
        }
        directory.mkdir(parents=True)
        sources = []
        for kind, records in lines.items():
            path = directory / f"{kind}.jsonl"
            path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records), "utf-8")
            sources.append({"name": kind, "kind": kind, "paths": [str(path)]})
        return sources


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def make_records(seed: int = 5) -> Records:
    """Conversations of one to three turns, with and without a system message; no two are the same."""
    rng, numbers = random.Random(seed), iter(range(10_000))

    def words(most: int) -> str:
        return " ".join([*rng.choices(WORDS.split(), k=rng.randint(1, most)), str(next(numbers))])

    def prompt(most_turns: int) -> Messages:
        messages = [{"role": "system", "content": words(2)}] if rng.random() < 0.3 else []
        for _ in range(rng.randint(1, most_turns) - 1):
            messages += [{"role": "user", "content": words(3)}, answer(words(3))]
        return [*messages, {"role": "user", "content": words(4)}]

    return Records(
        texts=[words(30) for _ in range(16)],
        chats=[[*prompt(3), answer(words(5))] for _ in range(16)],
        pairs=[(prompt(2), words(3), words(5)) for _ in range(8)],
        ratings=[(prompt(2), words(4), number % 3 != 0) for number in range(8)],
    )


def write_model(directory: Path, seed: int) -> Path:
    """Random weights, large enough that every position changes the predictions at all later ones."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = parse_recipe(RECIPE).model
    config = LlamaConfig(
        hidden_size=model.hidden_size, intermediate_size=model.intermediate_size, vocab_size=VOCAB_SIZE,
        num_hidden_layers=model.num_hidden_layers, num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads, max_position_embeddings=SEQ_LEN, tie_word_embeddings=False,
        rms_norm_eps=model.rms_norm_eps, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


class Workspace:
    """The records, two models, and for each template a tokenizer and its tokens, by the stages of the product."""

    def __init__(self, root: Path) -> None:
        self.root, self.records = root, make_records()
        self._sources = self.records.write(root / "raw")
        self.model, self.teacher = write_model(root / "model", seed=1), write_model(root / "teacher", seed=2)
        recipe = self.recipe("none", root)
        build_corpus(recipe.corpus, recipe.documents_dir)

    def add(self, template: Template) -> None:
        """Import the tokenizer and tokenize, unless that is done."""
        recipe = self.recipe(template.name, self.root)
        if recipe.tokens_dir.exists():
            return
        published = template.write(self.root / "published" / _slug(template.name))
        template.write(self.original(template.name), with_tags=True)
        import_tokenizer(published, recipe.tokenizer_dir)
        build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)

    def original(self, template: str) -> Path:
        """The tokenizer as a published model has it, with generation tags for transformers."""
        return self.root / "original" / _slug(template)

    def recipe(self, template: str, out: Path, *overrides: str) -> Recipe:
        directory = self.root / _slug(template)
        return parse_recipe(RECIPE, [
            f"corpus.sources={json.dumps(self._sources)}", f"corpus.dir={self.root}/documents",
            f"tokenizer.dir={directory}/tokenizer", f"tokens.dir={directory}/tokens", f"out={out}", *overrides,
        ])  # fmt: skip


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-")
