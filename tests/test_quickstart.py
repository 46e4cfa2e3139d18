"""What the quickstart hands to the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero2all.evals import evaluate_bpb
from zero2all.quickstart import QuickstartResult, quickstart, summary_text


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


@pytest.mark.parametrize(("steps", "traced"), [(600, 10), (10, 9), (1, 0)])
def test_what_to_do_next_names_a_step_that_the_run_has(steps: int, traced: int) -> None:
    result = QuickstartResult("out", 1, 1, 1, 1, steps, 1.0, {}, [], {})
    text = summary_text(result)
    assert f"z2a tokens trace out --step {traced} " in text
    assert "z2a watch out " in text
    assert "z2a report out --html " in text
