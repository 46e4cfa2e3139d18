"""What the examples share: ``--out``, generated text, and a recipe that trains on a CPU in seconds."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from zero2all.corpus import build_corpus
from zero2all.recipe import parse_recipe, recipe_yaml
from zero2all.tokenizer import train_tokenizer
from zero2all.tokens import build_tokens

RECIPE = """
name: tiny
seed: 11
corpus: {holdout: 0.1, filters: []}
tokenizer: {vocab_size: 512, min_frequency: 1}
model: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
  num_key_value_heads: 2, max_position_embeddings: 64}
train:
  steps: 20
  seq_len: 64
  batch_tokens: 512
  mixture: {en: 2, zh: 1}
  precision: fp32
  device: cpu
  optimizer: {lr: 5e-3}
  schedule: {shape: constant, warmup: 5 steps}
checkpoint: {every: 10 steps, flash_every: null}  # no checkpoints in /dev/shm
track: {log_every: 10}
"""
ENGLISH = (
    "{} walked to the {} and bought {} apples.",
    ("Anna", "Ben", "Clara", "David", "Emma"),
    ("market", "harbour", "village", "station", "farm"),
)
CHINESE = ("{}去{}买了{}个苹果。", ("小明", "小红", "阿强", "老王", "李雷"), ("市场", "码头", "村里", "车站", "农场"))


def argument_parser(description: str) -> argparse.ArgumentParser:
    """A parser with ``--out``: a new or empty directory, so that an example overwrites nothing."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=_new_directory, required=True, metavar="DIR", help="a new or empty directory")
    return parser


def _new_directory(name: str) -> Path:
    path = Path(name)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise argparse.ArgumentTypeError(f"{name} exists and is not an empty directory")
    path.mkdir(parents=True, exist_ok=True)
    return path.absolute()


def prepare(out: Path) -> Path:
    """Write text to ``out/raw``, build documents, tokenizer and tokens below ``out``; return the path of the recipe.

    The recipe names these directories, so that several runs (``out=DIR``) can train on the same tokens.
    """
    names = {"en": ENGLISH, "zh": CHINESE}
    for name, (sentence, people, places) in names.items():
        _write_stories(out / "raw" / f"{name}.jsonl", sentence, people, places)
    sources = [{"name": name, "paths": [str(out / "raw" / f"{name}.jsonl")]} for name in names]
    directories = {"corpus.dir": "documents", "tokenizer.dir": "tokenizer", "tokens.dir": "tokens", "out": ""}
    # Values as JSON, which is valid YAML whatever a path contains.
    overrides = [f"{key}={json.dumps(str(out / directory))}" for key, directory in directories.items()]
    recipe = parse_recipe(RECIPE, [f"corpus.sources={json.dumps(sources)}", *overrides])
    build_corpus(recipe.corpus, recipe.documents_dir)
    train_tokenizer(recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    path = out / "recipe.yaml"
    path.write_text(recipe_yaml(recipe), encoding="utf-8")
    return path


def _write_stories(path: Path, sentence: str, people: tuple[str, ...], places: tuple[str, ...]) -> None:
    rng = random.Random(7)
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", encoding="utf-8") as stream:
        for number in range(120):
            facts = [(rng.choice(people), rng.choice(places), rng.randint(2, 999)) for _ in range(rng.randint(4, 12))]
            text = " ".join(sentence.format(*fact) for fact in facts)
            stream.write(json.dumps({"title": f"story {number}", "text": text}, ensure_ascii=False) + "\n")
