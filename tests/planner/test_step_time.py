from __future__ import annotations

import pytest

from zero2all.base.errors import UsageError
from zero2all.base.machine.gpu_specs import GPUS, find_gpu
from zero2all.planner.cluster import Cluster, CommunicationGroup
from zero2all.planner.pipeline import bubble_fraction, schedule_runs, simulate
from zero2all.planner.plan import plan_run
from zero2all.recipe import ParallelRecipe, load_recipe_or_preset
from zero2all.recipe.parallel import PipelineSchedule


@pytest.mark.parametrize("name", GPUS)
def test_data_sheets_are_complete_and_plausible(name: str) -> None:
    gpu = GPUS[name]
    assert find_gpu(name.upper()) is gpu
    assert all(find_gpu(alias.lower()) is gpu for alias in gpu.aliases)
    assert 0.35 < gpu.efficiency < 0.65
    assert gpu.network_bandwidth <= gpu.link_bandwidth < gpu.memory_bandwidth < gpu.flops
    assert gpu.fp8_flops is None or gpu.fp8_flops == pytest.approx(2 * gpu.flops, rel=0.05)
    assert gpu.source
    assert gpu.matmul_source


def test_an_unknown_gpu_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="no data sheet of 'GTX'"):
        find_gpu("GTX")


def test_ring_and_tree() -> None:
    """A ring sends (p - 1) / p of the tensor; its hops make a tree faster for a small tensor on many ranks."""
    group = CommunicationGroup(1024, "network", bandwidth=25e9, latency=1e-5, in_node=1, card=25e9)
    assert group.sent_bytes("all-reduce", 1e9) == pytest.approx(2e9, rel=0.01)
    assert group.tree_seconds(1e6) < group.ring_seconds(1e6, 2)
    assert group.ring_seconds(1e11, 2) < group.tree_seconds(1e11) * 1.01
    assert group.seconds("all-reduce", 1e6) == group.tree_seconds(1e6)
    assert CommunicationGroup(1, "", 1.0, 1.0, 1, 1.0).seconds("all-reduce", 1e9) == 0


def test_a_group_inside_a_node_has_its_link() -> None:
    cluster = Cluster.of(GPUS["A800"], 64, network_bandwidth=25e9)
    assert cluster.group(8, 1).link == "NVLink 3"
    assert cluster.group(8, 8).bandwidth == pytest.approx(0.8 * 25e9)
    assert cluster.group(64, 1).bandwidth == pytest.approx(0.8 * 8 * 25e9)  # all network cards of a node
    assert cluster.group(8, 4).link == "network"
    # Rings leave a node through all its cards; an all-to-all and a send have one card for each GPU.
    assert cluster.group(64, 1).seconds("all-to-all", 1e9) == pytest.approx(1e9 * 56 / 64 / (0.8 * 25e9), rel=0.05)
    assert cluster.group(4, 2).seconds("send", 1e9) == pytest.approx(1e9 / (0.8 * 200e9), rel=0.01)
    assert cluster.group(4, 8).seconds("send", 1e9) == pytest.approx(1e9 / (0.8 * 25e9), rel=0.01)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
@pytest.mark.parametrize("pp", [2, 3, 4, 6])
def test_the_bubble_of_a_plan_is_that_of_the_schedule_it_draws(schedule: PipelineSchedule, pp: int) -> None:
    parallel = ParallelRecipe(pp=pp, schedule=schedule)
    for micro_batches in range(1, 6 * pp + 2):
        if schedule_runs(schedule, pp, micro_batches):
            expected = bubble_fraction(schedule, pp, micro_batches, parallel.stages_per_rank)
            assert simulate(parallel, micro_batches).bubble == pytest.approx(expected, abs=1e-9), micro_batches


def test_many_micro_batches_have_the_published_bubbles() -> None:
    """(pp - 1) / (stages x micro-batches), of which a split backward fills two thirds."""
    assert bubble_fraction("interleaved", 4, 16, 2) == pytest.approx(3 / 32)
    assert bubble_fraction("zero-bubble", 4, 16, 2) == bubble_fraction("zbv", 4, 16, 2) == pytest.approx(1 / 32)
    assert bubble_fraction("zbv", 4, 4, 2) == pytest.approx(9 / 24)  # few micro-batches leave nothing to fill it with


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 5), (4, 16)])
def test_no_rank_does_two_things_at_once(schedule: PipelineSchedule, pp: int, micro_batches: int) -> None:
    timeline = simulate(ParallelRecipe(pp=pp, schedule=schedule), micro_batches)
    ends = [0] * pp
    for one in timeline.passes:
        assert one.start >= ends[one.rank]
        ends[one.rank] = one.end


def test_time_is_a_range_and_parts_add_up() -> None:
    overrides = ["parallel.tp=2", "parallel.pp=2", "train.batch_tokens=512Ki", "train.micro_batch_tokens=4Ki"]
    recipe = load_recipe_or_preset("z2all-1.1b", [*overrides, "train.precision=bf16"])
    step = plan_run(recipe, Cluster.of(GPUS["H100"], 16)).step
    assert step.shortest <= step.expected <= step.longest
    assert step.compute == pytest.approx(sum(part.seconds for part in step.parts))
    assert step.longest == pytest.approx((step.compute + step.communication) * (1 + step.bubble))
    assert {one.dimension for one in step.traffic} == {"dp_shard", "tp", "pp"}
    products = {part.name: part for part in step.parts}
    assert products["feed-forward"].bound == "compute"
    assert products["optimizer update"].bound == "memory"


def test_a_slower_network_and_recomputation_cost_time() -> None:
    def expected(net: float, *more: str) -> float:
        sizes = ["train.batch_tokens=1Mi", "train.micro_batch_tokens=4Ki", "train.precision=bf16"]
        recipe = load_recipe_or_preset("z2all-1.1b", [*sizes, *more])
        return plan_run(recipe, Cluster.of(GPUS["A100"], 64, net)).step.expected

    base = expected(25e9)
    assert expected(1e9) > 1.5 * base
    full = expected(25e9, "parallel.activation_checkpointing=full")
    assert 1.15 < full / base < 1.35  # a third more FLOPs in the blocks
