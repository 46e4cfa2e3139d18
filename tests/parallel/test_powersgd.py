"""PowerSGD between replicas: against plain averages, against torch's own hook, and what is kept between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from tests.parallel.test_gradient_accumulation import LENGTH, VOCAB, config
from tests.ranks import on_ranks
from zero2all.parallel import ParallelDims, ParallelMesh, ParallelModel
from zero2all.parallel.powersgd import PowerSGD
from zero2all.recipe import OptimizerRecipe, ParallelRecipe
from zero2all.train.optimizer import build_optimizers, set_learning_rate

RANKS, STEPS = 2, 40
TOLERANCE = 1e-4  # relative to the gradient: rounding in fp32
SHAPES = {"a": (24, 16), "vector": (9,), "b": (16, 40), "c": (24, 16), "small": (3, 2)}
Gradients = dict[str, Tensor]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


def drawn(step: int, rank: int) -> Gradients:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def averages(steps: int) -> list[Gradients]:
    found = []
    for step in range(steps):
        by_rank = [drawn(step, rank) for rank in range(RANKS)]
        found.append({name: torch.stack([one[name] for one in by_rank]).mean(0) for name in SHAPES})
    return found


def make(rank: int, smallest_saving: float = 1.0) -> tuple[Layers, PowerSGD]:
    assert dist.group.WORLD is not None
    model = Layers()
    return model, PowerSGD(model, rank=rank, group=dist.group.WORLD, seed=1, smallest_saving=smallest_saving)


def average(model: Layers, powersgd: PowerSGD, gradients: Gradients, scale: float = 1.0) -> Gradients:
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name] * scale
    powersgd.average_gradients(scale)
    return {name: p.grad / scale for name, p in model.named_parameters() if p.grad is not None}


def errors(powersgd: PowerSGD) -> Gradients:
    prefix = f"error-{dist.get_rank()}."
    state = powersgd.state_tensors()
    return {name.removeprefix(prefix): value.clone() for name, value in state.items() if name.startswith(prefix)}


class Bucket:
    """As much of DDP's bucket as torch's hook uses."""

    def __init__(self, gradients: Gradients) -> None:
        self._buffer = torch.cat([gradient.flatten() for gradient in gradients.values()])
        sizes = [gradient.numel() for gradient in gradients.values()]
        parts = zip(torch.split(self._buffer, sizes), gradients.values(), strict=True)
        self._gradients = [part.view_as(gradient) for part, gradient in parts]

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def of_torch(first_q: Gradients, rank: int, steps: int) -> list[Gradients]:
    state: Any = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1
    )
    state.iter = 2  # no plain averages first
    by_shape = sorted(first_q, key=lambda name: list(SHAPES.values()).index(SHAPES[name]))
    state.q_memory_dict[0] = torch.cat([first_q[name].flatten() for name in by_shape])
    state.p_memory_dict[0] = torch.zeros(sum(SHAPES[name][0] * rank for name in first_q))
    found = []
    for step in range(steps):
        bucket: Any = Bucket(drawn(step, dist.get_rank()))
        powerSGD_hook.powerSGD_hook(state, bucket).wait()
        found.append(dict(zip(SHAPES, (gradient.clone() for gradient in bucket.gradients()), strict=True)))
    return found


@dataclass(frozen=True)
class Seen:
    full: list[Gradients]
    ours: list[Gradients]
    torch: list[Gradients]
    sums: tuple[Gradients, Gradients]
    """What was applied in all steps, with error feedback and without."""
    left: Gradients
    numel: tuple[int, int]
    after_nan: list[Gradients]
    undisturbed: list[Gradients]
    scaled: list[Gradients]


def numbers() -> Seen:
    me = dist.get_rank()
    full = [average(*made, drawn(step, me)) for made in [make(16, 0.0)] for step in range(3)]
    model, powersgd = make(2)
    first_q = {name.removeprefix("q."): q.clone() for name, q in powersgd.state_tensors().items() if name[0] == "q"}
    ours = [average(model, powersgd, drawn(step, me)) for step in range(STEPS)]
    forgetful_model, forgetful = make(2)
    without = []
    for step in range(STEPS):
        without.append(average(forgetful_model, forgetful, drawn(step, me)))
        for name, tensor in forgetful.state_tensors().items():
            if name.startswith("error"):
                tensor.zero_()
    # A gradient that is not finite, on one rank and in one matrix, between the first step and the second.
    hurt_model, hurt = make(2)
    after_nan = [average(hurt_model, hurt, drawn(0, me))]
    bad = drawn(7, me)
    if me == 1:
        bad["a"][0, 0] = torch.inf
    assert not average(hurt_model, hurt, bad)["c"].isfinite().any()
    after_nan.append(average(hurt_model, hurt, drawn(1, me)))
    scaled_model, scaled = make(2)
    return Seen(
        full,
        ours,
        of_torch(first_q, 2, 10),
        tuple({name: torch.stack([one[name] for one in many]).sum(0) for name in SHAPES} for many in (ours, without)),  # type: ignore[arg-type]
        errors(powersgd),
        (powersgd.sent_numel, make(2, 5.0)[1].sent_numel),
        after_nan,
        ours[:2],
        [average(scaled_model, scaled, drawn(step, me), scale=2.0**step) for step in range(3)],
    )


def off(found: Gradients, expected: Gradients) -> float:
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in SHAPES)


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    return on_ranks(RANKS, numbers)


def test_at_full_rank_it_is_the_plain_average(seen: list[Seen]) -> None:
    for step, expected in enumerate(averages(3)):
        assert off(seen[0].full[step], expected) < TOLERANCE


def test_it_computes_what_the_hook_of_torch_computes(seen: list[Seen]) -> None:
    """For some steps: each starts from the errors and the Q of the one before, so that other rounding grows."""
    pairs = list(zip(seen[0].ours, seen[0].torch, strict=False))
    assert max(off(ours, other) for ours, other in pairs) < TOLERANCE
    assert len(pairs) == 10
    assert off(seen[0].ours[0], averages(1)[0]) > 0.1, "nothing was left out"


def test_replicas_get_the_same_bits(seen: list[Seen]) -> None:
    for one, other in zip(seen[0].ours, seen[1].ours, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in SHAPES)


def test_error_feedback_sends_everything_in_time(seen: list[Seen]) -> None:
    """What was applied and what ranks still hold is the sum of all gradients; without feedback most of it is lost."""
    expected = {name: torch.stack([one[name] for one in averages(STEPS)]).sum(0) for name in SHAPES}
    applied, without = seen[0].sums
    left = {name: (seen[0].left[name] + seen[1].left[name]) / 2 for name in seen[0].left}
    assert set(left) == {"a", "b", "c"}
    assert off({name: applied[name] + left.get(name, 0) for name in SHAPES}, expected) < TOLERANCE
    assert off(without, expected) > 0.3


def test_only_what_is_smaller_as_factors_is_sent_as_such(seen: list[Seen]) -> None:
    factors = 2 * (2 * (24 + 16) + 16 + 40)
    assert seen[0].numel == (9 + 6 + factors, 9 + 6 + 2 * 24 * 16 + 2 * (16 + 40))


def test_a_gradient_that_is_not_finite_leaves_no_trace(seen: list[Seen]) -> None:
    for found, expected in zip(seen[0].after_nan, seen[0].undisturbed, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in SHAPES)


def test_errors_have_no_loss_scale(seen: list[Seen]) -> None:
    for found, expected in zip(seen[0].scaled, seen[0].ours, strict=False):
        assert off(found, expected) < 1e-6


def train(optimizer: str, method: str, steps: int) -> tuple[list[float], list[Tensor], list[float]]:
    sync = {"method": method, "powersgd_rank": 2}
    recipe = ParallelRecipe(dp_replicate=RANKS, dp_shard=1, sync=sync)
    mesh = ParallelMesh(ParallelDims.from_recipe(recipe, RANKS), torch.device("cpu"))
    model = ParallelModel(config(moe=False), recipe, mesh, seed=3 + mesh.rank)  # weights are those of rank 0
    options = OptimizerRecipe(name=optimizer, lr=5e-3, muon_lr=0.02)
    optimizers = build_optimizers(model.model, options, model.param_groups, 1.0, model.ddp_group)
    set_learning_rate(optimizers, options, 1.0)
    tokens = torch.randint(0, VOCAB, (8, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    own = tokens[slice(*mesh.sample_range(8))]
    losses, norms = [], []
    for _ in range(steps):
        mine = model.forward_backward(own[:, :-1], own[:, 1:], divisor=8 * LENGTH, micro_batch_size=1)
        model.clip_grad_norm_(0.5)
        norms.append(float(torch.stack([p.grad.norm() for p in model.model.parameters() if p.grad is not None]).norm()))
        for one in optimizers:
            one.step()
            one.zero_grad()
        losses.append(float(model.all_reduce_sum(mine.sum())) / 8 / LENGTH)
    return losses, [parameter.detach() for parameter in model.model.parameters()], norms


def both(steps: int) -> dict[tuple[str, str], Any]:
    return {
        (optimizer, method): train(optimizer, method, steps)
        for optimizer in ("adamw", "muon")
        for method in ("all-reduce", "powersgd")
    }


@pytest.mark.slow
def test_replicas_train_together_with_accumulation_clipping_and_muon() -> None:
    one, other = on_ranks(RANKS, both, 12, detail=False)
    for key, (losses, weights, norms) in one.items():
        assert all(map(torch.equal, weights, other[key][1])), f"{key}: weights differ between ranks"
        assert losses == other[key][0]
        assert losses[-1] < losses[0] - 0.2, key
        assert max(norms) <= 0.5 + 1e-5, f"{key}: the norm that is clipped is not that of what is applied"
    for optimizer in ("adamw", "muon"):
        plain, compressed = one[optimizer, "all-reduce"][0], one[optimizer, "powersgd"][0]
        assert plain[0] == pytest.approx(compressed[0], abs=1e-6)
        assert plain != compressed


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"dp_replicate": 2},
        {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
        {"dp_replicate": "auto", "dp_shard": 1, "pp": 2},
        {"dp_replicate": 2, "dp_shard": 1, "gradient_dtype": "bf16"},
    ],
)
def test_powersgd_is_refused_where_replicas_are_not_plain(parallel: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"PowerSGD .* set "):
        ParallelRecipe(**parallel, sync={"method": "powersgd"})
