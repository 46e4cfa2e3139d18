"""Silent corruption: copies of the same state on several ranks must be equal to the bit."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.errors import Z2aError
from zero2all.resilience.state import local


def compare_copies(tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """An error that names the tensor and the rank where one copy is not as the others.

    It is done before a state is kept, so that every state that was kept is one in which all copies agreed.
    """
    parts = [(name, local(tensor)) for name, tensor in tensors.items() if not name.startswith("rng.")]
    hashes = torch.stack(
        [torch.hash_tensor(part) if part.numel() else part.new_zeros((), dtype=torch.uint64) for _, part in parts]
    ).view(torch.int64)
    found = [torch.empty_like(hashes) for _ in range(group.size())]
    dist.all_gather(found, hashes, group=group)
    together = torch.stack(found)
    differ = (together != together[0]).any(dim=0).nonzero().flatten().tolist()
    if differ:
        ranks = dist.get_process_group_ranks(group)
        raise Z2aError(difference(parts[differ[0]][0], len(differ), together[:, differ[0]].tolist(), ranks))


def difference(name: str, tensors: int, hashes: list[int], ranks: list[int]) -> str:
    """In words: the odd ones out if most agree, else all of them."""
    [(common, count), *_] = Counter(hashes).most_common()
    odd = [rank for rank, value in zip(ranks, hashes, strict=True) if value != common]
    if 2 * count <= len(hashes):
        who = f"on ranks {' and '.join(map(str, ranks))}, and no majority says which is right"
    else:
        who = f"on rank {' and '.join(map(str, odd))}, unlike on the {count} others"
    more = f" (and {tensors - 1} other tensors)" if tensors > 1 else ""
    return (
        f"copies of the model differ: {name}{more} is another {who}. Memory or arithmetic failed without a word. "
        "The state kept last is from before it, and the same command goes on from there; if it happens again, leave "
        "that machine out"
    )
