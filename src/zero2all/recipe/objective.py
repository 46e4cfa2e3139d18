"""What a model is trained for: the objective and its options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zero2all.conversation import SourceKind
from zero2all.recipe.types import Mistake, Positive, Section

ObjectiveName = Literal["pretrain", "sft", "dpo", "kto"]
Conversations = Literal["cut", "packed", "padded", "pairs"]
"""Conversations as training reads them: cut as text is, and every token a target; or whole, and what the assistant
writes are the targets: many in a row, one in a row, or many pairs in a row."""

OBJECTIVE_KINDS: dict[ObjectiveName, tuple[SourceKind, ...]] = {
    "pretrain": ("text", "chat"),
    "sft": ("text", "chat"),
    "dpo": ("preference",),
    "kto": ("rating", "preference"),
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


class ObjectiveRecipe(Section):
    """What the model is trained for."""

    name: ObjectiveName = "pretrain"
    """The objective. pretrain: predict every token. sft: supervised fine-tuning, which predicts what the assistant
    writes in conversations (sources of ``kind: chat``), never cuts one, and masks attention across documents; sources
    of text are trained on as in pretraining. dpo: prefer the chosen of two answers (``kind: preference``). kto: prefer
    answers with the label true (``kind: rating``, or both answers of a pair)."""
    packing: bool = True
    """For sft: several conversations in a row; otherwise one, padded to ``seq_len``, which is slower."""
    dpo: DPORecipe = DPORecipe()
    """Options of dpo."""
    kto: KTORecipe = KTORecipe()
    """Options of kto."""

    @property
    def conversations(self) -> Conversations:
        """How conversations are read."""
        if self.name == "pretrain":
            return "cut"
        if self.name == "dpo":
            return "pairs"
        return "packed" if self.packing else "padded"

    @property
    def compares_answers(self) -> bool:
        """Whether the loss depends on log-probabilities of whole answers, not of each token alone."""
        return self.name in ("dpo", "kto")

    @property
    def needs_reference(self) -> bool:
        """Whether answers are compared to those of the initial model."""
        return self.name == "kto" or (self.name == "dpo" and self.dpo.needs_reference)
