"""The Z2all decoder as single-device code, its operations, and its mapping to standard Hugging Face architectures."""

from zero2all.model.hf import export_hf, load_hf
from zero2all.model.hf_config import hf_incompatibility
from zero2all.model.hf_weights import HFWeights
from zero2all.model.inputs import ModelInputs
from zero2all.model.kv_cache import KVCache
from zero2all.model.ops import document_starts
from zero2all.model.ops.kernels import IGNORE_INDEX
from zero2all.model.weights import StoredWeights, grow_embeddings, load_model
from zero2all.model.z2all import Z2all

__all__ = [
    "IGNORE_INDEX",
    "HFWeights",
    "KVCache",
    "ModelInputs",
    "StoredWeights",
    "Z2all",
    "document_starts",
    "export_hf",
    "grow_embeddings",
    "hf_incompatibility",
    "load_hf",
    "load_model",
]
