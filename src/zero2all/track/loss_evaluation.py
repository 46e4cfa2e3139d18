"""The result of an evaluation of the loss, as the run record and ``z2a eval loss --json`` have it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class LossMetrics:
    """The loss on some text. What records of earlier versions lack is None.

    Bits per byte do not depend on the vocabulary, so that models with different tokenizers can be compared; loss and
    perplexity do.
    """

    bits_per_byte: float
    bytes: int
    """Of the text that was scored."""
    loss: float | None = None
    """Nats per token."""
    perplexity: float | None = None
    """exp(loss), if that is a number."""
    tokens: int | None = None
    """Tokens that were scored: all but end-of-text tokens."""
    num_documents: int | None = None
    bits_per_byte_error: float | None = None
    """Standard error of bits per byte over documents; None for a single document that is too short to divide."""
    loss_error: float | None = None
    """Standard error of the loss over documents."""
    unigram_bits_per_byte: float | None = None
    """Of a model that gives each token its share of the training tokens; None without training tokens."""
    below_unigram: float | None = None
    """By which share the model is better than that."""


@dataclass(frozen=True, kw_only=True)
class LossEvaluation(LossMetrics):
    """The loss over all sources of the validation set; where there is none, over all test sets."""

    sources: dict[str, LossMetrics]
    """By source of the validation set."""
    test_sets: dict[str, LossMetrics] = field(default_factory=dict)
    scoring: str | None = None
    """How the text was divided, in words."""
