"""The built-in optimizers: one file for each, whose name is the optimizer's.

A recipe is validated with them, so they import torch and its like only where they build.
"""
