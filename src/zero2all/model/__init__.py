"""The Z2all decoder as single-device code, and its export to standard Hugging Face architectures."""

from zero2all.model.grow import grow_embeddings
from zero2all.model.hf import export_hf
from zero2all.model.z2all import KVCache, Z2all

__all__ = ["KVCache", "Z2all", "export_hf", "grow_embeddings"]
