from __future__ import annotations

import json
from pathlib import Path

from tests.cli.test_cli import z2a


def test_a_tokenizer_is_measured_shown_extended_and_exported(workspace: Path, tmp_path: Path) -> None:
    tokenizer, raw = workspace / "tokenizer", workspace / "raw"
    bigger = tmp_path / "bigger"
    made = z2a("tokenizer", "extend", tokenizer, "--text", raw / "en.jsonl", "--add", 80, "--out", bigger, "--json")
    assert made.returncode == 0, made.stderr
    assert 0 < json.loads(made.stdout)["learned"] <= 80

    texts = ["--text", f"en={raw / 'en.jsonl'}", "--text", f"zh={raw / 'zh'}"]
    measured = z2a("tokenizer", "eval", tokenizer, bigger, *texts, "--svg", tmp_path / "fit.svg")
    assert measured.returncode == 0, measured.stderr
    assert "| en: bytes per token" in measured.stdout
    assert (tmp_path / "fit.svg").read_text().startswith("<svg")
    data = json.loads(z2a("tokenizer", "eval", tokenizer, bigger, *texts, "--json").stdout)["tokenizers"]
    english = [data[name]["domains"]["en"]["bytes_per_token"] for name in ("tokenizer", "bigger")]
    assert english[1] > english[0]

    shown = z2a("tokenizer", "inspect", tokenizer, "the 春", "--html", tmp_path / "cut.html")
    assert shown.stdout.endswith("bytes per token\n")
    assert "<span" in (tmp_path / "cut.html").read_text()
    exported = z2a("tokenizer", "export", bigger, "--tiktoken", tmp_path / "a.tiktoken", "--json")
    assert json.loads(exported.stdout)["tokens"] == len((tmp_path / "a.tiktoken").read_text().splitlines())


def test_wrong_usage_of_tokenizer_commands_says_what_to_do(workspace: Path, tmp_path: Path) -> None:
    unnamed = z2a("tokenizer", "eval", workspace / "tokenizer", "--text", "some.txt")
    assert unnamed.returncode == 2
    assert "--text zh=some.txt" in unnamed.stderr
    assert z2a("tokenizer", "inspect", workspace / "tokenizer").returncode == 2
    assert "z2a tokenizer train" in z2a("tokenizer", "inspect", tmp_path, "a").stderr
