"""Documents to token shards, and the order in which training sees them.

>>> dataset = PackedDataset.open(Path("runs/quickstart/tokens"), "train", seq_len=512, seed=1234)
>>> dataset.tokens(0, 8).shape
(8, 513)
"""

from zero2all.tokens.build_store import build_tokens
from zero2all.tokens.inspect import opening_prompts
from zero2all.tokens.manifest import BuiltStore
from zero2all.tokens.packed_dataset import DocumentSpan, EstimatedStore, PackedDataset, estimate_source_tokens
from zero2all.tokens.sample_order import SampleOrder
from zero2all.tokens.token_store import TokenShard, TokenStore
from zero2all.tokens.verify import verify_store

__all__ = [
    "BuiltStore",
    "DocumentSpan",
    "EstimatedStore",
    "PackedDataset",
    "SampleOrder",
    "TokenShard",
    "TokenStore",
    "build_tokens",
    "estimate_source_tokens",
    "opening_prompts",
    "verify_store",
]
