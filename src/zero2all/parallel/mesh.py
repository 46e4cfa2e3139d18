"""Parallel dimensions, the device mesh, and the samples that each rank reads: of a batch, and of a micro-batch."""

from __future__ import annotations

import math
import os
import socket
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zero2all.base.environment import collective_backend
from zero2all.base.errors import UsageError
from zero2all.base.torch_private import HashStore, Store, TCPStore, concatenate_meshes, flatten_mesh
from zero2all.recipe import ParallelRecipe, ResolvedStage

# Longer than the launcher's hang detection, which explains what it sees.
COLLECTIVE_TIMEOUT = timedelta(minutes=15)
MAX_FULL_MESH = 128  # ranks: in larger groups gloo connects two of them when they first talk, not each with every other


@dataclass(frozen=True)
class ParallelDims:
    """The size of each mesh dimension (degree of each parallelism).

    >>> ParallelDims.from_recipe(ParallelRecipe(tp=2), world_size=8)
    ParallelDims(pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=1)
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def from_recipe(cls, recipe: ParallelRecipe, world_size: int) -> ParallelDims:
        """The recipe's dimensions for this world size, ``auto`` resolved."""
        wanted = {"pp": recipe.pp, "cp": recipe.cp, "tp": recipe.tp}
        wanted |= {
            name: size
            for name, size in (("dp_replicate", recipe.dp_replicate), ("dp_shard", recipe.dp_shard))
            if size != "auto"
        }
        product = math.prod(wanted.values())
        spelled = " x ".join(f"{name} {size}" for name, size in wanted.items() if size > 1) or "1"
        left = {name: world_size // product for name in ("dp_replicate", "dp_shard") if name not in wanted}
        if world_size % product or (not left and world_size != product):
            raise UsageError(
                f"parallel: {spelled} = {product} ranks, but there are {world_size}: start {product} with "
                f"'z2a launch --nproc-per-node {product}', or change the sizes"
            )
        dims = cls(**wanted, **left, ep=recipe.ep)
        if (dims.dp_shard * dims.cp) % dims.ep:
            raise UsageError(
                f"parallel.ep ({dims.ep}) must divide dp_shard x cp ({dims.dp_shard * dims.cp}), "
                "whose ranks share the experts"
            )
        return dims

    @staticmethod
    def min_world_size(recipe: ParallelRecipe) -> int:
        """The fewest ranks that the recipe can run on.

        >>> ParallelDims.min_world_size(ParallelRecipe(tp=2, pp=2))
        4
        """
        given = [size for size in (recipe.dp_replicate, recipe.dp_shard) if isinstance(size, int)]
        experts = recipe.ep // math.gcd(recipe.ep, recipe.cp) if recipe.dp_shard == "auto" else 1
        return math.prod([recipe.pp, recipe.cp, recipe.tp, *given, experts])

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in asdict(self).items() if size > 1) or "one process"


class ParallelMesh:
    """The ranks of a run on a mesh with the dimensions pp, dp_replicate, dp_shard, cp and tp; tp ranks are neighbours.

    >>> mesh = ParallelMesh.init_distributed(ParallelRecipe(tp=2), torch.device("cpu"))  # on each rank
    >>> first, last = mesh.sample_range(batch_samples=16)
    """

    def __init__(self, dims: ParallelDims, device: torch.device, *, has_group: bool = False) -> None:
        """Every rank of a process group builds the same mesh; one process needs no group, except for FSDP: then it
        says that it has one."""
        self.dims, self.device = dims, device
        self._owns_group = False
        self._dense_mesh: DeviceMesh | None = None
        self._expert_mesh: DeviceMesh | None = None
        if dims.world_size > 1 or has_group:
            dimensions = {name: getattr(dims, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
            self._dense_mesh = _init_mesh(device, dimensions, keep="dp_shard")
        if dims.ep > 1:
            # A second mesh over the same ranks: dp_shard and cp become expert shards and ep.
            shards = dims.dp_shard * dims.cp // dims.ep
            dimensions = {
                "pp": dims.pp,
                "dp_replicate": dims.dp_replicate,
                "expert_shard": shards,
                "ep": dims.ep,
                "tp": dims.tp,
            }
            self._expert_mesh = _init_mesh(device, dimensions, keep="expert_shard")

    @classmethod
    def init_distributed(cls, recipe: ParallelRecipe, device: torch.device) -> ParallelMesh:
        """Join the process group that the launcher describes in the environment, unless joined already or alone."""
        world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        dims, owns_group = ParallelDims.from_recipe(recipe, world_size), False
        if recipe.offload != "none" and device.type not in ("cuda", "cpu"):
            raise UsageError(f"parallel.offload is for GPUs with CUDA, not {device.type}: set parallel.offload=none")
        needs_group = world_size > 1 or recipe.offload != "none"
        if needs_group and not dist.is_initialized():
            if world_size > MAX_FULL_MESH:
                os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
            backend = collective_backend(device.type)
            store = tcp_store_from_env(COLLECTIVE_TIMEOUT) if world_size > 1 else HashStore()
            rank = -1 if store is None else int(os.environ.get("RANK", "0"))
            dist.init_process_group(
                backend,
                timeout=COLLECTIVE_TIMEOUT,
                store=store,
                rank=rank,
                world_size=-1 if rank < 0 else world_size,
                # NCCL connects now, not in the first step, and the groups of the mesh are split from this one.
                device_id=device if backend.endswith("nccl") else None,
            )
            owns_group = True
        mesh = cls(dims, device, has_group=needs_group)
        mesh._owns_group = owns_group
        return mesh

    @property
    def rank(self) -> int:
        return dist.get_rank() if self._dense_mesh is not None else 0

    @property
    def dp_rank(self) -> int:
        """Which slice of every batch is this rank's."""
        return self.coordinate("dp_replicate") * self.dims.dp_shard + self.coordinate("dp_shard")

    @property
    def peers(self) -> list[int]:
        """The ranks that read the same samples as this one, with it."""
        dims, width = self.dims, self.dims.cp * self.dims.tp
        return [(stage * dims.dp + self.dp_rank) * width + place for stage in range(dims.pp) for place in range(width)]

    def coordinate(self, dimension: str) -> int:
        """This rank's coordinate."""
        return 0 if getattr(self.dims, dimension) == 1 else self.get_mesh(dimension).get_local_rank()

    def get_mesh(self, *dimensions: str) -> DeviceMesh:
        """This rank's submesh along some dimensions of more than one rank."""
        assert self._dense_mesh is not None, "one process has no mesh"
        return self._dense_mesh[dimensions]

    def fsdp_mesh(self) -> DeviceMesh:
        """The ranks whose gradients are reduced: replicas if any, then shards. Ranks of cp are shards too."""
        if self.dims.cp == 1:
            shards = self.get_mesh("dp_shard")
        elif self.dims.dp_shard == 1:
            shards = self.get_mesh("cp")
        else:
            shards = flatten_mesh(self.get_mesh("dp_shard", "cp"), "shards")
        if self.dims.dp_replicate == 1:
            return shards
        return concatenate_meshes([self.get_mesh("dp_replicate"), shards])

    def ep_mesh(self) -> DeviceMesh:
        """The ranks that hold different experts."""
        assert self._expert_mesh is not None, "parallel.ep is 1"
        return self._expert_mesh["ep"]

    def expert_fsdp_mesh(self) -> DeviceMesh:
        """The ranks that hold the same experts: replicas if any, then shards."""
        assert self._expert_mesh is not None, "parallel.ep is 1"
        replicas = ("dp_replicate",) if self.dims.dp_replicate > 1 else ()
        return self._expert_mesh[(*replicas, "expert_shard")]

    def sample_range(self, batch_samples: int) -> tuple[int, int]:
        """The slice [first, last) of a batch's samples that this rank reads; tp, cp and pp ranks read the same."""
        return shard_range(batch_samples, self.dp_rank, self.dims.dp)

    def sum_over_ranks(self, own: Tensor) -> Tensor:
        """The sum, on the CPU, of what each rank counted for itself."""
        if self.dims.world_size > 1:
            own = own.to(self.device, copy=True)
            dist.all_reduce(own)
        return own.cpu()

    def close(self) -> None:
        """Leave the process group, if it was joined here."""
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


def shard_range(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """The range [first, last) of ``count`` items that belongs to a rank; ``count`` need not divide evenly."""
    return count * rank // ranks, count * (rank + 1) // ranks


def _init_mesh(device: torch.device, dimensions: dict[str, int], keep: str) -> DeviceMesh:
    """A mesh of the dimensions with more than one rank, and one to keep: each costs a process group and its threads."""
    used = {name: size for name, size in dimensions.items() if size > 1 or name == keep}
    return init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))


@dataclass(frozen=True)
class BatchSplit:
    """The samples of a step: ``micro_batches`` x ``ranks`` x ``samples``, some of them padding."""

    micro_batches: int
    """Forward passes of a rank in one step (gradient accumulation)."""
    ranks: int
    """Data-parallel ranks."""
    samples: int
    """Samples in one forward pass of a rank."""
    padding: int
    """Samples without valid targets: every rank runs the same number of full micro-batches."""


def split_batch(batch_samples: int, ranks: int, micro_batch_size: int | None, pipeline_stages: int = 1) -> BatchSplit:
    """Without a micro-batch size, a rank has one micro-batch, or in a pipeline at most two for each stage.

    >>> split_batch(batch_samples=20, ranks=2, micro_batch_size=4)
    BatchSplit(micro_batches=3, ranks=2, samples=4, padding=4)
    """
    rows = -(-batch_samples // ranks)
    if micro_batch_size is not None:
        samples = min(micro_batch_size, rows)
    else:
        samples = even_micro_batch_size(rows, 2 * pipeline_stages) if pipeline_stages > 1 else rows
    micro_batches = -(-rows // samples)
    return BatchSplit(micro_batches, ranks, samples, micro_batches * ranks * samples - batch_samples)


def even_micro_batch_size(samples: int, wanted: int) -> int:
    """Samples in a micro-batch, so that there are ``wanted`` of them, or the next smaller even split."""
    return next(samples // count for count in range(min(wanted, samples), 0, -1) if samples % count == 0)


def split_stage(stage: ResolvedStage, parallel: ParallelRecipe, parallel_dims: ParallelDims) -> BatchSplit:
    """How a step of a training stage is split, after any batch ramp."""
    micro = stage.micro_batch_tokens and stage.micro_batch_tokens // stage.seq_len
    pipeline_stages = parallel.pp * parallel.stages_per_rank
    return split_batch(
        stage.batch_tokens // stage.seq_len, parallel_dims.dp * parallel.sync.islands, micro, pipeline_stages
    )


def tcp_store_from_env(timeout: timedelta) -> Store | None:
    """The store of the ranks of ``z2a launch``: the first one holds it. None elsewhere: torch knows what torchrun set.

    torch binds every interface. What ranks send each other may be pickled, and this store gives them their peers.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "False":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listening = _listening_socket(address, port) if rank == 0 else None
    if listening is None:
        return TCPStore(address, port, world_size, rank == 0, timeout)
    return TCPStore(address, port, world_size, True, timeout, master_listen_fd=listening.detach())


def _listening_socket(address: str, port: int) -> socket.socket | None:
    """None if it is not an address of this machine: behind NAT others reach it by one that it does not have."""
    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(4096)
    except OSError:
        listening.close()
        return None
    return listening
