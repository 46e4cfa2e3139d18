from __future__ import annotations

import json
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from zero2all.cli.main import app


def z2a(*words: object) -> Result:
    return CliRunner().invoke(app, ["tokenizer", *map(str, words)])


def test_a_tokenizer_is_measured_shown_extended_and_exported(workspace: Path, tmp_path: Path) -> None:
    tokenizer, raw = workspace / "tokenizer", workspace / "raw"
    bigger = tmp_path / "bigger"
    made = z2a("extend", tokenizer, "--text", raw / "en.jsonl", "--add", 80, "--out", bigger, "--json")
    assert made.exit_code == 0, made.stderr
    assert 0 < json.loads(made.stdout)["learned"] <= 80

    texts = ["--text", f"en={raw / 'en.jsonl'}", "--text", f"zh={raw / 'zh'}"]
    measured = z2a("eval", tokenizer, bigger, *texts, "--svg", tmp_path / "fit.svg")
    assert measured.exit_code == 0, measured.stderr
    assert "| en: bytes per token" in measured.stdout
    assert (tmp_path / "fit.svg").read_text().startswith("<svg")
    data = json.loads(z2a("eval", tokenizer, bigger, *texts, "--json").stdout)["tokenizers"]
    english = [data[name]["domains"]["en"]["bytes_per_token"] for name in ("tokenizer", "bigger")]
    assert english[1] > english[0]

    shown = z2a("inspect", tokenizer, "the 春", "--html", tmp_path / "cut.html")
    assert shown.stdout.endswith("bytes per token\n")
    assert "<span" in (tmp_path / "cut.html").read_text()
    exported = z2a("export", bigger, "--tiktoken", tmp_path / "a.tiktoken", "--json")
    assert json.loads(exported.stdout)["tokens"] == len((tmp_path / "a.tiktoken").read_text().splitlines())


def test_wrong_usage_of_tokenizer_commands_says_what_to_do(workspace: Path, tmp_path: Path) -> None:
    unnamed = z2a("eval", workspace / "tokenizer", "--text", "some.txt")
    assert unnamed.exit_code == 2
    assert "--text zh=some.txt" in unnamed.stderr
    assert z2a("inspect", workspace / "tokenizer").exit_code == 2
    assert "z2a tokenizer train" in z2a("inspect", tmp_path, "a").stderr
