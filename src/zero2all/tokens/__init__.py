"""Documents to token shards, and the order in which training sees them.

>>> samples = Samples.open(Path("runs/quickstart/tokens"), "train", seq_len=512, seed=1234)
>>> samples.tokens(0, 8).shape
(8, 513)
"""

from zero2all.tokens.build import build_tokens
from zero2all.tokens.order import SampleOrder
from zero2all.tokens.samples import SamplePart, Samples
from zero2all.tokens.store import TokenShard, TokenStore
from zero2all.tokens.verify import check_store

__all__ = ["SampleOrder", "SamplePart", "Samples", "TokenShard", "TokenStore", "build_tokens", "check_store"]
