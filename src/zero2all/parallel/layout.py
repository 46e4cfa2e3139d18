"""Which rank does what: the sizes of a layout, the device mesh, and the samples that a rank reads."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zero2all.errors import UsageError
from zero2all.parallel.store import store_of_ranks
from zero2all.recipe import ParallelRecipe

TIMEOUT = timedelta(minutes=15)  # of a collective: longer than the agent's hang watch, which explains what it sees


@dataclass(frozen=True)
class Sizes:
    """
    >>> Sizes.of(ParallelRecipe(tp=2), world=8)
    Sizes(pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=1)
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, recipe: ParallelRecipe, world: int) -> Sizes:
        """The recipe's sizes for so many ranks, ``auto`` filled in."""
        wanted = {"pp": recipe.pp, "cp": recipe.cp, "tp": recipe.tp}
        wanted |= {
            name: size
            for name, size in (("dp_replicate", recipe.dp_replicate), ("dp_shard", recipe.dp_shard))
            if size != "auto"
        }
        product = math.prod(wanted.values())
        spelled = " x ".join(f"{name} {size}" for name, size in wanted.items() if size > 1) or "1"
        left = {name: world // product for name in ("dp_replicate", "dp_shard") if name not in wanted}
        if world % product or (not left and world != product):
            raise UsageError(
                f"parallel: {spelled} = {product} ranks, but there are {world}: start {product} with "
                f"'z2a launch --procs {product}', or change the sizes"
            )
        sizes = cls(**wanted, **left, ep=recipe.ep)
        if (sizes.dp_shard * sizes.cp) % sizes.ep:
            raise UsageError(
                f"parallel.ep ({sizes.ep}) must divide dp_shard x cp ({sizes.dp_shard * sizes.cp}), "
                "whose ranks share the experts"
            )
        return sizes

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in asdict(self).items() if size > 1) or "one process"


class Layout:
    """The ranks of a run on a mesh with the dimensions pp, dp_replicate, dp_shard, cp and tp; tp ranks are neighbours.

    >>> layout = Layout.start(ParallelRecipe(tp=2), torch.device("cpu"))  # on each rank that 'z2a launch' started
    >>> first, last = layout.samples(batch_samples=16)
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        """Every rank of a process group makes the same one; one process needs no group."""
        self.sizes, self.device = sizes, device
        self._joined = False
        self._mesh: DeviceMesh | None = None
        self._experts: DeviceMesh | None = None
        if sizes.world > 1:
            dimensions = {name: getattr(sizes, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
            self._mesh = _mesh(device, dimensions, keep="dp_shard")
        if sizes.ep > 1:
            # The same ranks seen another way: those of dp_shard and cp hold different experts, or shards of the same.
            shards = sizes.dp_shard * sizes.cp // sizes.ep
            dimensions = {
                "pp": sizes.pp,
                "dp_replicate": sizes.dp_replicate,
                "expert_shard": shards,
                "ep": sizes.ep,
                "tp": sizes.tp,
            }
            self._experts = _mesh(device, dimensions, keep="expert_shard")

    @classmethod
    def start(cls, recipe: ParallelRecipe, device: torch.device) -> Layout:
        """Join the process group that the launcher describes in the environment, if it is not joined, or be alone."""
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        sizes, joined = Sizes.of(recipe, world), False
        if world > 1 and not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            store = store_of_ranks(TIMEOUT)
            rank = -1 if store is None else int(os.environ["RANK"])
            dist.init_process_group(
                backend, timeout=TIMEOUT, store=store, rank=rank, world_size=-1 if rank < 0 else world
            )
            joined = True
        layout = cls(sizes, device)
        layout._joined = joined
        return layout

    @property
    def rank(self) -> int:
        return dist.get_rank() if self._mesh is not None else 0

    @property
    def dp_rank(self) -> int:
        """Which slice of every batch is this rank's."""
        return self.at("dp_replicate") * self.sizes.dp_shard + self.at("dp_shard")

    def at(self, dimension: str) -> int:
        """This rank's coordinate."""
        return 0 if getattr(self.sizes, dimension) == 1 else self.mesh(dimension).get_local_rank()

    def mesh(self, *dimensions: str) -> DeviceMesh:
        """The part of the mesh that this rank shares along some dimensions of more than one rank."""
        assert self._mesh is not None, "one process has no mesh"
        return self._mesh[dimensions]

    def shard_mesh(self) -> DeviceMesh:
        """The ranks whose gradients are added up: copies if there are any, then shards. Ranks of cp are shards too."""
        if self.sizes.cp == 1:
            shards = self.mesh("dp_shard")
        else:
            shards = self.mesh("cp") if self.sizes.dp_shard == 1 else self.mesh("dp_shard", "cp")._flatten("shards")
        if self.sizes.dp_replicate == 1:
            return shards
        return DeviceMesh._concatenate([self.mesh("dp_replicate"), shards])

    def experts_mesh(self) -> DeviceMesh:
        """The ranks that share the experts."""
        assert self._experts is not None, "parallel.ep is 1"
        return self._experts["ep"]

    def experts_shard_mesh(self) -> DeviceMesh:
        """The ranks that hold the same experts: copies if there are any, then shards."""
        assert self._experts is not None, "parallel.ep is 1"
        copies = ("dp_replicate",) if self.sizes.dp_replicate > 1 else ()
        return self._experts[(*copies, "expert_shard")]

    def samples(self, batch_samples: int) -> tuple[int, int]:
        """The slice [first, last) of a batch's samples that this rank reads; tp, cp and pp ranks read the same."""
        return share(batch_samples, self.dp_rank, self.sizes.dp)

    def close(self) -> None:
        """Leave the process group, if it was joined here."""
        if self._joined and dist.is_initialized():
            dist.destroy_process_group()


def share(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """The part [first, last) of so many things that falls to a rank: any number of ranks may share any number."""
    return count * rank // ranks, count * (rank + 1) // ranks


def _mesh(device: torch.device, dimensions: dict[str, int], keep: str) -> DeviceMesh:
    """A mesh of the dimensions with more than one rank, and one to keep: each costs a process group and its threads."""
    used = {name: size for name, size in dimensions.items() if size > 1 or name == keep}
    return init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))
