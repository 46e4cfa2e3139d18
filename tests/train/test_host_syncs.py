"""How often a step makes the host wait for the device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_recipe
from tests.host_syncs import HostSyncs
from tests.parallel.helpers import make_model, small_config
from zero2all.bench.rank_harness import run_ranks
from zero2all.model import ModelInputs
from zero2all.recipe import MoeConfig
from zero2all.train.trainer import Trainer

MOE = MoeConfig(num_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=16)
ONE_READ = {"tolist in data_loader.py:tolist": 1}


def syncs_of_a_step(workspace: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Counter[str]:
    """Of the third step: the first ones fill caches."""
    found: list[str] = []
    original = Trainer.train_step

    def counted(self: Trainer, batch: Any) -> Any:
        if batch.step != 2:
            return original(self, batch)
        with HostSyncs() as syncs:
            result = original(self, batch)
        found.extend(syncs.places)
        return result

    monkeypatch.setattr(Trainer, "train_step", counted)
    recipe = tiny_recipe(workspace, f"out={out}", "train.steps=3", *options)
    with Trainer(recipe) as trainer:
        trainer.train()
    return Counter(found)


@pytest.mark.parametrize("documents", [True, False])
def test_a_dense_step_has_one(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: bool
) -> None:
    masks = f"train.document_mask={str(documents).lower()}"
    assert syncs_of_a_step(workspace, tmp_path, monkeypatch, masks) == ONE_READ


def test_experts_on_one_rank_have_none_of_their_own(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe = "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16}"
    assert syncs_of_a_step(workspace, tmp_path, monkeypatch, moe) == ONE_READ


@pytest.mark.parametrize("name", ["adamw-bf16", "adafactor"])
def test_an_optimizer_reads_nothing_but_its_step_counters_which_are_on_the_cpu(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options = [f"train.optimizer.name={name}", "train.precision=auto"]
    found = syncs_of_a_step(workspace, tmp_path, monkeypatch, *options)
    counters = [place for place in found if place.startswith("__int__ in ada")]
    assert len(counters) == 1
    assert {place: count for place, count in found.items() if place not in counters} == ONE_READ


def syncs_of_ep() -> list[str]:
    model = make_model({"ep": 2}, small_config(num_hidden_layers=3, moe=MOE))
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(model.mesh.rank))
    model.forward_backward(ModelInputs(tokens, tokens), divisor=64)
    with HostSyncs() as syncs:
        model.forward_backward(ModelInputs(tokens, tokens), divisor=64)
        model.clip_grad_norm_(1.0)
    return syncs.places


def test_expert_parallel_has_one_for_each_layer_which_its_all_to_all_needs() -> None:
    for places in run_ranks(2, syncs_of_ep):
        assert Counter(places) == {"tolist in expert_parallel.py:_expert_parallel_forward": 3}


def test_what_is_counted() -> None:
    numbers = torch.tensor([1, 2, 2])
    with HostSyncs() as syncs:
        numbers.sum().item()
        torch.bincount(numbers)
        numbers[numbers > 1]
        torch.repeat_interleave(numbers, numbers)
        numbers.repeat_interleave(numbers, output_size=5)
        numbers[torch.tensor([0, 1])]
    assert [place.partition(" in ")[0] for place in syncs.places] == [
        "item", "bincount", "index with a mask", "repeat_interleave without output_size"
    ]  # fmt: skip
