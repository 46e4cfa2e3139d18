"""Every costly operation of the model in several forms: a plain reference, and fast ones that give the same result.

A recipe names a form for each (``model.ops``) or leaves it to ``auto``, which takes the first one that runs here.

>>> ops = choose(ModelConfig(vocab_size=320), torch.device("cpu"))
>>> ops["attention"].form
'sdpa'
"""

from zero2all.model.ops import flop_formulas as flop_formulas  # for FlopCounterMode, which asks torch
from zero2all.model.ops.attention import document_starts
from zero2all.model.ops.registry import OPS, Choice, Ops, choose

__all__ = ["OPS", "Choice", "Ops", "choose", "document_starts"]
