"""The conventions of every command, tried through the installed program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import tiny_recipe, write_raw
from zero2all.base.errors import Z2aError, need
from zero2all.cli.main import PANELS, app
from zero2all.recipe import recipe_yaml

Z2A = Path(sys.executable).with_name("z2a")


# Steps of a second at most, for commands that train.
SMALL = [
    "tokenizer.vocab_size=512",
    "model={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}",
    "train.steps=120", "train.seq_len=32", "train.batch_tokens=256", "corpus.holdout=0.1", "corpus.filters=[]",
]  # fmt: skip


def z2a(*words: object, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **variables}
    return subprocess.run(
        [Z2A, *map(str, words)], capture_output=True, text=True, cwd=cwd, env=environment, timeout=240
    )


def every_group() -> Iterator[tuple[list[str], dict[str, typer.core.TyperCommand]]]:
    def walk(command: object, words: list[str]) -> Iterator[tuple[list[str], dict[str, typer.core.TyperCommand]]]:
        if children := getattr(command, "commands", None):
            yield words, children
            for name, child in children.items():
                yield from walk(child, [*words, name])

    return walk(typer.main.get_command(app), [])


def every_command() -> list[list[str]]:
    groups = [(words, name, one) for words, commands in every_group() for name, one in commands.items()]
    return [[*words, name] for words, name, one in groups if not hasattr(one, "commands")]


def test_every_summary_is_complete_in_the_help_of_its_group() -> None:
    for words, commands in every_group():
        shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).output
        for name, command in commands.items():
            summary = (command.help or "").split("\n")[0]
            assert len(summary) < 60, summary
            assert summary.endswith("."), summary
            assert re.search(rf"^  {name} +{re.escape(summary.removesuffix('.'))}\.?$", shown, re.MULTILINE), shown


def test_every_option_states_its_default() -> None:
    """In words, or by Typer, which prints values but neither None nor what is empty."""
    silent = [
        f"{' '.join([*words, name])} {option.opts[0]}"
        for words, commands in every_group()
        for name, command in commands.items()
        if not hasattr(command, "commands")
        for option in command.params
        if option.opts[0].startswith("--") and not option.required and option.default in (None, "", [], ())
        if "Default: " not in option.help and option.name not in ("help", "help_all")
    ]
    assert silent == []


def test_help_of_launch_fits_a_screen_and_the_rest_is_in_help_all() -> None:
    usual, full = (
        CliRunner().invoke(app, ["launch", flag], env={"COLUMNS": "80"}).output for flag in ("--help", "--help-all")
    )
    assert len(usual.splitlines()) <= 60
    assert "--numa-binding" not in usual
    launch = typer.main.get_command(app).commands["launch"]  # type: ignore[attr-defined]
    assert [option.opts[0] for option in launch.params if option.opts[0] not in full] == ["rank_command"]


def test_every_command_is_in_one_panel() -> None:
    names = [name for panel in PANELS.values() for name in panel]
    assert sorted(names) == sorted(set(names)) == sorted(next(every_group())[1])


def test_eval_names_its_command_when_given_a_run() -> None:
    done = CliRunner().invoke(app, ["eval", "runs/first", "--step", "4"])
    assert done.exit_code == 2
    assert "z2a eval loss runs/first --step 4" in done.output


def test_launch_takes_the_flags_of_torchrun_and_its_own() -> None:
    ours = ["--procs", "8", "--nodes", "2:4", "--rendezvous", "head:1", "--restarts", "2"]
    torchrun = ["--nproc-per-node", "8", "--nnodes", "2:4", "--rdzv-endpoint", "head:1", "--max-restarts", "2"]
    words = ["--emit", "slurm", "--", "train", "my.yaml"]
    scripts = [CliRunner().invoke(app, ["launch", *flags, *words]) for flags in (ours, torchrun)]
    assert scripts[0].exit_code == 0
    assert scripts[0].output == scripts[1].output
    assert "--max-restarts 2" in scripts[0].output


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_help_has_an_example(words: list[str]) -> None:
    shown = CliRunner().invoke(app, [*words, "--help"], terminal_width=200)
    assert shown.exit_code == 0
    assert f"Example: z2a {' '.join(words)}" in shown.stdout


def test_quickstart_from_messy_files_to_samples_and_every_command_after_it(tmp_path: Path) -> None:
    write_raw(tmp_path / "raw")
    (tmp_path / "raw" / "zh" / "book.mobi").write_bytes(b"BOOKMOBI\x00")
    out = tmp_path / "out"

    # In this process: a new one for each would import torch again.
    def run(*words: object) -> Result:
        return CliRunner().invoke(app, list(map(str, words)))

    done = run("quickstart", "--corpus", tmp_path / "raw/en.jsonl", tmp_path / "raw/zh", *SMALL, "--out", out, "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert "1 file (format .mobi: book.mobi)" in done.stderr
    assert len(result["samples"]) == 3
    assert result["below_unigram"] > 0.1  # an untrained model is above it
    assert set(result["sources"]) == {"en", "zh"}

    # Other text in the same place is refused before anything is touched.
    other = run("quickstart", "--corpus", tmp_path / "raw/code", *SMALL, "--out", out)
    assert other.exit_code == 2
    assert "another corpus" in other.stderr

    # Each stage again, alone: all of it is there already.
    for words in (["corpus", "build"], ["tokenizer", "train"], ["tokens", "build"]):
        stage = run(*words, out / "recipe.yaml", "--json")
        assert stage.exit_code == 0, stage.stderr
        assert json.loads(stage.stdout)["reused"] is True
    longer = run("quickstart", "--corpus", tmp_path / "raw/en.jsonl", tmp_path / "raw/zh", *SMALL, "train.steps=122",
                 "--out", out)  # fmt: skip
    assert longer.exit_code == 2
    assert f"for example: z2a train {out}/recipe.yaml --extend constant" in longer.stderr
    trained = run("train", out / "recipe.yaml", "--extend", "rewarm", "--json")
    assert json.loads(trained.stdout)["resumed_at"] == 120
    traced = json.loads(run("blame", out, "--step", 3, "--no-loss", "--json").stdout)
    assert {"gid", "source", "title"} <= set(traced["documents"][0])
    assert json.loads(run("eval", "loss", out, "--json").stdout)["bits_per_byte"] > 0
    spoken = run("chat", out, "--prompt", "the model", "max_tokens=10")
    assert spoken.stdout.startswith("the model")
    exported = json.loads(run("export", out, "--to", out / "hf", "--check", "--json").stdout)
    assert exported["max_difference"] <= 1e-4


@pytest.mark.long
def test_quickstart_on_one_book_in_an_odd_place(tmp_path: Path) -> None:
    """It is too short to take validation text from; a directory may be called like a date."""
    (tmp_path / "book: a story.txt").write_text(
        " ".join(f"{word} {n % 7}" for n, word in enumerate(["so", "it"] * 900))
    )
    done = z2a("quickstart", "--corpus", "book: a story.txt", *SMALL, "--out", "2026-02-01", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "bits_per_byte" not in result
    assert len(result["samples"]) == 1
    assert "no validation set" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"book: a story.txt", "2026-02-01"}
    # From another directory, by another name.
    (tmp_path / "2026-02-01").rename(tmp_path / "moved")
    assert z2a("chat", "moved/run", "--prompt", "", cwd=tmp_path).returncode == 0


def test_text_in_any_script_comes_out_on_any_console(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("{train: {steps: 1}, evals: {prompts: [你好]}}", encoding="utf-8")
    for extra in ([], ["--json"]):
        shown = z2a("recipe", "show", tmp_path / "a.yaml", *extra, PYTHONIOENCODING="ascii")
        assert shown.returncode == 0
        assert "你好" in shown.stdout


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["train", "nowhere.yaml"], 2, "no recipe at nowhere.yaml"),
        (["recipe", "check", "bad.yaml"], 2, "did you mean steps?"),
        (["recipe", "check", "broken.yaml"], 2, "is not plain YAML"),
        (["ckpt", "ls", "."], 2, "no run in"),
        (["corpus", "build", "good.yaml"], 2, "the recipe names no text"),
        (["tokens", "build", "good.yaml"], 1, "z2a corpus build"),
        (["quickstart", "--corpus", "nowhere", "--out", "x"], 2, "nothing at nowhere"),
        (["quickstart", "train.mixture={nope: 1}", "--out", "x"], 2, "train.mixture names nope"),
        (["quickstart", "out=y", "--out", "x"], 2, "--out"),
        (["train", "."], 2, "neither recipe.yaml nor run/recipe.yaml"),
        (["train"], 2, "Missing argument"),
        (["train", "good.yaml", "--fast"], 2, "No such option"),
        (["fly"], 2, "No such command"),
        (["tran"], 2, "Did you mean 'train'?"),
        (["goodput", "runs/first"], 2, "Did you mean 'z2a watch RUN --once'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_users_mistake_gives_a_line_to_act_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], status: int, said: str
) -> None:
    """In this process: a new one for each would import torch thirty times."""
    (tmp_path / "bad.yaml").write_text("train: {stepz: 5}")
    (tmp_path / "broken.yaml").write_text("train: [")
    (tmp_path / "good.yaml").write_text("train: {steps: 5}")
    monkeypatch.chdir(tmp_path)
    for extra in ([], ["--json"]):
        failed = CliRunner().invoke(app, [*words, *extra])
        assert failed.exit_code == status
        assert said in failed.stderr
        assert "Traceback" not in failed.stderr
        if not extra:
            assert failed.stdout == ""
        elif failed.stdout:  # a command line that does not parse: the next test
            assert "error" in json.loads(failed.stdout)


@pytest.mark.parametrize(
    ("words", "called", "said"),
    [
        (["bench", "ops", "z2all-3m"], "zero2all.bench.bench_ops", "error: interrupted"),
        (["bench", "shapes", "z2all-3m"], "zero2all.bench.bench_shapes", "error: interrupted"),
        (
            ["corpus", "build", "recipe.yaml"],
            "zero2all.corpus.build_corpus",
            "error: interrupted; finished work is kept: run the same command again to continue",
        ),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_an_interrupted_command_says_that_work_is_kept_only_where_it_is(
    words: list[str], called: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "recipe.yaml").write_text("out: out\ncorpus: {sources: [{name: a, paths: [a.txt]}]}\n")
    monkeypatch.setattr(called, interrupt)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert " ".join(done.stderr.split()).endswith(said), done.stderr


@pytest.mark.parametrize("words", [["train"], ["recipe", "check", "bad.yaml"]], ids=" ".join)
def test_a_mistake_is_one_json_object_of_the_installed_program(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "bad.yaml").write_text("train: {stepz: 5}")
    failed = z2a(*words, "--json", cwd=tmp_path)
    assert failed.returncode == 2
    assert "error" in json.loads(failed.stdout)


def test_a_mistake_in_a_recipe_does_not_wait_for_torch(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("train: {stepz: 5}")
    code = (
        "import atexit, sys; from zero2all.cli.main import main; "
        "atexit.register(lambda: print('torch' in sys.modules)); main()"
    )
    failed = subprocess.run(
        [sys.executable, "-c", code, "train", "bad.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "did you mean steps?" in failed.stderr
    assert failed.stdout.strip() == "False"


def test_recipe_show_prints_what_loads_again(tmp_path: Path, workspace: Path) -> None:
    (tmp_path / "a.yaml").write_text(recipe_yaml(tiny_recipe(workspace)))
    shown = z2a("recipe", "show", tmp_path / "a.yaml", "model.num_hidden_layers=4")
    (tmp_path / "b.yaml").write_text(shown.stdout)
    assert json.loads(z2a("recipe", "show", tmp_path / "b.yaml", "--json").stdout)["model"]["num_hidden_layers"] == 4
    assert json.loads(z2a("recipe", "schema").stdout)["title"] == "Recipe"


def test_plan_layers_tells_the_same_to_people_and_programs() -> None:
    def show(*words: str) -> str:
        return CliRunner().invoke(app, ["plan", "z2all-1.1b", *words, "--gpus", "1", "--layers"]).stdout

    shown = json.loads(show("--json"))["model"]
    assert shown["parameters"]["total"] == 1_255_499_776
    assert shown["flops_per_token"]["6N"] == 6 * (1_255_499_776 - 64320 * 2048)
    assert shown["cache"]["bytes"] == 22 * 2 * 8 * 64 * 2 * 2048
    assert shown["advice"] == []
    text = show("model.intermediate_size=5461")
    assert "1,255,499,776" not in text  # the override counts
    assert "model.intermediate_size=5461 -> 5504: not a multiple of 64 elements" in text


def test_a_missing_extra_is_one_line_that_says_what_to_install() -> None:
    with pytest.raises(Z2aError, match=r"pip install 'zero2all\[hf\]'"):
        need("a_module_that_is_not_there", "hf")


@pytest.mark.long
def test_a_shortened_quickstart_is_far_below_a_unigram_model(tmp_path: Path) -> None:
    """The whole quickstart ends 93% below; 60 steps must do for the 25% that it promises."""
    done = z2a("quickstart", "train.steps=60", "evals.stories=0", "--out", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["below_unigram"] >= 0.25
