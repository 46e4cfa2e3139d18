"""Runs Python code that nobody has read, such as code written by a model, with limits and without access."""

from zero2all.sandbox.backends import Limits
from zero2all.sandbox.sandbox import CodeResult, Sandbox, open_sandbox

__all__ = ["CodeResult", "Limits", "Sandbox", "open_sandbox"]
