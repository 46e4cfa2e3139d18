"""Evaluation of trained models: bits per byte on the validation set."""

from zero2all.evals.bits_per_byte import evaluate_bpb
from zero2all.evals.target import EvalTarget, open_target

__all__ = ["EvalTarget", "evaluate_bpb", "open_target"]
