"""Whatever happens to the record, training ends with the same weights, and lost lines are reported once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_recipe
from tests.track.chaos import EXPECTED_WARNINGS, KINDS, NEEDS_MOUNT, chaos, may_mount
from zero2all.track import read_steps
from zero2all.train import Run, TrainerHooks, train

STEPS = 100


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """A sum split differently may round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train_under(kind: str, workspace: Path, work: Path) -> tuple[dict[str, torch.Tensor], Path]:
    recipe = tiny_recipe(workspace, f"out={work / 'out'}", f"train.steps={STEPS}", "checkpoint.every=60 steps")
    with chaos(kind, work) as on_step:
        train(recipe, hooks=TrainerHooks(on_batch=lambda batch: on_step(batch.step)))
    return Run.open(recipe.run_dir).load_model().state_dict(), recipe.run_dir / "record.jsonl"


@pytest.fixture(scope="module")
def undisturbed(workspace: Path, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[str, torch.Tensor]:
    return train_under("off", workspace, tmp_path_factory.mktemp("off"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "off"])
def test_training_is_the_same_whatever_happens_to_the_record(
    kind: str,
    workspace: Path,
    tmp_path: Path,
    undisturbed: dict[str, torch.Tensor],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if kind in NEEDS_MOUNT and not may_mount():
        pytest.skip("needs the right to mount a small file system")
    weights, record = train_under(kind, workspace, tmp_path)
    for name, tensor in undisturbed.items():
        assert torch.equal(tensor, weights[name]), name
    stderr = capsys.readouterr().err
    for words in EXPECTED_WARNINGS.get(kind, ()):
        assert stderr.count(words) >= 1, stderr
    assert stderr.count(" fails (") == (1 if kind in EXPECTED_WARNINGS else 0)
    if kind in ("on", "sink raises"):
        assert list(read_steps(record)) == list(range(STEPS))
    if kind == "viewer killed":
        assert list(read_steps(tmp_path / "viewed" / "run" / "record.jsonl")) == list(range(STEPS))
