"""What an objective is registered with: the data that it reads, the rules of its options, and how it is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from zero2all.base.conversation import SourceKind
from zero2all.recipe.types import Mistake

if TYPE_CHECKING:
    from zero2all.recipe.objective import ObjectiveRecipe

Conversations = Literal["cut", "packed", "padded", "pairs"]
"""Conversations as training reads them: cut as text is, and every token a target; or whole, and what the assistant
writes are the targets: many in a row, one in a row, or many pairs in a row."""


class ObjectivePlugin:
    """An objective. A subclass is registered under its name, and is instantiated with its options."""

    compares_completions: ClassVar[bool] = False
    """Whether the loss depends on log-probabilities of whole completions, not of each token alone."""
    weighs_tokens: ClassVar[bool] = False
    """Whether tokens have different weights, so that losses are not simply added."""
    is_around_zero: ClassVar[bool] = False
    """Whether the loss is close to 0 by construction, so that its changes are no spikes."""
    has_teacher: ClassVar[bool] = False
    """Whether a second model computes along with the trained one."""

    def kinds(self, recipe: ObjectiveRecipe) -> tuple[SourceKind, ...]:
        """The sources that it can train on."""
        return ("text", "chat")

    def conversations(self, recipe: ObjectiveRecipe) -> Conversations:
        """How conversations are read."""
        return "cut"

    def needs_reference(self, recipe: ObjectiveRecipe) -> bool:
        """Whether completions are compared with the initial model's."""
        return False

    def samples_per_prompt(self, recipe: ObjectiveRecipe) -> int:
        """Completions that the trained model samples for each prompt of a step."""
        return 0

    def mistakes(self, recipe: ObjectiveRecipe) -> Iterator[Mistake]:
        """Broken rules of its options."""
        return iter(())

    def build(self, inputs: Any) -> Any:
        """From ``ObjectiveInputs`` to the ``StepObjective`` of a run."""
        raise NotImplementedError
