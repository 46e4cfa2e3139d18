"""Silent data corruption: replicas of the same state on several ranks must be bitwise equal."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.checkpoint.state_dict import OWN_STATE, local_shard
from zero2all.errors import Z2aError


def check_replicas(tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Raise an error that names the tensor and the rank whose replica differs.

    Runs before a state is saved, so that in every saved state all replicas agreed.
    """
    shards = [(name, local_shard(tensor)) for name, tensor in tensors.items() if not name.startswith(OWN_STATE)]
    hashes = torch.stack(
        [torch.hash_tensor(shard) if shard.numel() else shard.new_zeros((), dtype=torch.uint64) for _, shard in shards]
    ).view(torch.int64)
    gathered = [torch.empty_like(hashes) for _ in range(group.size())]
    dist.all_gather(gathered, hashes, group=group)
    all_hashes = torch.stack(gathered)
    mismatched = (all_hashes != all_hashes[0]).any(dim=0).nonzero().flatten().tolist()
    if mismatched:
        ranks = dist.get_process_group_ranks(group)
        raise Z2aError(
            describe_mismatch(shards[mismatched[0]][0], len(mismatched), all_hashes[:, mismatched[0]].tolist(), ranks)
        )


def describe_mismatch(name: str, mismatched_tensors: int, hashes: list[int], ranks: list[int]) -> str:
    """Names the outlier ranks if most agree, else all of them."""
    [(common, count), *_] = Counter(hashes).most_common()
    minority = [rank for rank, value in zip(ranks, hashes, strict=True) if value != common]
    if 2 * count <= len(hashes):
        who = f"on ranks {' and '.join(map(str, ranks))}, and no majority says which is right"
    else:
        who = f"on rank {' and '.join(map(str, minority))}, unlike on the {count} others"
    more = f" (and {mismatched_tensors - 1} other tensors)" if mismatched_tensors > 1 else ""
    return (
        f"copies of the model differ: {name}{more} differs {who}. Memory or arithmetic failed silently. "
        "The last saved state is from before it, and the same command resumes from there; if it happens again, exclude "
        "that machine"
    )
