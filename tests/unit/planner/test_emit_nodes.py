"""Which node and GPU every rank of a plan gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.planner.emit_plans import KINDS, LAUNCH, MODEL, context_parallel_plan, even_plan, make_plan
from tools.planner.costs.build import seats
from tools.planner.costs.candidate import Group
from tools.planner.costs.candidate import Stage as Stage_
from tools.planner.emit.nodes import NodeKind, components, place, task_ranks
from tools.planner.emit.options import node_kinds
from tools.planner.emit.scripts import het_sbatch, plain_obstacle
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup, SlurmSettings


def test_nodes_are_filled_in_rank_order() -> None:
    nodes = place(even_plan(), KINDS)
    assert [(n.kind, n.ranks, n.host) for n in nodes] == [
        ("big", (0, 1, 2, 3), "n1"),
        ("small", (4, 5), "n3"),
        ("small", (6, 7), "n4"),
    ]
    assert [(c.kind, c.per_node, len(c.nodes)) for c in components(nodes, KINDS)] == [("big", 4, 1), ("small", 2, 2)]


def test_a_tp_group_never_straddles_nodes() -> None:
    plan = make_plan(((4,), [((0,), (0, 1, 2, 3), "small")]), ((4,), [((1, 2), (0, 1, 2, 3), "small")]))
    assert [n.ranks for n in place(plan, KINDS)] == [(0,), (1, 2)]


def test_all_ranks_of_context_parallel_replicas_get_a_device() -> None:
    """On nodes of two GPUs the parts of a sequence are on two nodes; a TP group is not."""
    assert [(n.kind, n.ranks) for n in place(context_parallel_plan(), KINDS)] == [
        ("big", (0, 1, 2, 3)),
        ("small", (4, 5)),
        ("small", (6, 7)),
    ]
    with pytest.raises(PlannerError, match="4 of them, more than the cluster has"):
        place(context_parallel_plan(), {**KINDS, "small": NodeKind(devices=2, count=1)})


def test_ranks_of_a_node_need_not_be_neighbours() -> None:
    plan = make_plan(
        ((4,), [((0, 1), (0, 1), "small"), ((2, 3), (2, 3), "big")]), ((4,), [((4, 5), (0, 1, 2, 3), "big")])
    )
    kinds = {**KINDS, "small": NodeKind(devices=2, count=1)}
    nodes = place(plan, kinds)
    assert [n.ranks for n in nodes] == [(0, 1), (2, 3, 4, 5)]
    assert task_ranks(components(nodes, kinds)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({"big": KINDS["big"]}, "no such GPU"),
        ({**KINDS, "small": NodeKind(devices=1)}, "does not fit a node with 1 devices"),
        ({**KINDS, "small": NodeKind(devices=2, count=1)}, "4 of them, more than the cluster has"),
    ],
)
def test_bad_clusters_are_named(kinds: dict[str, NodeKind], words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        place(even_plan(), kinds)


def group(gpu: str, count: int, devices: int, hosts: tuple[str, ...] = (), **slurm: str) -> NodeGroup:
    return NodeGroup(gpu=gpu, count=count, gpus_per_node=devices, hosts=hosts, slurm=SlurmSettings(**slurm))


def a100(ranks: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...], str]]:
    return [(ranks, (0, 1, 2, 3), "A100-40")]


def test_groups_of_one_gpu_keep_their_own_nodes_and_settings() -> None:
    """Nodes of 4 and of 8 GPUs in two partitions: what needs 8 gets them, with the right names."""
    cluster = Cluster(
        nodes=(
            group("A100-40", 2, 4, ("a1", "a2"), partition="small", constraint="four"),
            group("A100-40", 1, 8, ("b1",), partition="large", constraint="eight"),
        )
    )
    kinds = node_kinds(cluster)
    wide = replace(MODEL, num_attention_heads=8, num_query_groups=8)
    plan = replace(make_plan(((4,), a100((0, 1))), ((4,), a100(tuple(range(2, 10))))), model=wide)
    nodes = place(plan, kinds)
    assert [(n.host, len(n.ranks)) for n in nodes] == [("a1", 2), ("b1", 8)]
    text = het_sbatch(nodes, kinds, LAUNCH)
    assert "--ntasks-per-node=2 --partition=small --constraint=four" in text
    assert "--ntasks-per-node=8 --partition=large --constraint=eight" in text
    assert "different numbers of GPUs" in plain_obstacle(nodes, kinds)
    with pytest.raises(PlannerError, match="TP group of 8 does not fit a node with 4"):
        place(plan, node_kinds(Cluster(nodes=cluster.nodes[:1])))


def test_accounts_and_resources_of_groups_are_their_own() -> None:
    cluster = Cluster(
        nodes=(
            group("A100-40", 1, 4, account="x", constraint="c", gres="gpu:a100"),
            group("A100-40", 1, 4, account="y", constraint="d", gres="gpu:sxm"),
        )
    )
    kinds = node_kinds(cluster)
    nodes = place(make_plan(((4,), a100((0, 1, 2, 3))), ((4,), a100((4, 5, 6, 7)))), kinds)
    text = het_sbatch(nodes, kinds, LAUNCH)
    assert "--constraint=c --account=x --gres=gpu:a100:4" in text
    assert "--constraint=d --account=y --gres=gpu:sxm:4" in text
    assert "partitions or accounts" in plain_obstacle(nodes, kinds)


def test_groups_that_the_launcher_cannot_tell_apart_are_one_component() -> None:
    cluster = Cluster(nodes=(group("A100-40", 1, 4), group("A100-40", 1, 8)))
    kinds = node_kinds(cluster)
    nodes = place(make_plan(((4,), a100((0, 1, 2, 3))), ((4,), a100((4, 5, 6, 7)))), kinds)
    assert [(c.per_node, len(c.nodes)) for c in components(nodes, kinds)] == [(4, 2)]
    assert plain_obstacle(nodes, kinds) == "" and "hetjob" not in het_sbatch(nodes, kinds, LAUNCH)


def test_nodes_are_filled_as_the_planner_fills_them() -> None:
    """TP 1, three of TP 2, TP 1 on two nodes of 4: neither leaves a gap."""
    cluster = Cluster(nodes=(group("A100-40", 2, 4),))
    pairs = [((1, 2), (0, 1), "A100-40"), ((3, 4), (2,), "A100-40"), ((5, 6), (3,), "A100-40")]
    plan = make_plan(((2,), a100((0,))), ((4,), pairs), ((2,), a100((7,))))
    nodes = place(plan, node_kinds(cluster))
    assert [n.ranks for n in nodes] == [(0, 1, 2, 7), (3, 4, 5, 6)]
    stages = (Stage_(2, (Group(0, 1, 1),)), Stage_(4, (Group(0, 2, 3),)), Stage_(2, (Group(0, 1, 1),)))
    seated = [seat for stage in seats(cluster, stages) or () for replica in stage for seat in replica]
    assert [{r for r in range(8) if seated[r].node == n} for n in (0, 1)] == [set(n.ranks) for n in nodes]


def test_large_groups_find_their_nodes_after_small_ones() -> None:
    """Two single GPUs and two of TP 4 on two nodes of 5."""
    single = [((0,), (0, 1), "big"), ((1,), (2, 3), "big")]
    quads = [((2, 3, 4, 5), (0, 1), "big"), ((6, 7, 8, 9), (2, 3), "big")]
    nodes = place(make_plan(((4,), single), ((4,), quads)), {"big": NodeKind(5, 2)})
    assert [n.ranks for n in nodes] == [(0, 2, 3, 4, 5), (1, 6, 7, 8, 9)]
    with pytest.raises(PlannerError, match="do not fit into the cluster's nodes"):
        place(make_plan(((4,), single), ((4,), quads)), {"big": NodeKind(4, 1), "rest": NodeKind(3, 2, gpu="big")})
