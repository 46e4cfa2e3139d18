"""A checkpoint of one parallel layout resumes in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.parallel.helpers import make_model, small_config
from tests.ranks import on_ranks
from zero2all.model import ModelInputs
from zero2all.parallel import ParallelModel

CONFIG = small_config(num_hidden_layers=4)
# Groups of an optimizer list parameters by number, and pipeline ranks have different ones: names instead.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
LAYOUTS = [{}, {"tp": 2, "pp": 2, "schedule": "1f1b"}, {"pp": 2, "schedule": "zbv"}, {"dp_replicate": 2, "cp": 2}]


def begin(sizes: dict[str, Any], seed: int) -> tuple[ParallelModel, torch.optim.Optimizer]:
    parallel_model = make_model(sizes, CONFIG, seed)
    groups = parallel_model.param_groups(parallel_model.model.parameters())
    return parallel_model, torch.optim.AdamW(groups, lr=1e-2, fused=True)


def step(parallel_model: ParallelModel, optimizer: torch.optim.Optimizer, number: int) -> float:
    tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(number))
    first, last = parallel_model.mesh.sample_range(8)
    losses = parallel_model.forward_backward(ModelInputs(tokens[first:last, :-1], tokens[first:last, 1:]), divisor=128)
    parallel_model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return parallel_model.all_reduce_sum(losses.sum()).item() / 128


def state(parallel_model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(parallel_model.model),
        "optimizer": get_optimizer_state_dict(parallel_model.model, optimizer, options=BY_NAME),
    }


def load(parallel_model: ParallelModel, optimizer: torch.optim.Optimizer, directory: Path, alone: bool) -> None:
    loaded = state(parallel_model, optimizer)
    state_dict_loader.load(loaded, checkpoint_id=directory, no_dist=alone)
    set_model_state_dict(parallel_model.model, loaded["model"])
    set_optimizer_state_dict(parallel_model.model, optimizer, loaded["optimizer"], options=BY_NAME)


def train_in_every_layout(directory: Path) -> list[list[float]]:
    """Two steps in each layout, from where the one before stopped; after the last, all is saved once more."""
    found = []
    for number, sizes in enumerate(LAYOUTS):
        # Each has another seed: what counts must come from the checkpoint.
        parallel_model, optimizer = begin(sizes, seed=number)
        if number:
            load(parallel_model, optimizer, directory / str(number - 1), alone=False)
        found.append([step(parallel_model, optimizer, 2 * number + turn) for turn in range(2)])
        state_dict_saver.save(state(parallel_model, optimizer), checkpoint_id=directory / str(number))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_passed_from_layout_to_layout_equals_one_process(tmp_path: Path) -> None:
    by_rank = on_ranks(4, train_in_every_layout, tmp_path)
    assert all(rank == by_rank[0] for rank in by_rank)
    found = [loss for pair in by_rank[0] for loss in pair]
    parallel_model, optimizer = begin({}, seed=0)
    expected = [step(parallel_model, optimizer, number) for number in range(2 * len(LAYOUTS))]
    assert found == pytest.approx(expected, abs=5e-6)
    one, its_optimizer = begin({}, seed=99)
    load(one, its_optimizer, tmp_path / str(len(LAYOUTS) - 1), alone=True)
    assert step(one, its_optimizer, 100) == pytest.approx(step(parallel_model, optimizer, 100), abs=5e-6)
