"""Activation offload: the same bits, nothing left on the device, blocks fetched one ahead."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.parallel.helpers import MOE, WIDE, Storages, build_model, estimated_bytes, forward, gradients, step
from tests.ranks import on_ranks
from zero2all.base.errors import RecipeError
from zero2all.model.cost.activations import ActivationPolicy
from zero2all.parallel import activation_checkpoint, activation_offload
from zero2all.parallel.activation_offload import BlockingCopies
from zero2all.recipe import ParallelRecipe, parse_recipe

ON = {"activation_offload": True}
DROPOUT = {"attention_dropout": 0.2, "residual_dropout": 0.3}


class CountedCopies(BlockingCopies):
    """Stands for a device: knows what was copied, and whether the tensors it was copied from are still there."""

    def __init__(self) -> None:
        self.hosts: list[Tensor] = []
        self.devices: list[StorageWeakRef] = []
        self.log: list[tuple[str, int]] = []
        self.marks = 0

    def to_host(self, data: Tensor) -> Tensor:
        self.devices.append(StorageWeakRef(data.untyped_storage()))
        host = super().to_host(data)
        self.hosts.append(host)
        return host

    def to_device(self, host: Iterable[Tensor]) -> tuple[list[Tensor], Any]:
        hosts = list(host)
        first = next((number for number, one in enumerate(self.hosts) if one is hosts[0]), -1)
        self.log.append(("fetch", first))
        return super().to_device(hosts)[0], "fetched"

    def mark(self) -> Any:
        self.marks += 1
        return self.marks - 1

    def wait(self, mark: Any) -> None:
        self.log.append(("wait", 0) if mark == "fetched" else ("copied", mark))

    @property
    def bytes(self) -> int:
        return sum(host.nbytes for host in self.hosts)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> CountedCopies:
    counted = CountedCopies()
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1)
    monkeypatch.setattr(activation_checkpoint, "copies_for", lambda device: counted)
    return counted


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("moe", [None, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize(
    ("mode", "changes"),
    [("none", {}), ("full", {}), ("none", DROPOUT), ("full", DROPOUT)],
    ids=str,
)
def test_offload_gives_the_same_bits(
    copies: CountedCopies, mode: str, changes: dict[str, Any], moe: dict[str, Any] | None, masked: bool
) -> None:
    found = []
    for sizes in ({}, ON):
        model = build_model(mode, moe, sizes, **changes)
        found.append({"loss": step(model, masked), **gradients(model)})
        assert bool(copies.hosts) is bool(sizes)
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("mode", ["none", "full"])
def test_only_the_last_block_stays_on_the_device(copies: CountedCopies, mode: Any) -> None:
    def estimate(layers: int, offload: bool) -> int:
        return estimated_bytes(layers, ActivationPolicy(mode, offload=offload))

    device, host = {}, {}
    for layers in (5, 3):
        before = copies.bytes
        model = build_model(mode, None, ON, **WIDE, num_hidden_layers=layers)
        losses, alive = forward(model)
        host[layers] = copies.bytes - before
        device[layers] = alive - host[layers]
        gc.collect()
        assert all(storage.expired() for storage in copies.devices), "a tensor on the device is still referred to"
        del losses
    assert host[5] - host[3] == pytest.approx(estimate(5, False) - estimate(3, False), rel=0.05)
    assert estimate(5, True) == estimate(3, True), "however deep the model is"
    assert abs(device[5] - device[3]) < 0.01 * host[3]


def test_blocks_are_fetched_one_ahead_and_once(copies: CountedCopies) -> None:
    model = build_model("full", None, ON, num_hidden_layers=5)
    for layer, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(
            lambda block, inputs, layer=layer: (
                inputs[0].register_hook(lambda gradient: copies.log.append(("backward done", layer))) and None
            )
        )
        block.register_forward_hook(
            lambda block, inputs, output, layer=layer: copies.log.append(("forward done", layer))
        )
    step(model, masked=False)
    assert len(copies.hosts) == 4, "the input of each block but the last"
    # A block is copied while the next one is computed, and then freed: the device waits before it computes another.
    assert copies.log == [
        ("forward done", 0), ("copied", 0), ("forward done", 1), ("copied", 1), ("forward done", 2),
        ("copied", 2), ("forward done", 3), ("copied", 3), ("forward done", 4),
        ("backward done", 4),
        ("fetch", 3), ("wait", 0), ("fetch", 2), ("backward done", 3),
        ("wait", 0), ("fetch", 1), ("backward done", 2),
        ("wait", 0), ("fetch", 0), ("backward done", 1),
        ("wait", 0), ("backward done", 0),
    ]  # fmt: skip


def test_nothing_survives_backward_and_evaluation_offloads_nothing(copies: CountedCopies) -> None:
    model = build_model("none", None, ON)
    with Storages() as storages:
        step(model)
    hosts = [StorageWeakRef(host.untyped_storage()) for host in copies.hosts]
    copies.hosts.clear()
    assert storages.alive(model.model) == 0
    assert all(host.expired() for host in hosts)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    model.eval_losses(tokens, tokens)
    assert not copies.hosts


def test_weights_and_what_blocks_share_are_not_offloaded(copies: CountedCopies) -> None:
    """Also not the copies of weights that autocast makes: no size of a weight or of the rotary table is a multiple."""
    model = build_model("none", None, ON)
    with torch.autocast("cpu", torch.bfloat16):
        tokens = torch.zeros(11, 29, dtype=torch.int64)
        losses = model.model(tokens, targets_BS=tokens)
    losses.sum().backward()
    assert copies.hosts
    assert all(host.nbytes % (11 * 29) == 0 for host in copies.hosts)


def test_small_tensors_are_not_offloaded(copies: CountedCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 2**20)
    step(build_model("none", None, ON))
    assert not copies.hosts


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "tp": {"tp": 2},
    "pipeline": {"pp": 2},
    "pipeline, full": {"pp": 2, "activation_checkpointing": "full"},
    "zbv": {"pp": 2, "schedule": "zbv"},
}


def on_every_layout() -> dict[tuple[str, bool], dict[str, Tensor]]:
    activation_offload.MIN_BYTES = 1
    found = {}
    for name, sizes in LAYOUTS.items():
        for offload in (False, True):
            model = build_model("none", None, {**sizes, "activation_offload": offload}, num_hidden_layers=4)
            found[name, offload] = {"loss": step(model), **gradients(model)}
    return found


def test_offload_gives_the_same_bits_on_ranks() -> None:
    """A pipeline has several micro-batches in flight."""
    for found in on_ranks(2, on_every_layout):
        for name in LAYOUTS:
            for parameter, value in found[name, False].items():
                assert torch.equal(found[name, True][parameter], value), (name, parameter)


def test_what_cannot_be_offloaded_is_refused() -> None:
    with pytest.raises(ValueError, match="set activation_checkpointing=none or full"):
        ParallelRecipe(activation_offload=True, activation_checkpointing="selective")
    with pytest.raises(RecipeError, match=r"set train.compile=auto"):
        parse_recipe("train: {steps: 1, compile: true}\nparallel: {activation_offload: true}")
