"""How a model is trained: optimizer, schedule, stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from zero2all.recipe.model import RopeScaling
from zero2all.recipe.types import Count, Fraction, Positive, Section, Slug, Span
from zero2all.units import Duration


class OptimizerRecipe(Section):
    """How weights are moved. Weight decay goes to matrices only, never to norms or biases."""

    name: Literal["adamw", "adamw-8bit", "muon", "lion", "sgd"] = "adamw"
    """muon: orthogonalised momentum for the matrices inside the blocks, AdamW for the rest. 8bit needs torchao."""
    lr: Positive = 3e-3
    """Peak learning rate; with muon that of AdamW."""
    muon_lr: Positive = 0.02
    """Peak learning rate of Muon."""
    momentum: Fraction = 0.95
    """Of Muon and SGD."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Of AdamW and Lion."""
    eps: Positive = 1e-8
    weight_decay: float = Field(0.1, ge=0)
    clip: Positive = 1.0
    """Longest gradient, as a global norm."""


class ScheduleRecipe(Section):
    """Learning rate over a stage, as a share of the optimizer's peak: linear warmup, then a shape."""

    shape: Literal["cosine", "linear", "constant", "inverse-sqrt", "wsd"] = "cosine"
    """How it goes from ``peak`` to ``final``. wsd holds the peak and falls linearly over the last ``decay``;
    inverse-sqrt falls with the square root of the step and never looks at ``final``."""
    warmup: Span = Duration(20, "steps")
    peak: Annotated[float, Field(gt=0, le=1)] | None = None
    """Where the shape starts; if not given 1, and in a later stage where the stage before it ended."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where it ends, at the stage's last step."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.2
    """For wsd: the share of the stage's steps in which it falls."""


class GuardRecipe(Section):
    """What happens when a loss or a gradient lies far off its course, up or down, or is not finite."""

    policy: Literal["warn", "skip", "rollback"] = "warn"
    """warn: say so, and stop where a value is not finite. skip: leave out the update of that step. rollback: go back to
    the last state from before it, and pass over the steps around it."""
    threshold: Positive = 8.0
    """How many deviations from the course are odd; they are robust ones, so that outliers do not count."""
    least_loss: Fraction = 0.1
    """A smaller difference, as a share of the loss, is never odd."""
    least_norm: Annotated[float, Field(gt=1)] = 5.0
    """A gradient norm that changed by a smaller factor is never odd."""
    window: int = Field(64, ge=24)
    """Steps that make the course."""
    skip: int = Field(8, ge=3)
    """Steps that are passed over after a rollback, the two before the odd one among them."""


class RampRecipe(Section):
    """A batch that grows evenly, in whole samples, at the beginning of a stage."""

    start: Count
    """Tokens of the first step."""
    over: Span
    """How long until the batch is whole; tokens and epochs are counted in whole batches."""


class Length(Section):
    """How long something is trained, as exactly one of steps, tokens or epochs."""

    steps: Count | None = None
    tokens: Count | None = None
    epochs: Positive | None = None

    @property
    def lengths(self) -> list[str]:
        return [name for name in ("steps", "tokens", "epochs") if getattr(self, name) is not None]

    @property
    def duration(self) -> Duration:
        if self.steps is not None:
            return Duration(self.steps, "steps")
        return Duration(self.tokens, "tokens") if self.tokens is not None else Duration(self.epochs or 0, "epochs")


class StageRecipe(Length):
    """One stretch of a run, such as long context or annealing. What it does not say is as in ``train``."""

    name: Slug
    """Seeds the order of its samples, so that every stage draws its own."""
    seq_len: Count | None = None
    batch_tokens: Count | None = None
    micro_batch_tokens: Count | None = None
    batch_ramp: RampRecipe | None = None
    mixture: dict[str, Positive] | None = None
    max_epochs: Positive | None = None
    schedule: ScheduleRecipe | None = None
    """If not given: in the first stage that of ``train``, later the rate at which the stage before it ended."""
    rope_theta: Positive | None = None
    """As in ``model``, from this stage on: a larger one for longer sequences."""
    rope_scaling: RopeScaling | None = None
    """As in ``model``, from this stage on."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if len(self.lengths) != 1:
            raise ValueError(f"give exactly one of steps, tokens, epochs (given: {', '.join(self.lengths) or 'none'})")
        return self


@dataclass(frozen=True)
class Stage:
    """A stage with nothing left to look up elsewhere."""

    name: str
    duration: Duration
    seq_len: int
    batch_tokens: int
    micro_batch_tokens: int | None
    batch_ramp: RampRecipe | None
    mixture: dict[str, float]
    max_epochs: float | None
    schedule: ScheduleRecipe
    rope_theta: float | None
    rope_scaling: RopeScaling | None


class TrainRecipe(Length):
    """The run. Give its length as exactly one of steps, tokens or epochs, or as a list of stages with theirs."""

    stages: list[StageRecipe] = []
    """A run in several stretches; the fields beside it are what a stage uses where it says nothing."""
    seq_len: Count = 512
    """Tokens in one sample."""
    batch_tokens: Count = 16384
    """Tokens in one step, over all devices."""
    micro_batch_tokens: Count | None = None
    """Tokens in one forward pass of one device; the gradient is accumulated over the rest. All if not given."""
    batch_ramp: RampRecipe | None = None
    """Begin with a smaller batch."""
    mixture: dict[str, Positive] = {}
    """Weight of each source. Empty means by size; a source that is not named is not used."""
    max_epochs: Positive | None = None
    """With a mixture: no source is gone through more often in a stage; the others take its place."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """bf16 and fp16 mean fp32 weights under autocast, fp16 with a scaled loss. auto takes bf16 where the device has it
    natively, fp16 on other GPUs, fp32 on other CPUs."""
    compile: bool = False
    """Compile each block with torch.compile."""
    document_mask: bool = False
    """Tokens see only their own document, which begins at its end-of-text token, with positions counted from there."""
    deterministic: bool = False
    """Only operations that give the same bits every time, where they exist; slower on GPUs. Sets
    CUBLAS_WORKSPACE_CONFIG, asks flash-attn for its deterministic backward, and leaves out flex attention."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    schedule: ScheduleRecipe = ScheduleRecipe()
    guard: GuardRecipe = GuardRecipe()

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.stages and self.lengths:
            raise ValueError(f"{self.lengths[0]} and stages: with stages, each has its own length")
        if not self.stages and len(self.lengths) != 1:
            raise ValueError(
                f"give exactly one of steps, tokens, epochs, or stages (given: {', '.join(self.lengths) or 'none'})"
            )
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError("two stages share a name")
        return self

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        for stage in self.resolved_stages():
            where = f"stage {stage.name}: " if self.stages else ""
            for field, tokens in (
                ("batch_tokens", stage.batch_tokens),
                ("micro_batch_tokens", stage.micro_batch_tokens or 0),
                ("batch_ramp.start", stage.batch_ramp.start if stage.batch_ramp else 0),
            ):
                if tokens % stage.seq_len:
                    raise ValueError(f"{where}{field} ({tokens}) must be a multiple of seq_len ({stage.seq_len})")
            if stage.batch_ramp and stage.batch_ramp.start > stage.batch_tokens:
                raise ValueError(f"{where}batch_ramp.start is more than batch_tokens ({stage.batch_tokens})")
        return self

    @property
    def micro_tokens(self) -> int:
        return self.micro_batch_tokens or self.batch_tokens

    @property
    def batch_samples(self) -> int:
        return self.batch_tokens // self.seq_len

    def resolved_stages(self) -> list[Stage]:
        """The stages with every field filled in; a run without a list of them is one stage called main."""
        own = {"name": "main", "schedule": self.schedule, "batch_ramp": self.batch_ramp}
        given = self.stages or [StageRecipe(**own, **{name: getattr(self, name) for name in self.lengths})]
        return [self._resolve(stage, first=number == 0) for number, stage in enumerate(given)]

    def _resolve(self, stage: StageRecipe, first: bool) -> Stage:
        batch_tokens = stage.batch_tokens or self.batch_tokens
        # A micro-batch is what fits into memory at one sequence length; another length has to say its own.
        micro = stage.micro_batch_tokens or (None if stage.seq_len else self.micro_batch_tokens)
        later = ScheduleRecipe(shape="constant", warmup=Duration(0, "steps"))
        return Stage(
            name=stage.name,
            duration=stage.duration,
            seq_len=stage.seq_len or self.seq_len,
            batch_tokens=batch_tokens,
            micro_batch_tokens=micro,
            batch_ramp=stage.batch_ramp,
            mixture=self.mixture if stage.mixture is None else stage.mixture,
            max_epochs=stage.max_epochs or self.max_epochs,
            schedule=stage.schedule or (self.schedule if first else later),
            rope_theta=stage.rope_theta,
            rope_scaling=stage.rope_scaling,
        )
