"""The Z2all decoder as single-device code, its operations, and its mapping to standard Hugging Face architectures."""

from zero2all.model.cache import KVCache
from zero2all.model.grow import grow_embeddings
from zero2all.model.hf import export_hf, load_hf
from zero2all.model.hf_config import why_not_hf
from zero2all.model.ops import document_starts
from zero2all.model.ops.forms import IGNORE
from zero2all.model.z2all import Z2all

__all__ = [
    "IGNORE",
    "KVCache",
    "Z2all",
    "document_starts",
    "export_hf",
    "grow_embeddings",
    "load_hf",
    "why_not_hf",
]
