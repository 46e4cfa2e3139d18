"""A small workspace: text, tokenizer, tokens and a recipe, built in seconds and identical every time."""

from __future__ import annotations

import json
import random
from pathlib import Path

from zero2all.base.tasks import TaskEngine
from zero2all.corpus import build_corpus
from zero2all.recipe import Recipe, parse_recipe
from zero2all.tokenizer import train_tokenizer
from zero2all.tokens import build_tokens

NUM_RANKS = 4
WORDS = "a long road begins with one small step and every step is seen once and only once by those who count them"
RECIPE = Path(__file__).with_name("recipe.yaml").read_text(encoding="utf-8")


def build_workspace(root: Path, seed: int) -> None:
    """Stages whose output is up to date are not run again."""
    rng = random.Random(seed)
    (root / "raw").mkdir(parents=True, exist_ok=True)
    with open(root / "raw" / "roads.jsonl", "w", encoding="utf-8") as stream:
        for number in range(200):
            text = " ".join(rng.choices(WORDS.split(), k=rng.randint(40, 90))) + "."
            stream.write(json.dumps({"id": number, "text": text}) + "\n")
    recipe, engine = workspace_recipe(root, root), TaskEngine()  # in this process
    build_corpus(recipe.corpus, recipe.documents_dir, engine)
    train_tokenizer(recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir, engine)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir, engine)


def workspace_recipe(root: Path, out: Path, *overrides: str) -> Recipe:
    directories = [f"corpus.dir={root}/documents", f"tokenizer.dir={root}/tokenizer", f"tokens.dir={root}/tokens"]
    sources = json.dumps([{"name": "roads", "paths": [f"{root}/raw/roads.jsonl"]}])
    return parse_recipe(RECIPE, [f"out={out}", f"corpus.sources={sources}", *directories, *overrides])
