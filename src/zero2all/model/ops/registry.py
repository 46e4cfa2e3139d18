"""Which form of each operation is used, and why not another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zero2all.errors import UsageError
from zero2all.model.ops import attention, cross_entropy, experts, norm, rope, swiglu
from zero2all.model.ops.forms import Form
from zero2all.recipe import ModelConfig

# Forms of each operation, the one that auto likes best first.
OPS: dict[str, dict[str, Form]] = {
    "attention": attention.FORMS,
    "norm": norm.FORMS,
    "rope": rope.FORMS,
    "swiglu": swiglu.FORMS,
    "cross_entropy": cross_entropy.FORMS,
    "experts": experts.FORMS,
}


@dataclass(frozen=True)
class Choice:
    """One row of the table: what computes an operation, and for each other form why it does not."""

    op: str
    form: str
    others: dict[str, str]

    def __str__(self) -> str:
        others = "; ".join(f"{form}: {why}" for form, why in self.others.items())
        return f"{self.op} {self.form}" + (f" ({others})" if others else "")


class Ops:
    """The chosen functions by their operation's name (``ops.norm(...)``), and the table of choices behind them."""

    attention: attention.AttentionForm
    norm: norm.Norm
    rope: rope.Rope
    swiglu: swiglu.SwiGLU
    cross_entropy: cross_entropy.CrossEntropy
    experts: experts.Experts

    def __init__(self, choices: list[Choice]) -> None:
        self.table = tuple(choices)
        for choice in choices:
            setattr(self, choice.op, OPS[choice.op][choice.form].load())

    def __getitem__(self, op: str) -> Choice:
        return next(choice for choice in self.table if choice.op == op)


def choose(config: ModelConfig, device: torch.device, deterministic: bool | None = None) -> Ops:
    """The forms that the recipe names, or where it says auto the first that runs on the device.

    ``deterministic`` leaves only those that give the same bits every time; if not given, it is as torch is set.
    """
    wanted: dict[str, Any] = config.ops.model_dump()
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    strict = deterministic and device.type == "cuda"
    return Ops([_choose(op, forms, wanted[op], config, device, strict) for op, forms in OPS.items()])


def _choose(
    op: str, forms: dict[str, Form], wanted: str, config: ModelConfig, device: torch.device, strict: bool
) -> Choice:
    reasons = {
        name: form.why_not(device, config) or (form.not_deterministic if strict else None)
        for name, form in forms.items()
    }
    if wanted == "auto":
        chosen = next(name for name, reason in reasons.items() if reason is None)
        otherwise = f"{chosen} comes first"
    else:
        chosen, otherwise = wanted, "the recipe names another"
        if reasons[chosen] is not None:
            remedy = f"try model.ops.{op}=auto"
            if reasons[chosen] == forms[chosen].not_deterministic:
                remedy += ", or train.deterministic=false"
            raise UsageError(f"model.ops.{op}={chosen} cannot be used: {reasons[chosen]}; {remedy}")
    others = {name: reason or otherwise for name, reason in reasons.items() if name != chosen}
    return Choice(op, chosen, others)
