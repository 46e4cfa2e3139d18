"""The run of one island: which island this process is, the directory of its run, and its connection to the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict

import torch.distributed as dist
from torch import Tensor

from zero2all.checkpoint import RankGroup, RunIdentity
from zero2all.checkpoint.state_dict import local_shard
from zero2all.environment import ISLAND_VARIABLE, ISLANDS_ENDPOINT_VARIABLE, ISLANDS_SECRET_VARIABLE
from zero2all.errors import UsageError
from zero2all.io import fingerprint
from zero2all.parallel import ParallelModel
from zero2all.recipe import Recipe
from zero2all.train.island_link import IslandPlace, NetworkLink
from zero2all.train.islands import Islands
from zero2all.train.outer_optimizer import OuterOptimizer, ReplicaShare
from zero2all.workspace import MAX_NAME_PARTS

START_PATIENCE = 120.0  # seconds that a start waits for all islands; who comes later takes over the state of the others


def island_place(recipe: Recipe) -> IslandPlace | None:
    """None if the recipe has one island: then nothing is exchanged."""
    islands = recipe.parallel.islands
    if islands == 1:
        if ISLAND_VARIABLE in os.environ:
            raise UsageError("--island is for recipes with parallel.sync.islands > 1")
        return None
    if ISLAND_VARIABLE not in os.environ:
        raise UsageError(
            f"the recipe has {islands} islands (parallel.sync.islands): start 'z2a launch --rendezvous-only', "
            "then each of them with 'z2a launch --island NUMBER --islands-endpoint HOST:PORT -- train RECIPE'"
        )
    island = int(os.environ[ISLAND_VARIABLE])
    if island >= islands:
        raise UsageError(f"--island {island}: parallel.sync.islands is {islands}, and they are numbered from 0")
    return IslandPlace(island, islands, os.environ[ISLANDS_ENDPOINT_VARIABLE], os.environ[ISLANDS_SECRET_VARIABLE])


def with_island_run(recipe: Recipe, place: IslandPlace | None) -> Recipe:
    """With a run directory of its own: ``run/island-0``. A recipe that was stored there has it already."""
    if place is None or recipe.run.endswith(_suffix(place)):
        return recipe
    if recipe.run.count("/") + 1 >= MAX_NAME_PARTS:
        raise UsageError(f"run: {recipe.run} has no room for the directories of islands: give it fewer parts")
    return recipe.model_copy(update={"run": recipe.run + _suffix(place)})


def _suffix(place: IslandPlace) -> str:
    return f"/island-{place.island}"


def build_outer_optimizer(recipe: Recipe, model: ParallelModel) -> OuterOptimizer:
    mesh, share = model.mesh, None
    if mesh.dims.dp_replicate > 1:
        group = mesh.get_mesh("dp_replicate").get_group()

        def add_up(own: Tensor) -> Tensor:
            total = own.to(mesh.device)
            dist.all_reduce(total, group=group)
            return total.cpu()

        share = ReplicaShare(mesh.coordinate("dp_replicate"), mesh.dims.dp_replicate, add_up)
    return OuterOptimizer(model.model, model.config.num_hidden_layers, recipe.parallel.sync, share)


def connect_islands(
    place: IslandPlace,
    recipe: Recipe,
    identity: RunIdentity,
    total_steps: int,
    model: ParallelModel,
    outer: OuterOptimizer,
    on_wait: Callable[[], None],
    is_stopping: Callable[[], bool],
) -> Islands:
    """Called on all ranks; the other islands are met in ``Islands.start``."""
    ranks = RankGroup()  # of its own: exchanges run in a thread
    names = {name: tensor for fragment in outer.fragments for name, tensor in fragment.weights.items()}
    layout = [(name, list(local_shard(tensor).shape), str(tensor.dtype)) for name, tensor in names.items()]
    same = {
        "parallel layout": ranks.gather(lambda: fingerprint(layout), fingerprint),
        "parallel.sync": fingerprint(recipe.parallel.sync.model_dump(mode="json")),
        "model": fingerprint(identity.model),
        "tokenizer": identity.tokenizer,
        "data": fingerprint([asdict(stage) for stage in identity.stages]),
        "optimizer": identity.optimizer,
        "seed": str(recipe.seed),
        "number of steps": str(total_steps),
    }
    link = NetworkLink(
        place, f"{recipe.name}/{recipe.run.removesuffix(_suffix(place))}", same, ranks,
        patience=START_PATIENCE, on_wait=on_wait, is_stopping=is_stopping,
    )  # fmt: skip
    counts = {name: model.replica_count(tensor) for name, tensor in names.items()}
    return Islands(outer, link, total_steps, counts, on_wait)
