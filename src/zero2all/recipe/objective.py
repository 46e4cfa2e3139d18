"""What a model is trained for: the objective and its options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from zero2all.base.conversation import SourceKind
from zero2all.base.plugins import (
    BoundPlugin,
    PluginSpec,
    bind,
    loaded_plugin,
    name_problem,
    spec_problems,
    split_spec,
)
from zero2all.recipe.objective_plugin import Conversations, ObjectivePlugin
from zero2all.recipe.types import AnyDir, Count, Mistake, PluginChoice, PluginName, Positive, Section


class DPORecipe(Section):
    """Options of the objective dpo: preference optimization, with preference pairs."""

    loss: Literal["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo"] = "sigmoid"
    """The loss. sigmoid is DPO (https://arxiv.org/abs/2305.18290); hinge is SLiC's; ipo
    (https://arxiv.org/abs/2310.12036) averages over tokens; robust (https://arxiv.org/abs/2403.00409) corrects for
    ``label_smoothing`` of the labels being wrong. simpo (https://arxiv.org/abs/2405.14734) and orpo
    (https://arxiv.org/abs/2403.07691) need no reference. Change it to robust if labels are noisy, or to compare
    losses."""
    beta: Positive = 0.1
    """Strength of the preference. Raise it if the model departs too far from the reference; SimPO uses 2 to 10."""
    sft_weight: Annotated[float, Field(ge=0)] | None = None
    """Weight of the mean negative log-likelihood of chosen completions. Raise it if ``logps/chosen`` falls together
    with ``logps/rejected``. Default: 1 for orpo, otherwise 0."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """For robust: the share of pairs whose labels are wrong. Set it to the share that you find in a sample."""
    margin: Annotated[float, Field(ge=0)] = 0.5
    """For simpo: the target difference of the rewards (gamma). Change it with ``beta``; half of it is a usual start."""

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
    """Options of the objective kto: preference optimization with a label for each completion."""

    beta: Positive = 0.1
    """Strength of the preference. Raise it if the model departs too far from the reference."""
    desirable_weight: Positive = 1.0
    """Weight of completions with the label true. Set it to n if there are n times fewer of them than of the others."""
    undesirable_weight: Positive = 1.0
    """Weight of completions with the label false. Set it to n if there are n times fewer of them than of the others."""


class GRPORecipe(Section):
    """Options of the objective grpo: reinforcement learning with verifiable rewards.

    A step samples ``group_size`` completions to each of ``batch_tokens / seq_len`` prompts, at temperature 1.
    """

    rewards: list[Annotated[PluginSpec, PluginChoice("reward")]] = []
    """Reward functions: each ``package.module:function``, the name of an installed plugin, or a mapping with ``name``
    and options. They are called with the prompt, the completion and the reference answer as texts, and their results
    are added. The modules are imported, so treat a recipe from somebody else as code. Set it for grpo, which needs at
    least one."""
    group_size: int = Field(8, ge=2)
    """Number of completions to a prompt, which are compared with each other. Raise it if ``groups_without_spread`` is
    high."""
    loss: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """What the loss is averaged over. dapo: all tokens of a step. grpo: first the tokens of a completion, then
    completions. dr_grpo: ``max_answer_tokens`` of each completion, so that length has no influence. Change it to
    dr_grpo if completions grow longer but no better."""
    scale_rewards: bool = True
    """Divide advantages by the standard deviation of the group. Turn it off if groups with almost equal rewards
    dominate the gradient."""
    importance_cap: Positive = 2.0
    """Largest weight of a token by the ratio of its probabilities in trainer and sampler. Lower it if training is
    unstable because ``endpoint`` is far behind."""
    mask_truncated: bool = True
    """Leave completions out of the loss that were cut at ``max_answer_tokens``. Turn it off if all completions are cut
    and you cannot raise that length."""
    endpoint: str | None = None
    """OpenAI-compatible API that samples the completions, such as ``http://127.0.0.1:8000/v1``. The server (``z2a
    serve``, vLLM) returns token ids and has one model, with the same tokenizer. The run does not update its weights:
    load newer checkpoints when ``sampler_gap`` grows. Set it if sampling takes most of a step. Default: the model
    itself."""

    def mistakes(self) -> Iterator[Mistake]:
        for spec in self.rewards:
            name, _ = split_spec(spec)
            if not re.fullmatch(r"[\w.]+:\w+", name) and (":" in name or name_problem("reward", name)):
                yield Mistake(f"{name!r} must be package.module:function, or an installed function", ("rewards",))


class DistillRecipe(Section):
    """Options of the objective distill: learn the probabilities of a teacher.

    By default from the text of the data, with the teacher's likeliest tokens kept in ``<out>/teacher``.
    """

    teacher: AnyDir | None = None
    """The teacher: the directory of a run, of a checkpoint, or of a Hugging Face model, with the same tokenizer. Set it
    for distill, which needs one."""
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the distance to the teacher, KL(teacher || student); the rest is the loss of the right tokens. Raise it
    if the data is noisy, and lower it if the teacher is weak."""
    top_k: Count = 32
    """Number of the teacher's likeliest tokens at each position; all others count as one. 6 bytes each on disk. Raise
    it if they miss much of the teacher's probability, and lower it to save disk."""
    on_policy: bool = False
    """Learn from completions that the student samples to conversations (``kind: chat``), instead of the completions in
    the data. Turn it on if the loss is low but sampled completions are bad."""


class ObjectiveRecipe(Section):
    """What the model is trained for."""

    _OMITTED = frozenset({"options"})

    name: Annotated[str, PluginName("objective")] = "pretrain"
    """The objective: a built-in one, the name of an installed plugin, or ``module:Class``. pretrain: predict every
    token. sft: predict what the assistant writes in whole conversations (``kind: chat``); text is trained on as in
    pretraining. dpo: prefer the chosen of two completions (``kind: preference``). kto: prefer completions with the
    label true (``kind: rating``, or both of a pair). grpo: raise the rewards of sampled completions (``kind: chat``).
    distill: learn from a teacher. Change it once a pretrained model exists (``train.init``)."""
    packing: bool = True
    """For sft: several conversations in a row; otherwise one, padded to ``seq_len``, which is slower. Turn it off only
    to compare: it does not change the loss of a conversation."""
    max_answer_tokens: Count = 256
    """Maximum length of a sampled completion, for grpo and distill with on_policy. Raise it if many completions are
    cut."""
    dpo: DPORecipe = DPORecipe()
    """Options of dpo."""
    kto: KTORecipe = KTORecipe()
    """Options of kto."""
    grpo: GRPORecipe = GRPORecipe()
    """Options of grpo."""
    distill: DistillRecipe = DistillRecipe()
    """Options of distill."""
    options: dict[str, Any] = {}
    """Options of an objective that is a plugin, by their names. Set those that it documents."""

    @property
    def spec(self) -> PluginSpec:
        return {**self.options, "name": self.name}

    @property
    def bound(self) -> BoundPlugin:
        return bind("objective", self.spec)

    @property
    def plugin(self) -> ObjectivePlugin:
        """The registration of the objective, whose module is imported."""
        plugin: ObjectivePlugin = self.bound()
        return plugin

    @property
    def loaded(self) -> ObjectivePlugin | None:
        """The same, or None if its module would have to be imported: rules over a recipe import nothing."""
        is_loaded = loaded_plugin("objective", self.name) is not None
        return self.plugin if is_loaded and not spec_problems("objective", self.spec) else None

    @property
    def kinds(self) -> tuple[SourceKind, ...]:
        """The sources that it can train on."""
        return self.plugin.kinds(self)

    @property
    def is_chat(self) -> bool:
        """Whether the model learns to answer, so that a prompt is what a chat template renders."""
        return self.conversations != "cut"

    @property
    def conversations(self) -> Conversations:
        """How conversations are read."""
        return self.plugin.conversations(self)

    @property
    def compares_completions(self) -> bool:
        """Whether the loss depends on log-probabilities of whole completions, not of each token alone."""
        return self.plugin.compares_completions

    @property
    def weighs_tokens(self) -> bool:
        """Whether tokens have different weights, so that losses are not simply added."""
        return self.plugin.weighs_tokens

    @property
    def needs_reference(self) -> bool:
        """Whether completions are compared with the initial model's."""
        return self.plugin.needs_reference(self)

    def mistakes(self) -> Iterator[Mistake]:
        return iter(()) if self.loaded is None else self.loaded.mistakes(self)
