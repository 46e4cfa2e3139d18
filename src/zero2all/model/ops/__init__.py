"""Every expensive operation of the model has several kernels: a reference, and fast ones with the same result.

A recipe names a kernel for each (``model.ops``) or leaves it to ``auto``: the first that runs here.

>>> ops = choose_kernels(ModelConfig(vocab_size=320), torch.device("cpu"))
>>> ops["attention"].form
'sdpa'
"""

from zero2all.model.ops import flop_formulas as flop_formulas  # for FlopCounterMode, which asks torch
from zero2all.model.ops.attention import document_starts
from zero2all.model.ops.registry import OPS, KernelChoice, Ops, choose_kernels

__all__ = ["OPS", "KernelChoice", "Ops", "choose_kernels", "document_starts"]
