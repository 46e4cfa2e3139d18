"""What the quickstart hands to the trainer, and one book from file to validation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.conftest import CHINESE
from zero2all.base.errors import UsageError
from zero2all.corpus.corpus_report import corpus_report, report_html
from zero2all.evals import evaluate_bpb
from zero2all.quickstart import GeneratedSample, QuickstartResult, quickstart, quickstart_recipe, summary_text
from zero2all.recipe import load_recipe
from zero2all.storyworld import StoryQuality
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView
from zero2all.train import Run, trace_step, train

TINY = [
    *("train.steps=2", "train.batch_tokens=256", "train.seq_len=64", "tokenizer.vocab_size=512", "evals.tokens=512"),
    *("model.num_hidden_layers=1", "model.hidden_size=32", "model.intermediate_size=64", "train.device=cpu"),
    *("model.num_attention_heads=2", "model.num_key_value_heads=2", "checkpoint.flash_every=null"),
]


class Reached(Exception):
    pass


def test_evals_every_is_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training with ``evals.every`` validates in a quickstart too."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):
        lines = (f"Document {number} says {number * line} in sentence {line}." for line in range(60))
        (text / f"{number}.txt").write_text("\n".join(lines))

    def train(recipe: object, evaluate: object = None) -> None:
        assert evaluate is evaluate_bpb
        raise Reached

    monkeypatch.setattr("zero2all.quickstart.train", train)
    with pytest.raises(Reached):
        quickstart(tmp_path / "out", [text], ["evals.every=2 steps", "corpus.holdout=0.3", "corpus.filters=[]"])


@pytest.mark.slow
def test_one_book_is_trained_on_and_validated_under_its_own_name(tmp_path: Path) -> None:
    rng = random.Random(3)
    name, words = "三国演义 <卷一>", [*CHINESE.replace(" ", "")]
    file = tmp_path / f"{name}.txt"
    file.write_text("\n".join("".join(rng.choices(words, k=30)) for _ in range(1500)), encoding="utf-8")
    result = quickstart(tmp_path / "out", [file], [*TINY, "corpus.filters=[]"])
    assert result.validation is not None
    assert list(result.validation.sources) == [name]
    assert result.validation.bytes > 1000
    assert f"name: {name}" in (tmp_path / "out" / "recipe.yaml").read_text(encoding="utf-8")

    run = RunView(LocalRunLocation(tmp_path / "out" / "run"))
    run.refresh()
    assert {f"loss/{name}", f"bpb/{name}"} <= set(run.names)
    assert list(run.metadata.sources) == [name]
    traced = trace_step(Run.open(tmp_path / "out"), 1)["documents"]
    assert {(part["source"], part["title"]) for part in traced} == {(name, file.name)}
    page = report_html(corpus_report(tmp_path / "out" / "documents"))
    assert "三国演义 &lt;卷一&gt;" in page
    assert name not in page

    file.touch()
    assert quickstart(tmp_path / "out", [file], [*TINY, "corpus.filters=[]"]).steps == 2  # the same text
    file.write_text(file.read_text(encoding="utf-8")[:-4000], encoding="utf-8")
    with pytest.raises(
        UsageError, match=r"is the tokenizer of .*/out/run and is not replaced: 'z2a train .*/out' resumes"
    ):
        quickstart(tmp_path / "out", [file], [*TINY, "corpus.filters=[]"])
    assert train(load_recipe(tmp_path / "out")).steps == 2


def test_a_directory_is_a_source_of_its_own_name(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("小说", "my notes", "deep/小说", "a@b", "😀")]
    for folder in folders:
        folder.mkdir(parents=True)
    recipe = quickstart_recipe(tmp_path / "out", folders, [])
    assert [source.name for source in recipe.corpus.sources] == ["小说", "my notes", "小说-2", "a_b", "😀"]
    assert [source.paths for source in recipe.corpus.sources] == [[str(folder)] for folder in folders]


def finished(quality: StoryQuality | None, *samples: GeneratedSample) -> QuickstartResult:
    return QuickstartResult("out", 1, 1, 1, 1, 2, 600, 1.0, None, quality, [*samples], {})


def test_what_to_do_next_are_commands_for_this_run() -> None:
    quality = StoryQuality(200, 1500, 0.943, 0.61, 90, 0.75)
    result = finished(quality, GeneratedSample("", "Once."), GeneratedSample("Tom", " sat."))
    text = summary_text(result)
    assert "\nOnce.\n" in text
    assert "\nTom▸ sat.\n" in text
    assert "stories: 94% of sentences parse, 61% of stories are consistent, 75% of sums are right" in text
    assert "z2a watch out " in text
    assert "z2a watch out --html " in text
    assert "z2a train out model.num_hidden_layers=3 --name deeper " in text
    assert "z2a compare out/run out/deeper " in text
    assert "z2a train out train.steps=1200 --extend rewarm " in text


def test_long_samples_are_wrapped_between_words() -> None:
    texts = ["One sunny morning, Mia was playing in the garden. " * 6, "从前，山坡上住着一只小兔。" * 20, "a\n\nb"]
    samples = [GeneratedSample("", text.strip()) for text in texts]
    lines = summary_text(finished(None, *samples)).split("\n")
    first, second, third = (lines.index(line) for line in lines if line.startswith("── sample"))
    assert max(map(cell_len, lines[first:third])) <= 100
    assert " ".join(lines[first + 1 : second]) == texts[0].strip()
    assert "".join(lines[second + 1 : third]) == texts[1]
    assert lines[third + 1 : third + 4] == ["a", "", "b"]


def test_without_a_corpus_the_first_model_learns_stories(tmp_path: Path) -> None:
    recipe = quickstart_recipe(tmp_path / "out", [], [])
    assert [source.name for source in recipe.corpus.sources] == ["en", "zh"]
    assert recipe.corpus.sources[0].paths == [str(tmp_path / "out" / "stories" / "en.jsonl")]
    assert recipe.evals.stories
    assert not quickstart_recipe(tmp_path / "other", [tmp_path], []).evals.stories


@pytest.mark.slow
def test_stories_are_written_once_checked_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.quickstart.STORIES_PER_LANGUAGE", 150)
    monkeypatch.setattr("zero2all.quickstart.CHECKED_STORIES", 6)
    overrides = [*TINY, "model.max_position_embeddings=64", "evals.every=2 steps", "evals.stories=4"]
    overrides += ["corpus.holdout=0.1", "model.initializer_range=0.02"]
    result = quickstart(tmp_path / "out", [], overrides)
    assert result.stories is not None
    assert result.stories.stories == 6
    written = {path.name: path.read_bytes() for path in (tmp_path / "out" / "stories").iterdir()}
    assert sorted(written) == ["en.jsonl", "zh.jsonl"]
    assert all(data.count(b"\n") == 150 for data in written.values())
    run = RunView(LocalRunLocation(tmp_path / "out" / "run"))
    run.refresh()
    assert "stories/consistent stories" in run.names
    quickstart(tmp_path / "out", [], overrides)  # done already
    assert {path.name: path.read_bytes() for path in (tmp_path / "out" / "stories").iterdir()} == written
