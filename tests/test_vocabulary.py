"""Retired names stay retired: in identifiers, help texts and messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
IDENTIFIERS = {
    "Spread", "Laid", "Sizes", "WholeFill", "Incoming", "cut_matrices", "cut_experts", "shard_parameters",
    "apply_checkpointing",
    "AfterNext", "even_load", "move_bias", "SdpaPlan", "AttentionForm", "narrower", "IGNORE",
    "Channels", "Spikes", "Keeper", "Team", "Beat", "Pulse", "leave_word", "Meeting",
    "Death", "Stuck",
    "Talk", "Plant", "Planted", "plants", "strike", "dice", "Scene", "build_world", "Cutting", "chop",
    "mend_mojibake", "reslog", "resplot", "figures", "starts_BS", "n_layers", "n_kv_heads",
    "expert_intermediate", "first_dense",
    "aux_weight", "bias_rate", "global_every", "original_context", "print_every", "least_loss", "least_norm",
}  # fmt: skip
ALLOWED = {"src/zero2all/tokenizer/word_count.py": {"chop"}}  # a field that is hashed under it
WORDS = re.compile(
    r"\b(mend(s|ed|ing)?|figures?|alike|anew|held[- ]out|go(es|ing)? on with|passed over|so many|for want of|"
    r"reslog|resplot|token after next|channels?)\b",
    re.IGNORECASE,
)


def sources(*folders: str, with_words: re.Pattern[str] | None = None) -> Iterator[tuple[str, ast.Module]]:
    """Those whose text has one of the words at all: parsing every file takes seconds."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if with_words is None or with_words.search(text):
                yield path.relative_to(ROOT).as_posix(), ast.parse(text)


def identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.arg, node.lineno
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2], 0


def test_no_retired_identifier_is_left() -> None:
    named = re.compile(rf"\b({'|'.join(map(re.escape, IDENTIFIERS))})\b")
    found = [
        f"{file}:{line}: {name}"
        for file, tree in sources("src", "tests", "benchmarks", "examples", with_words=named)
        for name, line in identifiers(tree)
        if name in IDENTIFIERS and name not in ALLOWED.get(file, set())
    ]
    assert not found, "\n".join(found)


def test_no_retired_word_is_left_in_help_messages_and_docstrings() -> None:
    found = []
    for file, tree in sources("src"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                found += [f"{file}:{node.lineno}: {match.group()}" for match in WORDS.finditer(node.value)]
    assert not found, "\n".join(found)
