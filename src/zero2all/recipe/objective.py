"""What a model is trained for: the objective and its options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zero2all.conversation import SourceKind
from zero2all.recipe.types import AnyDir, Count, Mistake, Positive, Section

ObjectiveName = Literal["pretrain", "sft", "dpo", "kto", "grpo", "distill"]
Conversations = Literal["cut", "packed", "padded", "pairs"]
"""Conversations as training reads them: cut as text is, and every token a target; or whole, and what the assistant
writes are the targets: many in a row, one in a row, or many pairs in a row."""

OBJECTIVE_KINDS: dict[ObjectiveName, tuple[SourceKind, ...]] = {
    "pretrain": ("text", "chat"),
    "sft": ("text", "chat"),
    "dpo": ("preference",),
    "kto": ("rating", "preference"),
    "grpo": ("chat",),
    "distill": ("text", "chat"),
}
"""The sources that an objective can train on."""


class DPORecipe(Section):
    """Options of the objective dpo: preference optimization with pairs of answers."""

    loss: Literal["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo"] = "sigmoid"
    """The loss. sigmoid is that of DPO (https://arxiv.org/abs/2305.18290); hinge is SLiC's; ipo
    (https://arxiv.org/abs/2310.12036) averages over tokens; robust (https://arxiv.org/abs/2403.00409) corrects for
    ``label_smoothing`` of the labels being wrong. simpo (https://arxiv.org/abs/2405.14734) and orpo
    (https://arxiv.org/abs/2403.07691) need no reference."""
    beta: Positive = 0.1
    """Strength of the preference. Larger values keep the model closer to the reference. SimPO uses 2 to 10."""
    sft_weight: Annotated[float, Field(ge=0)] | None = None
    """Weight of the mean negative log-likelihood of chosen answers. It keeps their probability from falling together
    with that of the rejected ones. Default: 1 for orpo, otherwise 0."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """For robust: the share of pairs whose labels are wrong."""
    margin: Annotated[float, Field(ge=0)] = 0.5
    """For simpo: the target difference of the rewards (gamma)."""

    @property
    def needs_reference(self) -> bool:
        return self.loss not in ("simpo", "orpo")

    @property
    def nll_weight(self) -> float:
        return (1.0 if self.loss == "orpo" else 0.0) if self.sft_weight is None else self.sft_weight

    def mistakes(self) -> Iterator[Mistake]:
        if self.label_smoothing and self.loss != "robust":
            yield Mistake("label_smoothing is for loss: robust", ("label_smoothing", "loss"))


class KTORecipe(Section):
    """Options of the objective kto: preference optimization with a label for each answer."""

    beta: Positive = 0.1
    """Strength of the preference. Larger values keep the model closer to the reference."""
    desirable_weight: Positive = 1.0
    """Weight of answers with the label true. With n times fewer of them than of the others, set n."""
    undesirable_weight: Positive = 1.0
    """Weight of answers with the label false."""


class GRPORecipe(Section):
    """Options of the objective grpo: reinforcement learning with verifiable rewards.

    A step samples ``group_size`` answers to each of ``batch_tokens / seq_len`` prompts, at temperature 1.
    """

    rewards: list[str] = []
    """Reward functions as ``package.module:function``, called with the prompt, the answer and the reference answer as
    texts; their results are added. The modules are imported, so treat a recipe from somebody else as code."""
    group_size: int = Field(8, ge=2)
    """Number of answers to a prompt, which are compared with each other."""
    loss: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """What the loss is averaged over. dapo: all tokens of a step. grpo: first the tokens of an answer, then answers.
    dr_grpo: ``max_answer_tokens`` of each answer, so that length has no influence."""
    scale_rewards: bool = True
    """Divide advantages by the standard deviation of the group."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio to the probability before the update counts down to 1 - clip_low."""
    clip_high: Positive = 0.28
    """The ratio to the probability before the update counts up to 1 + clip_high."""
    importance_cap: Positive = 2.0
    """Largest weight of a token by the ratio of its probabilities in trainer and sampler."""
    mask_truncated: bool = True
    """Leave answers out of the loss that were cut at ``max_answer_tokens``."""
    endpoint: str | None = None
    """OpenAI-compatible API that samples the answers, such as ``http://127.0.0.1:8000/v1``, by a server that returns
    token ids: ``z2a serve`` or vLLM, with one model, which has the same tokenizer. The run does not update its weights,
    so that it has to load newer checkpoints now and then; ``sampler_gap`` shows how far it is behind. Default: the
    model itself."""

    def mistakes(self) -> Iterator[Mistake]:
        for name in self.rewards:
            if not re.fullmatch(r"[\w.]+:\w+", name):
                yield Mistake(f"{name!r} must be package.module:function", ("rewards",))


class DistillRecipe(Section):
    """Options of the objective distill: learn the probabilities of a teacher.

    By default from the text of the data, with the teacher's likeliest tokens kept in ``<out>/teacher``.
    """

    teacher: AnyDir | None = None
    """The teacher: the directory of a run, of a checkpoint, or of a Hugging Face model, with the same tokenizer."""
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the distance to the teacher, KL(teacher || student); the rest is that of the right tokens."""
    top_k: Count = 32
    """Number of the teacher's likeliest tokens at each position; all others count as one. 6 bytes each on disk."""
    on_policy: bool = False
    """Learn from answers that the student samples to conversations (``kind: chat``), in place of those of the data."""


class ObjectiveRecipe(Section):
    """What the model is trained for."""

    name: ObjectiveName = "pretrain"
    """The objective. pretrain: predict every token. sft: supervised fine-tuning, which predicts what the assistant
    writes in conversations (sources of ``kind: chat``), never cuts one, and masks attention across documents; sources
    of text are trained on as in pretraining. dpo: prefer the chosen of two answers (``kind: preference``). kto: prefer
    answers with the label true (``kind: rating``, or both answers of a pair). grpo: raise the rewards of answers
    that are sampled to the last question of conversations (``kind: chat``). distill: learn from a teacher."""
    packing: bool = True
    """For sft: several conversations in a row; otherwise one, padded to ``seq_len``, which is slower."""
    max_answer_tokens: Count = 256
    """Maximum length of a sampled answer, for grpo and distill with on_policy. Raise it if many answers are cut."""
    dpo: DPORecipe = DPORecipe()
    """Options of dpo."""
    kto: KTORecipe = KTORecipe()
    """Options of kto."""
    grpo: GRPORecipe = GRPORecipe()
    """Options of grpo."""
    distill: DistillRecipe = DistillRecipe()
    """Options of distill."""

    @property
    def kinds(self) -> tuple[SourceKind, ...]:
        """The sources that it can train on."""
        return ("chat",) if self.name == "distill" and self.distill.on_policy else OBJECTIVE_KINDS[self.name]

    @property
    def is_chat(self) -> bool:
        """Whether the model learns to answer, so that a prompt is what a chat template renders."""
        return self.conversations != "cut"

    @property
    def conversations(self) -> Conversations:
        """How conversations are read."""
        if self.name == "pretrain" or (self.name == "distill" and not self.distill.on_policy):
            return "cut"
        if self.name == "dpo":
            return "pairs"
        if self.name in ("grpo", "distill"):
            return "padded"
        return "packed" if self.packing else "padded"

    def mistakes(self) -> Iterator[Mistake]:
        if self.name == "grpo" and not self.grpo.rewards:
            yield Mistake("objective grpo needs at least one reward function", ("grpo.rewards", "name"))
        if self.name == "distill" and self.distill.teacher is None:
            yield Mistake("objective distill needs a teacher", ("distill.teacher", "name"))

    @property
    def compares_answers(self) -> bool:
        """Whether the loss depends on log-probabilities of whole answers, not of each token alone."""
        return self.name in ("dpo", "kto")

    @property
    def weighs_tokens(self) -> bool:
        """Whether tokens have different weights, so that losses are not simply added."""
        return self.compares_answers or self.name == "grpo"

    @property
    def needs_reference(self) -> bool:
        """Whether answers are compared to those of the initial model."""
        return self.name == "kto" or (self.name == "dpo" and self.dpo.needs_reference)
