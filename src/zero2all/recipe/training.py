"""How a model is trained: length, batch, stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from zero2all.base.plugins import PluginSpec, loaded_plugin
from zero2all.base.units import Duration
from zero2all.recipe.model import RopeScaling
from zero2all.recipe.objective import ObjectiveRecipe
from zero2all.recipe.objective_plugin import Conversations
from zero2all.recipe.optimizer import LATER_SCHEDULE, ExtensionRecipe, OptimizerRecipe, ScheduleRecipe
from zero2all.recipe.source_names import SourceReference
from zero2all.recipe.types import (
    AnyDir,
    Count,
    DurationField,
    Mistake,
    PluginChoice,
    Positive,
    Section,
    Slug,
    require_chosen,
)

Float8Scaling = Literal["tensorwise", "rowwise"]


class GuardRecipe(Section):
    """Loss-spike guard: what happens when a loss or gradient norm is an outlier or not finite."""

    policy: Literal["warn", "skip", "rollback"] = "warn"
    """The response to an outlier. warn: log it, and stop on a non-finite value. skip: skip the update of that step.
    rollback: restore the last checkpoint before it and skip the steps around it. Change it to rollback for a long run
    that nobody watches."""
    threshold: Positive = 8.0
    """A value more than this many robust standard deviations from the rolling median is an outlier. Smaller changes
    than 10% of the loss or a factor of 5 in the gradient norm never count. Raise it if the guard fires on good data."""
    window: int = Field(64, ge=24)
    """Number of recent steps over which the standard deviation is estimated. Raise it if the guard fires on steps that
    are no noisier than earlier ones."""
    skip: int = Field(8, ge=3)
    """Number of steps skipped after a rollback, including the two before the outlier. Raise it if the next steps are
    outliers too."""


class BatchRampRecipe(Section):
    """Linear ramp of the batch size, in whole samples."""

    start: Count
    """Batch size of the first step, in tokens. Raise it if the loss is noisy in the first steps."""
    over: DurationField
    """Length of the ramp; tokens and epochs are counted in full batches. Raise it if the loss still falls fast at its
    end."""


ONLY_STAGE = "main"  # the name of the stage of a recipe without stages
LENGTH_KEYS = ("steps", "tokens", "epochs")


class TrainLength(Section):
    """How long something is trained, as exactly one of steps, tokens or epochs."""

    steps: Count | None = None
    """Length in optimizer steps. Set it for trials and comparisons."""
    tokens: Count | None = None
    """Length in tokens. Set it to pretrain; ``z2a plan`` prints the compute-optimal number."""
    epochs: Positive | None = None
    """Length in passes over the data. Set it to fine-tune on a small corpus."""

    @property
    def given_lengths(self) -> list[str]:
        return [name for name in LENGTH_KEYS if getattr(self, name) is not None]

    @property
    def duration(self) -> Duration:
        if self.steps is not None:
            return Duration(self.steps, "steps")
        return Duration(self.tokens, "tokens") if self.tokens is not None else Duration(self.epochs or 0, "epochs")


class StageRecipe(TrainLength):
    """One stage of a run, such as long context or annealing. Fields that are not set are as in ``train``."""

    name: Slug
    """Name of the stage. It seeds the sample order, so that every stage draws different samples. Leave it once the
    stage has started."""
    seq_len: Count | None = None
    """Sequence length. Default: as in ``train``. Set it in a later stage for long context."""
    batch_tokens: Count | None = None
    """Tokens in one step, over all devices. Default: as in ``train``. Raise it if the loss of this stage is noisy from
    step to step."""
    micro_batch_tokens: Count | None = None
    """Tokens in one forward pass of one device. Default: as in ``train``, unless the stage sets seq_len. Set it then to
    what fits into memory."""
    mixture: dict[SourceReference, Positive] | None = None
    """Sampling weight of each source. Default: as in ``train``. Set it in the last stage, to anneal on the best
    sources."""
    max_epochs: Positive | None = None
    """Maximum number of epochs of any one source. Default: as in ``train``. Set it if the stage gives a small source a
    large weight."""
    schedule: ScheduleRecipe | None = None
    """Learning-rate schedule. Default: ``train.schedule`` in the first stage, then the constant rate at which the
    previous stage ended."""
    rope_theta: Positive | None = None
    """Value of ``model.rope_theta`` from this stage on. Raise it in a stage with longer sequences."""
    rope_scaling: RopeScaling | None = None
    """Value of ``model.rope_scaling`` from this stage on."""

    def mistakes(self) -> Iterator[Mistake]:
        if len(self.given_lengths) != 1:
            yield Mistake(
                f"give exactly one of steps, tokens, epochs (given: {', '.join(self.given_lengths) or 'none'})",
                LENGTH_KEYS,
            )


@dataclass(frozen=True)
class ResolvedStage:
    """A stage with every field filled in."""

    name: str
    duration: Duration
    seq_len: int
    given_batch_tokens: int | None
    """None until it is chosen."""
    micro_batch_tokens: int | None
    batch_ramp: BatchRampRecipe | None
    mixture: dict[str, float]
    max_epochs: float | None
    schedule: ScheduleRecipe
    extensions: tuple[ExtensionRecipe, ...]
    rope_theta: float | None
    rope_scaling: RopeScaling | None

    @property
    def batch_tokens(self) -> int:
        return require_chosen(self.given_batch_tokens, "train.batch_tokens")


class TrainRecipe(TrainLength):
    """How the model is trained. Set the length as exactly one of steps, tokens or epochs, or set stages."""

    _OMITTED = frozenset({"callbacks"})

    init: AnyDir | None = None
    """Pretrained weights to start from: the directory of a run (its newest checkpoint), a checkpoint, or a Hugging Face
    model in safetensors (Llama, Qwen2, Qwen3, Qwen3-MoE, GLM-4-MoE). ``model`` must match them; tokens of an extended
    tokenizer get new rows. Set it to fine-tune or to continue pretraining, from step 0 with a new optimizer. Default:
    random weights."""
    objective: ObjectiveRecipe = ObjectiveRecipe()
    """What the model is trained for."""
    stages: list[StageRecipe] = []
    """Stages of the run, each with its own length; the other fields of ``train`` are their defaults."""
    seq_len: Count = 512
    """Sequence length: tokens in one sample. Raise it if documents or conversations are longer and memory allows."""
    batch_tokens: Count | None = None
    """Tokens in one step, over all devices. Default: chosen for the number of tokens; the log and the recipe of the run
    have the value. Raise it if the loss is noisy from step to step, or the network limits the step."""
    micro_batch_tokens: Count | Literal["auto"] | None = None
    """Tokens in one forward pass of one device (micro-batch). The gradient is accumulated over the micro-batches of a
    step. auto chooses the largest that fits into memory; the log and the recipe of the run have the value. Default: one
    micro-batch, or with pp at most two per pipeline stage. Lower it if memory runs out."""
    batch_ramp: BatchRampRecipe | None = None
    """Ramp the batch size up from a smaller one at the beginning of the run, in its first stage."""
    mixture: dict[SourceReference, Positive] = {}
    """Sampling weight of each source; sources that are not listed are not used. Default: all sources, by size. Set it
    if a small source matters more than its size."""
    max_epochs: Positive | None = None
    """With a mixture: maximum number of epochs of any one source in a stage. The other sources fill its share. Set it,
    such as to 4, if a small source has a large weight."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device to train on. auto uses a CUDA GPU if there is one, otherwise the CPU. Set it to mps for the GPU of a Mac,
    in one process; auto does not select it, because no run has been made on one yet."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Compute dtype. bf16 and fp16 use autocast with fp32 weights; fp16 also scales the loss. auto selects bf16 if the
    device supports it natively, otherwise fp16 on CUDA GPUs, and fp32 on CPUs and on mps. With the weights of
    adamw-bf16, auto is bf16 on every device. Set it to fp32 to rule out rounding."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block with torch.compile. auto compiles on CUDA; it tries one block first, and if that fails, it
    warns with the reason and trains without. Turn it off for a run of few steps, and on for a long one on CPU."""
    float8: Float8Scaling | None = None
    """Compute the matrix products of the blocks in float8, with one scale for each tensor (tensorwise, faster) or each
    row (rowwise, closer to bf16). Weights and optimizer stay as they are. It needs torchao and a GPU with float8 (H100,
    L40S); a CPU emulates it. Default: off. Set it if matrix products of a compiled model limit the step."""
    document_mask: bool = False
    """Mask attention across documents: tokens attend only to their own document, which starts at its end-of-text token.
    Positions are counted from there. Turn it on if a long sequence holds many unrelated documents."""
    deterministic: bool = False
    """Use deterministic operations if available; this is slower on GPUs. It sets CUBLAS_WORKSPACE_CONFIG, and asks
    flash-attn for its deterministic backward. Turn it on if runs on GPUs must match bit by bit."""
    callbacks: list[Annotated[PluginSpec, PluginChoice("callback")]] = []
    """Callbacks that see every step, such as metrics of your own: each the name of an installed plugin, or
    ``module:Class``, alone or as a mapping with ``name`` and options. Add one to record or to check what zero2all does
    not."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    """The optimizer and its hyperparameters."""
    schedule: ScheduleRecipe = ScheduleRecipe()
    """The learning-rate schedule."""
    extensions: list[ExtensionRecipe] = []
    """Changes of the schedule of stages that had begun, in the order of their steps. ``z2a train --extend`` writes them
    to the recipe in the run directory, and a resumed run takes them from there."""
    guard: GuardRecipe = GuardRecipe()
    """The loss-spike guard."""

    def mistakes(self) -> Iterator[Mistake]:
        keys = (*LENGTH_KEYS, "stages")
        if self.stages and self.given_lengths:
            yield Mistake(f"{self.given_lengths[0]} and stages: with stages, each has its own length", keys)
        if not self.stages and len(self.given_lengths) != 1:
            given = ", ".join(self.given_lengths) or "none"
            yield Mistake(f"give exactly one of steps, tokens, epochs, or stages (given: {given})", keys)
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            yield Mistake("two stages share a name", ("stages",))
        extended = [extension.step for extension in self.extensions]
        if extended != sorted(set(extended)):
            yield Mistake("extensions must be in the order of their steps", ("extensions",))
        for extension in self.extensions:
            if extension.stage not in (names or [ONLY_STAGE]):
                yield Mistake(f"extensions names {extension.stage}, which is not a stage", ("extensions", "stages"))
        is_loaded = loaded_plugin("optimizer", self.optimizer.name) is not None
        if self.precision in ("fp32", "fp16") and is_loaded and self.optimizer.has_bf16_weights:
            yield Mistake(
                f"the weights of {self.optimizer.name} are in bf16, so precision: {self.precision} cannot compute with "
                "them: set precision: bf16, or optimizer.name: adamw",
                ("precision", "optimizer.name"),
            )
        if (loaded := self.objective.loaded) and loaded.needs_reference(self.objective) and self.init is None:
            yield Mistake(
                f"objective {self.objective.name} compares the model to the one it began as: set init",
                ("init", "objective.name"),
            )
        yield from self._batch_mistakes()

    def _batch_mistakes(self) -> Iterator[Mistake]:
        for number, own in enumerate(self.stages):
            if self.micro_batch_tokens == "auto" and own.seq_len and not own.micro_batch_tokens:
                yield Mistake(
                    f"stage {own.name}: micro_batch_tokens=auto is chosen for train.seq_len: set micro_batch_tokens of "
                    "the stage too",
                    (f"stages.{number}.micro_batch_tokens", f"stages.{number}.seq_len", "micro_batch_tokens"),
                )
        seen = set()  # what several stages inherit is one mistake
        for number, stage in enumerate(self.resolved_stages()):
            where = f"stage {stage.name}: " if self.stages else ""
            for field, tokens in (
                ("batch_tokens", stage.given_batch_tokens or 0),
                ("micro_batch_tokens", stage.micro_batch_tokens or 0),
                ("batch_ramp.start", stage.batch_ramp.start if stage.batch_ramp else 0),
            ):
                if tokens % stage.seq_len and (field, tokens, stage.seq_len) not in seen:
                    seen.add((field, tokens, stage.seq_len))
                    yield Mistake(
                        f"{where}{field} ({tokens}) must be a multiple of seq_len ({stage.seq_len})",
                        _stage_keys(number, field, "seq_len"),
                    )
            batch_tokens = stage.given_batch_tokens
            if stage.batch_ramp and batch_tokens is not None and stage.batch_ramp.start > batch_tokens:
                yield Mistake(
                    f"{where}batch_ramp.start ({stage.batch_ramp.start}) is more than batch_tokens ({batch_tokens})",
                    ("batch_ramp.start", *_stage_keys(number, "batch_tokens")),
                )

    @property
    def compute_precision(self) -> str:
        """``precision``, where weights in bf16 leave ``auto`` no choice."""
        return "bf16" if self.optimizer.has_bf16_weights else self.precision

    @property
    def masks_documents(self) -> bool:
        """Whether attention stays inside documents."""
        return self.document_mask or self.objective.conversations != "cut"

    @property
    def end_of_text_first(self) -> bool:
        """Whether a document begins at the end-of-text token before it. No program puts one before a conversation."""
        return self.objective.conversations == "cut"

    @property
    def conversations(self) -> Conversations:
        """How conversations are read."""
        return self.objective.conversations

    @property
    def mixture_names(self) -> set[str]:
        """The sources that any stage names; empty if one trains on all of them."""
        mixtures = [stage.mixture for stage in self.resolved_stages()]
        return {name for mixture in mixtures for name in mixture} if all(mixtures) else set()

    @property
    def tokens_per_step(self) -> int:
        return require_chosen(self.batch_tokens, "train.batch_tokens")

    @property
    def effective_micro_batch_tokens(self) -> int:
        return self._given_micro_batch_tokens or self.tokens_per_step

    @property
    def _given_micro_batch_tokens(self) -> int | None:
        """None also until auto is chosen."""
        return None if self.micro_batch_tokens == "auto" else self.micro_batch_tokens

    @property
    def batch_samples(self) -> int:
        return self.tokens_per_step // self.seq_len

    def resolved_stages(self) -> list[ResolvedStage]:
        """The stages with every field filled in; a run without a list of them is one stage called main."""
        # Not validated again: a recipe whose mistakes are being collected may have two lengths.
        main = StageRecipe.model_construct(
            name=ONLY_STAGE, steps=self.steps, tokens=self.tokens, epochs=self.epochs, schedule=self.schedule
        )
        given = self.stages or [main]
        return [self._resolve(stage, first=number == 0) for number, stage in enumerate(given)]

    def keys_by_seq_len(self) -> dict[int, tuple[str, ...]]:
        """Every sequence length of the run, with the keys of the recipe that it may be from."""
        return {
            stage.seq_len: tuple(f"train.{key}" for key in _stage_keys(number, "seq_len"))
            for number, stage in enumerate(self.resolved_stages())
        }

    def _resolve(self, stage: StageRecipe, *, first: bool) -> ResolvedStage:
        # A micro-batch is what fits into memory at one sequence length; another length has to set its own.
        micro = stage.micro_batch_tokens or (None if stage.seq_len else self._given_micro_batch_tokens)
        return ResolvedStage(
            name=stage.name,
            duration=stage.duration,
            seq_len=stage.seq_len or self.seq_len,
            given_batch_tokens=stage.batch_tokens or self.batch_tokens,
            micro_batch_tokens=micro,
            batch_ramp=self.batch_ramp if first else None,
            mixture=self.mixture if stage.mixture is None else stage.mixture,
            max_epochs=stage.max_epochs or self.max_epochs,
            schedule=stage.schedule or (self.schedule if first else LATER_SCHEDULE),
            extensions=tuple(extension for extension in self.extensions if extension.stage == stage.name),
            rope_theta=stage.rope_theta,
            rope_scaling=stage.rope_scaling,
        )


def _stage_keys(number: int, *fields: str) -> tuple[str, ...]:
    """The keys in ``train`` that a stage may have its fields from: its own, then those that it inherits."""
    return tuple(key for field in fields for key in (f"stages.{number}.{field}", field))
