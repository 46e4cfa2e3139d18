"""Options of a recipe, turned on through the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.helpers import losses
from tests.conftest import tiny_recipe
from tests.parallel.test_activation_checkpoint import PRODUCTS, Calls
from tests.train.runs import trained
from zero2all.base.torch_private import set_activation_memory_budget
from zero2all.train import Run

STILL = ["train.steps=1", "train.optimizer.lr=1e-12", "train.seq_len=64", "train.batch_tokens=1024"]


def run_with(workspace: Path, out: Path, *overrides: str) -> Run:
    return trained(tiny_recipe(workspace, f"out={out}", *overrides))


@torch.inference_mode()
def loss_of_each_document_alone(run: Run) -> float:
    """The mean loss of the first batch, each document of a sample in a forward of its own."""
    model, end = run.load_model(), run.tokenizer().eos_token_id
    stage = run.plan().stage_of(0)
    samples = torch.from_numpy(stage.dataset.tokens(*stage.sample_range(0)))
    found: list[Tensor] = []
    for sample in samples:
        inputs, targets = sample[:-1], sample[1:]
        starts = sorted({0, *(inputs == end).nonzero().flatten().tolist()})
        for start, stop in zip(starts, [*starts[1:], len(inputs)], strict=True):
            found.append(model(inputs[None, start:stop], targets_BS=targets[None, start:stop])[0])
    assert len(found) > 1.5 * len(samples), "documents share samples"
    return float(torch.cat(found).mean())


def test_document_mask_computes_each_document_alone(workspace: Path, tmp_path: Path) -> None:
    masked, plain = (
        run_with(workspace, tmp_path / str(on), *STILL, f"train.document_mask={on}") for on in ("true", "false")
    )
    alone = loss_of_each_document_alone(masked)
    assert float(losses(masked)[0]) == pytest.approx(alone, abs=1e-5)
    assert abs(float(losses(plain)[0]) - alone) > 1e-4


def test_checkpoints_of_keep_every_stay(workspace: Path, tmp_path: Path) -> None:
    often = ["checkpoint.every=2 steps", "checkpoint.keep_latest=1"]
    kept = run_with(workspace, tmp_path / "kept", *often, "checkpoint.keep_every=4 steps")
    newest = run_with(workspace, tmp_path / "newest", *often)
    assert (kept.checkpoints.steps(), newest.checkpoints.steps()) == ([4, 8, 12], [12])


def test_activation_checkpointing_recomputes_and_changes_no_digit(workspace: Path, tmp_path: Path) -> None:
    found, products, cheap = {}, {}, {}
    for mode in ("none", "selective", "full"):
        with Calls() as calls:
            run = run_with(workspace, tmp_path / mode, "train.steps=3", f"parallel.activation_checkpointing={mode}")
        found[mode] = losses(run)
        products[mode] = sum(count for op, count in calls.of.items() if op in PRODUCTS)
        cheap[mode] = calls.of["aten.silu.default"]
    assert found["selective"] == found["full"] == found["none"]
    assert cheap["selective"] == cheap["full"] == 2 * cheap["none"]
    assert products["full"] > products["selective"] == products["none"]


def saved_bytes(loss: Tensor) -> int:
    """What compiled functions in the graph of a loss have saved for backward."""
    seen: set[Any] = set()
    todo, found = [loss.grad_fn], dict[int, int]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [parent for parent, _ in node.next_functions]
        if "CompiledFunction" in node.name():
            found |= {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in node.saved_tensors}
    return sum(found.values())


@pytest.fixture
def whole_budget() -> Iterator[None]:
    yield
    set_activation_memory_budget(1.0)


def test_a_smaller_activation_budget_saves_less(
    workspace: Path, tmp_path: Path, whole_budget: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled without kernels: what backward recomputes is decided before they are generated."""
    saved: list[int] = []
    backward, compile_module = Tensor.backward, nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_module(self, backend="aot_eager"))

    def measured(self: Tensor, *args: Any, **kwargs: Any) -> None:
        saved.append(saved_bytes(self))
        backward(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "backward", measured)
    found, bytes_saved = [], []
    for budget in (1.0, 0.1):
        torch.compiler.reset()
        options = ["parallel.activation_checkpointing=budget", f"parallel.activation_budget={budget}"]
        found.append(losses(run_with(workspace, tmp_path / str(budget), *STILL, "train.compile=true", *options)))
        bytes_saved.append(saved.pop())
    whole, part = found
    assert float(part[0]) == pytest.approx(float(whole[0]), abs=1e-5)
    assert 0 < bytes_saved[1] < 0.8 * bytes_saved[0]
