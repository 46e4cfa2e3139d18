"""The Z2all decoder as single-device code, and its export to standard Hugging Face architectures."""

from zero2all.model.hf import export_hf
from zero2all.model.z2all import IGNORE, KVCache, Z2all

__all__ = ["IGNORE", "KVCache", "Z2all", "export_hf"]
