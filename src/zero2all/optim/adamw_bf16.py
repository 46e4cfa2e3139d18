"""AdamW whose weights, gradients and moments are in bf16: 8 bytes per parameter, with Kahan summation 10, not 16.

An update is computed in fp32 and is mostly smaller than the last bit of a weight in bf16, so rounding to nearest would
drop it. ``stochastic`` rounds up or down at random, with the right mean. ``kahan`` keeps the rounding error of each
weight, in bf16, and adds it to the next update. Moments are rounded at random by both: to nearest, they would stop
short of a constant gradient, and a second moment with ``1 - beta2`` below its last bit would never shrink.

The random bits are a hash of (seed, name of the parameter, step, index in the full parameter). So there is no generator
to save, and a resumed run, or another parallel layout, rounds the same value the same way.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero2all.parallel.sharded_init import local_part, to_local

Rounding = Literal["stochastic", "kahan"]
# Two rounds of a 32-bit hash with low bias: https://github.com/skeeto/hash-prospector
FIRST_FACTOR, SECOND_FACTOR = 0x21F0AAAD, 0x735A2D97
LOW_BITS = 0xFFFF  # of an fp32 number: what bf16 does not have
# Without the compiler an update has a dozen temporary tensors, so it is made in parts: on a CPU such that they fit into
# its cache, elsewhere such that they are small beside a model.
CPU_PART_ELEMENTS, PART_ELEMENTS = 2**16, 2**24


@dataclass(frozen=True)
class _StepSizes:
    """What changes from step to step, as tensors without dimensions: numbers would make the compiler compile again."""

    decay: Tensor
    """1 - learning rate * weight decay."""
    step_size: Tensor
    """Learning rate over the bias correction of the first moment."""
    bias_root: Tensor
    """Square root of the bias correction of the second moment."""

    @classmethod
    def of(cls, group: dict[str, Any], step: int) -> _StepSizes:
        fast, slow = group["betas"]
        values = (
            1 - group["lr"] * group["weight_decay"],
            group["lr"] / (1 - math.pow(fast, step)),
            math.sqrt(1 - math.pow(slow, step)),
        )
        return cls(*(torch.tensor(value, dtype=torch.float32) for value in values))


class _Tensors(NamedTuple):
    """What a rank holds of a parameter, or some rows of it."""

    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    compensation: Tensor | None
    """The rounding error of the weight, with ``kahan``."""


class AdamWBF16(Optimizer):
    """For parameters in bf16; those in fp32 are updated as by AdamW, with moments in fp32.

    ``params`` may be groups with an ``lr``, ``betas``, ``eps`` and ``weight_decay`` of their own. ``noise_keys`` has a
    number for each parameter (``noise_key``). ``compile`` makes the update of a parameter one kernel.
    """

    def __init__(
        self, params: Any, noise_keys: Mapping[Tensor, int], rounding: Rounding = "stochastic", *, compile: bool = False
    ) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0})
        self.rounding, self._noise_keys = rounding, noise_keys
        self._coordinates: dict[Tensor, tuple[Tensor, ...]] = {}
        self._update: Any = torch.compile(update, dynamic=True) if compile else _update_in_parts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, group)

    def _step_parameter(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)  # on the CPU, so that reading it is no host sync
            names = ["exp_avg", "exp_avg_sq"]
            if self.rounding == "kahan" and parameter.dtype == torch.bfloat16:
                names.append("compensation")
            state.update({name: torch.zeros_like(parameter) for name in names})
        state["step"] += 1
        step = int(state["step"])
        compensation = state.get("compensation")
        tensors = _Tensors(
            to_local(parameter.detach()),
            to_local(parameter.grad),
            to_local(state["exp_avg"]),
            to_local(state["exp_avg_sq"]),
            None if compensation is None else to_local(compensation),
        )
        if tensors.weight.numel():  # a rank may hold none of a small one
            key = torch.tensor(_signed(mix(self._noise_keys[parameter] ^ mix(step))), dtype=torch.int32)
            sizes, betas = _StepSizes.of(group, step), group["betas"]
            self._update(tensors, self._coordinates_of(parameter), key, sizes, betas, group["eps"])

    def _coordinates_of(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """For each dimension, what an index adds to the number of an element in the full parameter, modulo 2^32."""
        if parameter not in self._coordinates:
            begin, part = local_part(parameter.detach())
            strides = [math.prod(parameter.shape[dim + 1 :]) for dim in range(parameter.dim())]
            self._coordinates[parameter] = tuple(
                (torch.arange(first, first + size, device=part.device) * stride).to(torch.int32)
                for first, size, stride in zip(begin, part.shape, strides, strict=True)
            )
        return self._coordinates[parameter]


def noise_key(seed: int, name: str) -> int:
    """32 bits for a parameter of a run."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest())


def mix(value: int) -> int:
    """The hash of ``random_bits``, of one number in [0, 2^32)."""
    value = (value ^ value >> 16) * FIRST_FACTOR % 2**32
    value = (value ^ value >> 15) * SECOND_FACTOR % 2**32
    return value ^ value >> 15


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def random_bits(coordinates: Sequence[Tensor], key: Tensor) -> Tensor:
    """32 bits for each element, in int32, whose products wrap around."""
    bits = coordinates[0] + key
    for coordinate in coordinates[1:]:
        bits = bits[..., None] + coordinate
    # A shift repeats the sign, hence the masks.
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * FIRST_FACTOR
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * SECOND_FACTOR
    return bits ^ ((bits >> 15) & 0x1FFFF)


def round_stochastic(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16, away from zero with the probability that makes the mean right; ``bits`` has 16 random ones.

    What bf16 can represent stays as it is, and so do infinity and NaN, which would become another number.
    """
    return _add_and_cut(values, bits).bfloat16()


def round_nearest(values: Tensor) -> Tensor:
    """What a cast to bf16 gives, ties to even, still in fp32. The compiler leaves out a cast to bf16 and back, and so
    would find no rounding error."""
    return _add_and_cut(values, ((values.view(torch.int32) >> 16) & 1) + (LOW_BITS >> 1))


def _add_and_cut(values: Tensor, bits: Tensor) -> Tensor:
    cut = ((values.view(torch.int32) + bits) & ~LOW_BITS).view(torch.float32)
    return torch.where(values.isfinite(), cut, values)


def update(
    tensors: _Tensors,
    coordinates: Sequence[Tensor],
    key: Tensor,
    sizes: _StepSizes,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Elementwise, in fp32, and in place: one kernel if it is compiled."""
    weight, gradient, exp_avg, exp_avg_sq, compensation = tensors
    is_bf16 = weight.dtype == torch.bfloat16
    bits = random_bits(coordinates, key) if is_bf16 else None
    gradient = gradient.float()
    mean = exp_avg.float().lerp(gradient, 1 - betas[0])
    square = exp_avg_sq.float().lerp(gradient * gradient, 1 - betas[1])
    # Any two of the three sets of 16 bits have independent high bytes.
    exp_avg.copy_(mean if bits is None else round_stochastic(mean, (bits ^ (bits >> 8)) & LOW_BITS))
    exp_avg_sq.copy_(square if bits is None else round_stochastic(square, bits & LOW_BITS))
    exact = weight.float() if compensation is None else weight.float() + compensation.float()
    exact = exact * sizes.decay - sizes.step_size * mean / (square.sqrt() / sizes.bias_root + eps)
    if bits is None:
        weight.copy_(exact)
    elif compensation is None:
        weight.copy_(round_stochastic(exact, (bits >> 16) & LOW_BITS))
    else:
        rounded = round_nearest(exact)
        weight.copy_(rounded)
        compensation.copy_(exact - rounded)


def _update_in_parts(tensors: _Tensors, coordinates: tuple[Tensor, ...], *settings: Any) -> None:
    """The same for some rows at a time."""
    weight = tensors.weight
    elements = CPU_PART_ELEMENTS if weight.device.type == "cpu" else PART_ELEMENTS
    rows = max(1, elements // max(1, weight[0].numel()))
    for first in range(0, len(weight), rows):
        part = slice(first, first + rows)
        some = _Tensors(*(None if tensor is None else tensor[part] for tensor in tensors))  # type: ignore[arg-type]
        update(some, (coordinates[0][part], *coordinates[1:]), *settings)
