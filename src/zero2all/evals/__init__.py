"""Evaluation of trained models: loss and bits per byte on the validation set and on test sets."""

from zero2all.evals.target import EvalTarget, open_target
from zero2all.evals.validation_loss import evaluate_bpb

__all__ = ["EvalTarget", "evaluate_bpb", "open_target"]
