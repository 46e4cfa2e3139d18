"""Objectives: what is minimized. The losses beyond the loss of each token are functions of log-probabilities.

Shapes: B rows, S sequence, Q completions of a row (padded), P pairs of a row.
"""
