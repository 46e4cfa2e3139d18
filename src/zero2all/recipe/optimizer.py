"""The optimizer and the learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from zero2all.base.plugins import BoundPlugin, PluginSpec, bind
from zero2all.base.units import Duration
from zero2all.recipe.optimizer_plugin import OptimizerPlugin
from zero2all.recipe.types import Count, DurationField, Fraction, PluginName, Positive, Section, Slug, require_chosen


class OptimizerRecipe(Section):
    """The optimizer and its hyperparameters."""

    _OMITTED = frozenset({"options"})

    name: Annotated[str, PluginName("optimizer")] = "adamw"
    """The optimizer: a built-in one, the name of an installed plugin, or ``module:Class``. muon: orthogonalized
    momentum for the matrices inside the blocks, AdamW for the rest. adamw-8bit: moments in 8 bits (torchao).
    adamw-bf16: weights, gradients and moments in bf16 (routers in fp32) with stochastic rounding. adamw-bf16-kahan: the
    rounding error of each weight is kept instead, in 2 bytes more. adafactor: second moment by rows and columns, no
    first. Change it if optimizer state does not fit, or to compare muon."""
    lr: Positive | None = None
    """Peak learning rate. With muon, the rate of the parameters that AdamW updates. Default: chosen for the optimizer,
    the model size and the number of tokens; the log and the recipe of the run have the value. Lower it if the loss
    diverges, or if ``train.init`` is set."""
    muon_lr: Positive | None = None
    """Peak learning rate of Muon. Default: 0.02, at which its updates suit every width. Lower it if the loss
    diverges."""
    muon_dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype in which Muon orthogonalizes an update, and in which ranks send each other its shards. bf16 is enough to
    train; with fp32 every parallel layout updates as one process does, to rounding of fp32. Change it only to compare
    layouts."""
    momentum: Fraction = 0.95
    """Momentum of Muon and SGD. Lower it if the loss oscillates."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of the moment estimates of AdamW and Lion. Adafactor's rate is 1 - step^-0.8. Raise the second one
    for very small batches, and lower it if the loss spikes."""
    eps: Positive = 1e-8
    """Epsilon of AdamW's denominator. Lower it if the gradients of a large model are not far above it."""
    weight_decay: float = Field(0.1, ge=0)
    """Weight decay of matrices; norms and biases have none. Raise it for lion, 3 to 10 times, and lower it to
    fine-tune."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this global norm. Lower it if single steps with a large ``grad_norm`` raise the loss."""
    options: dict[str, Any] = {}
    """Options of an optimizer that is a plugin, by their names. Set those that it documents."""

    def peak(self, key: str) -> float:
        rate: float = require_chosen(getattr(self, key), f"train.optimizer.{key}")
        return rate

    @property
    def peak_lr(self) -> float:
        return self.peak("lr")

    @property
    def spec(self) -> PluginSpec:
        return {**self.options, "name": self.name}

    @property
    def bound(self) -> BoundPlugin:
        return bind("optimizer", self.spec)

    @property
    def plugin(self) -> OptimizerPlugin:
        """The registration of the optimizer, whose module is imported."""
        plugin: OptimizerPlugin = self.bound()
        return plugin

    @property
    def has_bf16_weights(self) -> bool:
        """Whether the weights of the model are stored in bf16, not in fp32."""
        return self.plugin.has_bf16_weights


class ScheduleRecipe(Section):
    """Learning-rate schedule of a stage, as a multiplier of the optimizer's rate: linear warmup, then a shape."""

    _OMITTED = frozenset({"options"})

    shape: Annotated[str, PluginName("schedule")] = "cosine"
    """Shape of the decay from ``peak`` to ``min_lr_ratio``. wsd holds the peak and decays linearly over the last
    ``decay_ratio``; constant holds it to the end; inverse-sqrt decays with the square root of the step. Or the
    name of an installed plugin, or module:function. Change it to wsd or constant if you may train longer."""
    warmup: DurationField = Duration(20, "steps")
    """Length of the linear warmup. Raise it if the loss spikes or diverges early, and for large models."""
    peak: Annotated[float, Field(gt=0, le=1)] | None = None
    """Learning-rate multiplier after warmup. Default: 1 in the first stage, then where the previous stage ended. Set it
    if a later stage should warm up again."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning-rate multiplier at the last step of cosine, linear and wsd. Lower it to 0 if nothing is trained after
    this stage."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.2
    """For wsd: fraction of the stage over which the rate decays. Raise it if the loss still falls fast at the end."""
    options: dict[str, Any] = {}
    """Options of a shape that is a plugin, by their names. Set those that it documents."""


LATER_SCHEDULE = ScheduleRecipe(shape="constant", warmup=Duration(0, "steps"))
"""Default of every stage but the first."""

ExtendMode = Literal["constant", "rewarm", "as-planned"]
"""How the learning rate of a stage that has begun continues under a changed schedule."""


class ExtensionRecipe(Section):
    """A change of the learning-rate schedule of a stage that had begun, as ``z2a train --extend`` made it."""

    stage: Slug
    """Name of the stage. Leave it as ``z2a train --extend`` wrote it."""
    step: Count
    """The first step after the change, counted from the start of the run. Leave it as ``z2a train --extend`` wrote
    it."""
    mode: ExtendMode
    """The learning rate from that step to the end of the stage. constant: as in the step before. rewarm: a linear
    warmup from there to the peak, then the stage's schedule over the steps that are left. as-planned: the stage's
    schedule, as if no step had been trained with another one. Choose it with ``z2a train --extend``, not here."""
    schedule: ScheduleRecipe
    """The schedule before the change."""
    steps: Count
    """The length of the stage before the change. Leave it as ``z2a train --extend`` wrote it."""
