"""The built-in objectives: one file for each, whose name is the objective's.

A recipe is validated with them, so they import torch and its like only where they build.
"""
