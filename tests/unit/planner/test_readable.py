"""What people read: tables at 80 columns, alternatives that differ in kind, the even split of stock Megatron."""

import io

import pytest
from rich.console import Console

from testing.planner_cases import estimator_of, model_of
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Experts
from tools.planner.report.analysis import alternatives, best_even_split, differences, stock_plans
from tools.planner.report.tables import plans_tables, summary, summary_tables
from tools.planner.search.outcome import Found, SearchResult

MODEL = model_of(layers=12, hidden=2048, ffn=5632, tokens=2048, batch=48, micro_batch_sizes=(1, 2))


def estimator(*nodes: NodeGroup, model: Model = MODEL) -> Estimator:
    nodes = nodes or (
        NodeGroup(gpu="A100-40", count=1, gpus_per_node=8, zone="northamerica-northeast1-b"),
        NodeGroup(gpu="RTX-3090", count=3, gpus_per_node=1, zone="northamerica-northeast1-c"),
    )
    return estimator_of(Cluster(nodes=nodes), model)


def plan(*stages: tuple[int, int, int, int], **changes: object) -> Candidate:
    return Candidate(tuple(Stage(n, (Group(p, tp, k),)) for n, p, tp, k in stages), 1, **changes)


def printed(*tables: object) -> str:
    console = Console(width=80, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.file.getvalue()


BEST = plan((6, 0, 1, 4), (6, 0, 1, 4))
OTHERS = {
    "one layer": plan((7, 0, 1, 4), (5, 0, 1, 4)),
    "3 stages, 1 of 3 RTX-3090": plan((5, 0, 1, 4), (5, 0, 1, 4), (2, 1, 1, 1)),
    "more layers": plan((4, 0, 1, 4), (6, 0, 1, 4), (2, 1, 1, 1)),
    "TP 2 on A100-40": plan((6, 0, 2, 2), (6, 0, 2, 2)),
    "schedule interleaved": plan((6, 0, 1, 4), (6, 0, 1, 4), schedule="interleaved", chunks=2),
    "2 stages, no RTX-3090": BEST,
}


def found(mine: Estimator, candidate: Candidate, seconds: float) -> Found:
    estimate = mine.estimate(candidate)
    assert estimate is not None
    return Found(candidate, estimate, seconds)


def test_alternatives_differ_in_kind():
    """Neither duplicates nor plans with other layers only; each says how it differs and what it costs."""
    mine = estimator()
    best = found(mine, BEST, 1.0)
    others = [found(mine, c, 1.1 + i / 10) for i, c in enumerate(OTHERS.values())]
    rows = alternatives(mine, SearchResult("auto", [best, best, *others, *others]), best)
    assert [r["what"] for r in rows] == ["3 stages, 1 of 3 RTX-3090", "TP 2 on A100-40", "schedule interleaved"]
    assert [r["ratio"] for r in rows] == pytest.approx([1.2, 1.4, 1.5])
    assert all(r["gpus"] and r["plan"] and r["usd_per_iteration"] >= 0 for r in rows)
    assert differences(mine, OTHERS["more layers"], BEST) == "2 stages, no RTX-3090"
    sharded = found(mine, plan((12, 0, 1, 8), zero_stage=3), 0.9)
    assert not sharded.runnable and alternatives(mine, SearchResult("poplar", [sharded, best]), best) == []


def test_nothing_is_cut_off_at_80_columns():
    mine = estimator()
    c = OTHERS["3 stages, 1 of 3 RTX-3090"]
    body = summary(mine, c, mine.estimate(c), 1.25)
    body["stages"][0] |= {"fits": False, "state_share": 0.125}
    rows = alternatives(mine, SearchResult("auto", [found(mine, c, 1.0)]), found(mine, BEST, 1.0))
    text = printed(*summary_tables(body), *plans_tables("Plans of other kinds", "differs by", rows))
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    for word in ("replicas", "layers", "microbatches", "needed", "largest", "iteration", "ratio", "A100-40"):
        assert word in text
    assert "northamerica-northeast1-b" in text and "TOO MUCH" in text
    assert 0 < (share := body["model_flops_utilisation"]) < 1 and f"MFU {100 * share:.1f} %" in text


def test_stock_plans_are_even():
    """One TP size inside the nodes, equal stages of equal width, batches that divide."""
    mine = estimator()
    plans = list(stock_plans(mine))
    assert len({c.gpus().get(1, 0) for c in plans}) > 1  # parts of the cluster
    assert {g.tp for c in plans for s in c.stages for g in s.groups} == {1, 2, 4, 8}
    for c in plans:
        widths = {sum(g.count for g in s.groups) for s in c.stages}
        assert len(widths) == len({s.layers for s in c.stages}) == 1
        assert len({g.tp for s in c.stages for g in s.groups}) == 1 and c.even
        assert MODEL.global_batch_size % (c.micro_batch_size * widths.pop()) == 0
        assert all(g.tp == 1 for s in c.stages for g in s.groups if g.pool == 1)  # its nodes have one GPU


def test_a_baseline_exists_where_not_all_gpus_can_be_used():
    """11 GPUs divide neither 12 layers nor a batch of 48; 8 of them, or TP, do."""
    mine = estimator()
    even = best_even_split(mine)
    assert even is not None and mine.fits(even[1]) and even[0].world_size < 11
    assert even[1].iteration_s == min(
        e.iteration_s for c in stock_plans(mine) if (e := mine.estimate(c)) and mine.fits(e)
    )


def test_the_baseline_divides_experts_over_replicas():
    """As stock Megatron does, which then takes less time than with experts inside TP groups."""
    shape = {"experts": Experts(count=8, top_k=2, ffn_hidden_size=14336), "num_layers": 8, "sequence_parallel": True}
    large = MODEL.model_copy(update=shape)
    mine = estimator(NodeGroup(gpu="H100-SXM", count=2, gpus_per_node=8, network_bytes_per_s=50e9), model=large)
    even = best_even_split(mine)
    assert even is not None and even[0].across_replicas
    inside = [mine.estimate(c) for c in stock_plans(mine) if not c.across_replicas]
    assert even[1].iteration_s < min(e.iteration_s for e in inside if e and mine.fits(e))


def test_the_baseline_uses_tp_where_one_gpu_is_too_small():
    shape = {"num_layers": 7, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64}
    nodes = NodeGroup(gpu="A100-40", count=2, gpus_per_node=8)
    even = best_even_split(estimator(nodes, model=MODEL.model_copy(update=shape)))
    assert even is not None and even[0].stages[0].groups[0].tp > 1
