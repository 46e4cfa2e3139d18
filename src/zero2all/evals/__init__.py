"""Evaluation: bits per byte on the validation set."""

from zero2all.evals.bits_per_byte import evaluate_bpb

__all__ = ["evaluate_bpb"]
