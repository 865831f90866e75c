"""Clusters and models for tests of the search: of the Sailor and Zorse papers, small and random; and baselines."""

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import yaml

from benchmarks.published.accuracy import reference_model, reference_nodes, reference_profile
from megatron_het.plan import Plan
from tools.planner.costs.build import build_plan, candidate_of
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimate, Estimator, estimator_of
from tools.planner.costs.layer import MEGATRON_HET
from tools.planner.costs.simulation import Simulation, _Block, operations_of, simulate_candidate
from tools.planner.errors import PlannerError
from tools.planner.inputs.catalog import Gpu, catalog
from tools.planner.inputs.cluster import Cluster, NodeGroup, ZoneLink
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Experts
from tools.planner.report.analysis import even_stages
from tools.planner.report.tables import describe
from tools.planner.search.candidate_cache import LESS, CandidateCache, Groups
from tools.planner.search.finish import finish, waits_for_nobody
from tools.planner.search.methods import search
from tools.planner.search.outcome import Effort, Goal, Progress, SearchResult
from tools.planner.search.part_search import stage_options


def simulate_block(estimator: Estimator, candidate: Candidate, estimate: Estimate) -> Simulation:
    """Simulate one of the equal pipelines event by event, the exact reference of ``block_s``; raises PlannerError."""
    return _Block(estimator, candidate, estimate).placed.simulate()


# The automatic search against exhaustive enumeration on small random clusters.


SMALL_KINDS = ("A100-40", "V100-16", "T4", "RTX-3090", "A10G", "GH-96")


def random_case(seed: int, largest: int = 8) -> tuple[Cluster, Model]:
    """Up to 8 GPUs of up to 3 types, and a small model with few microbatches."""
    rng = random.Random(seed)
    kinds = rng.sample(SMALL_KINDS, rng.randint(1, 3))
    left = rng.randint(len(kinds) + 1, largest)
    nodes = []
    for i, kind in enumerate(kinds):
        most = left - (len(kinds) - 1 - i)
        gpus = rng.randint(1, most) if i + 1 < len(kinds) else most
        left -= gpus
        per_node = rng.choice([n for n in (1, 2, 4, 8) if gpus % n == 0])
        nodes.append(
            NodeGroup(
                gpu=kind,
                count=gpus // per_node,
                gpus_per_node=per_node,
                zone="lab-a",
                network_bytes_per_s=rng.choice([1.25e9, 3e9, 12.5e9, 25e9]),
            )
        )
    hidden = rng.choice([1024, 2048, 4096])
    model = model_of(
        name="small",
        layers=rng.randint(3, 6),
        hidden=hidden,
        words=rng.choice([8192, 32000]),
        batch=rng.choice([8, 12, 16]),
        precision="fp16",
        micro_batch_sizes=(1, 2, 4),
        recompute=("none",),
    )
    return Cluster(nodes=tuple(nodes)), model


LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
}
LLAMA_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_attention_heads": 64,
    "num_query_groups": 8,
}
_SHORT = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "ffn": "ffn_hidden_size",
    "heads": "num_attention_heads",
    "groups": "num_query_groups",
    "words": "vocab_size",
    "tokens": "seq_length",
    "batch": "global_batch_size",
    "sizes": "micro_batch_sizes",
    "distributed": "distributed_optimizer",
}


def model_of(**fields: Any) -> Model:
    """Returns a model from its fields, some under short names.

    Args:
        fields: As in a model file, or ``layers, hidden, ffn, heads, groups, words, tokens, batch, sizes, distributed``.
            Without them there are 16 heads, 32,000 words, 1,024 tokens, and inner layers four times as wide.
    """
    given: dict[str, Any] = {"num_attention_heads": 16, "vocab_size": 32000, "seq_length": 1024}
    given |= {_SHORT.get(name, name): value for name, value in fields.items()}
    return Model(**{"ffn_hidden_size": 4 * given["hidden_size"]} | given)


def cluster_of(*groups: tuple[str, int, int, float]) -> Cluster:
    """Returns a cluster from node groups: kind of GPU, nodes, GPUs per node, network bytes per second."""
    nodes = (NodeGroup(gpu=g, count=n, gpus_per_node=k, network_bytes_per_s=rate) for g, n, k, rate in groups)
    return Cluster(nodes=tuple(nodes))


def write_inputs(folder: Path, cluster: Any, model: Any) -> list[str]:
    """Write ``c.yaml`` and ``m.yaml``, from texts or documents; returns the options that name them."""
    for name, content in (("c.yaml", cluster), ("m.yaml", model)):
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        (folder / name).write_text(text, encoding="utf-8")
    return ["--cluster", str(folder / "c.yaml"), "--model", str(folder / "m.yaml")]


def processors(count: int, per_node: int = 1, **more: Any) -> Cluster:
    """Returns a cluster of CPU cores, with the device name ``core``."""
    core = Gpu(
        flops={"fp32": 5e10},
        memory_bytes=4 << 30,
        memory_bytes_per_s=1e10,
        intra_node_bytes_per_s=2e9,
        reserved_bytes=0,
        source="processes of this machine",
        **more,
    )
    node = NodeGroup(gpu="core", count=count, gpus_per_node=per_node)
    return Cluster(nodes=(node,), gpus={"core": core})


def all_plans(estimator: Estimator, point: Candidate, limit: list[float]) -> Iterator[Candidate]:
    """Every ordered list of stages with every split of the layers.

    Plans are left out if one stage's compute, divided perfectly over its replicas, already takes longer than
    ``limit[0]``.
    """
    total, fastest = estimator.model.global_batch_size // point.micro_batch_size, estimator.running(())
    options = []
    for groups in stage_options(estimator, point):
        units = [fastest.unit(g.pool, g.tp, point.micro_batch_size, point.recompute) for g in groups]
        rate = sum(g.count / (u.layer_f + u.layer_b) for g, u in zip(groups, units) if u)
        if sum(g.count for g in groups) <= total:
            options.append((groups, rate))

    def grow(stages: list[Stage], left: list[int], layers: int) -> Iterator[Candidate]:
        for groups, rate in options:
            rest = list(left)
            for g in groups:
                rest[g.pool] -= g.tp * g.count
            if min(rest) < 0:
                continue
            for n in range(1, layers + 1):
                if n * total / rate > limit[0]:
                    break
                here = [*stages, Stage(n, groups)]
                if n == layers:
                    yield point.with_(stages=tuple(here))
                elif any(rest):
                    yield from grow(here, rest, layers - n)

    yield from grow([], [n.quota for n in estimator.cluster.nodes], estimator.model.num_layers)


def brute_force(estimator: Estimator, start: float) -> tuple[float, int, int]:
    """(shortest simulated iteration, plans enumerated, plans simulated) over all 1F1B plans.

    Args:
        start: A known iteration time; longer plans are left out from the start.
    """
    best, seen, simulated = [start * 1.0001], 0, 0
    for batch in estimator.model.batch_sizes:
        for recompute in estimator.model.recompute:
            for candidate in all_plans(estimator, Candidate((), batch, recompute), best):
                seen += 1
                prices = estimator.running(candidate.gpus())
                tried, estimate = candidate, prices.estimate(candidate)
                for slack in LESS:
                    if estimate is None or prices.fits(estimate):
                        break
                    tried = candidate.with_(slack=slack)
                    estimate = prices.estimate(tried)
                if estimate is None or not prices.fits(estimate) or max(estimate.stage_busy_s) >= best[0]:
                    continue
                try:
                    simulated += 1
                    best[0] = min(best[0], simulate_block(prices, tried, estimate).iteration_s)
                except PlannerError:
                    continue
    return best[0], seen, simulated


def compare_case(seed: int) -> dict[str, Any]:
    """Relative gap of the search to the best of all 1F1B plans on a random cluster (negative: the search is better)."""
    cluster, model = random_case(seed)
    estimator = estimator_of(cluster, model)
    goal = Goal(schedules=("1f1b",))
    outcome = search("auto", estimator, goal)
    found_s = value_of(outcome, goal)
    row: dict[str, Any] = {
        "seed": seed,
        "gpus": " + ".join(f"{n.quota} {n.gpu}" for n in cluster.nodes),
        "layers": model.num_layers,
        "search_cpu_s": outcome.cpu_s,
        "exact": outcome.exact,
    }
    if outcome.best is None:
        found = next(
            (
                c
                for b in model.batch_sizes
                for c in all_plans(estimator, Candidate((), b), [1e9])
                if (e := estimator.running(c.gpus()).estimate(c)) and estimator.fits(e)
            ),
            None,
        )
        return {**row, "gap": 0.0 if found is None else float("inf"), "iteration_s": None}
    started = time.process_time()
    best, seen, simulated = brute_force(estimator, found_s)
    return {
        **row,
        "iteration_s": found_s,
        "brute_force_s": best,
        "plans": seen,
        "simulated": simulated,
        "gap": found_s / best - 1,
        "brute_force_cpu_s": time.process_time() - started,
    }


SEARCH_BARS_S = {
    "OPT-350, 32 A100-40 + 96 V100-16": 0.6,
    "GPT-Neo-2.7, 128 A100-40 + 384 V100-16": 1.0,
    "OPT-350, 256 A100-40 + 256 V100-16 + 256 GH-96": 1.0,
    "GPT-Neo-2.7, 256 A100-40 + 256 V100-16 + 256 GH-96": 1.0,
    "GPT-Neo-2.7, 10,000 GPUs of 4 types in 8 zones": 6.0,
}


def measured(name: str, cluster: Cluster, global_batch_size: int = 2048) -> Estimator:
    """An estimator with the published layer times."""
    return estimator_of(cluster, reference_model(name, global_batch_size), reference_profile(name), MEGATRON_HET)


def search_cases() -> dict[str, Estimator]:
    """The cases of :data:`SEARCH_BARS_S`, by name."""
    a100, v100, gh = "A100-40", "V100-16", "GH-96"

    def mix(*counts: tuple[str, int]) -> Cluster:
        return Cluster(nodes=tuple(reference_nodes(gpu, n // 4) for gpu, n in counts))

    names = list(SEARCH_BARS_S)
    return {
        names[0]: measured("OPT-350", mix((a100, 32), (v100, 96))),
        names[1]: measured("GPT-Neo-2.7", mix((a100, 128), (v100, 384))),
        names[2]: measured("OPT-350", mix((a100, 256), (v100, 256), (gh, 256))),
        names[3]: measured("GPT-Neo-2.7", mix((a100, 256), (v100, 256), (gh, 256))),
        names[4]: measured("GPT-Neo-2.7", wide_cluster(10_000), 8192),
    }


def wide_cluster(gpus: int) -> Cluster:
    """A cluster of four types of GPUs in eight zones of three regions."""
    zones = ("us-a-1", "us-a-2", "us-a-3", "us-b-1", "us-b-2", "us-b-3", "eu-a-1", "eu-a-2")
    kinds = ("A100-40", "A100-80", "V100-16", "GH-96")
    each = gpus // (len(zones) * len(kinds)) // 4
    spare = gpus // 4 - each * len(zones) * len(kinds)
    nodes = []
    for i, (zone, kind) in enumerate(product(zones, kinds)):
        nodes.append(reference_nodes(kind, each + (spare if i == 0 else 0), zone=zone, region=zone[:4]))
    links = [
        ZoneLink(between=(a, b), bytes_per_s=rate, latency_s=latency, usd_per_gb=price)
        for a, b, rate, latency, price in (
            ("us-a", "us-b", 1.0e9, 0.03, 0.02),
            ("us-a", "eu-a", 0.5e9, 0.1, 0.05),
            ("us-b", "eu-a", 0.5e9, 0.1, 0.05),
        )
    ]
    return Cluster(name="wide", nodes=tuple(nodes), links=tuple(links))


LLAMA = {
    "Llama 7B": (32, 4096, 11008, 32),
    "Llama 13B": (40, 5120, 13824, 40),
    "Llama 33B": (60, 6656, 17920, 52),
    "Llama 65B": (80, 8192, 22016, 64),
}


def llama(name: str, sequence: int) -> Model:
    """Llama as in the Zorse paper: fp16, recomputation, one million tokens per iteration."""
    layers, hidden, ffn, heads = LLAMA[name]
    return model_of(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        tokens=sequence,
        batch=(1 << 20) // sequence,
        precision="fp16",
        distributed_optimizer=True,
        recompute=("full",),
        micro_batch_sizes=(1, 2, 4, 8, 16),
    )


def zorse_cluster(name: str) -> tuple[Cluster, int]:
    """(cluster, sequence length) of the Zorse paper's Table 4.

    Network rates are the instances' (50 Gbit/s on A as stated; AWS: p4d 400, g5.48x 100, p3dn and
    p3.16x 25 to 100, g4dn.metal 100 Gbit/s); between AWS nodes without a placement group one TCP
    stream gets 5 to 10 Gbit/s, so a node's usable rate is taken as 25 Gbit/s.
    """
    tokens, rows = {
        "A": (4096, "2 x 2 H100-NVL 50 azure-1, 2 x 8 A100-80 50 azure-1"),
        "B": (1024, "1 x 8 A100-40 50 east-1, 2 x 8 A10G 25 east-1, 2 x 8 V100-16 25 east-1, 3 x 8 T4 25 east-1"),
        "C": (512, "2 x 8 A10G 25 east-1, 6 x 8 T4 25 east-1, 2 x 8 V100-16 25 west-1, 6 x 8 T4 25 west-1"),
    }[name]
    nodes = tuple(
        NodeGroup(gpu=gpu, count=int(n), gpus_per_node=int(size), zone=zone, network_bytes_per_s=int(gbit) / 8 * 1e9)
        for n, _, size, gpu, gbit, zone in map(str.split, rows.split(","))
    )
    slow = ZoneLink(between=("east-1", "west-1"), bytes_per_s=0.625e9, latency_s=12e-3, usd_per_gb=0.02)
    return Cluster(name=name, nodes=nodes, links=(slow,) if name == "C" else ()), tokens


ZORSE_TABLE_5 = {
    ("A", "Llama 7B"): (4370.56, 0.5246, 4223.80),
    ("A", "Llama 13B"): (4917.87, 0.5902, 3837.49),
    ("A", "Llama 33B"): (5281.64, 0.6339, 944.47),
    ("A", "Llama 65B"): (5239.13, 0.6288, None),
    ("B", "Llama 7B"): (3412.88, 0.4349, 2033.53),
    ("B", "Llama 13B"): (2965.64, 0.3779, 1956.09),
    ("B", "Llama 33B"): (2658.29, 0.3387, None),
    ("C", "Llama 7B"): (3936.94, 0.3924, 2441.70),
    ("C", "Llama 13B"): (3357.97, 0.3347, 2061.55),
    ("C", "Llama 33B"): (1548.60, 0.1544, None),
}
"""(Zorse in TFLOP/s, its share of the peak, TorchTitan-Het in TFLOP/s); None where the paper reports out of memory."""


def with_catalog(cluster: Cluster, model: Model) -> Estimator:
    """An estimator with datasheet costs that may use 92 % of memory."""
    return estimator_of(cluster, model, memory_margin=0.92)


def even_split_with_zero_2(cluster: Cluster, model: Model) -> tuple[float, str] | None:
    """(TFLOP/s, plan) of the best even split: all GPUs, equal stages, equal batches, gradients sharded (ZeRO-2).

    Equal batches over a number of replicas that does not divide the batch need another batch: the next
    larger one, compared by rate.
    """
    best: tuple[float, str] | None = None
    singles = [p for p, n in enumerate(cluster.nodes) for _ in range(n.quota)]
    for width in (n for n in range(1, len(singles) + 1) if len(singles) % n == 0):
        count = len(singles) // width
        if model.num_layers % count:
            continue
        stages = even_stages(singles, 1, count, width, model.num_layers // count)
        wider = model.model_copy(
            update={"global_batch_size": -(-model.global_batch_size // width) * width, "micro_batch_sizes": ()}
        )
        estimator = with_catalog(cluster, wider)
        for batch, recompute in product(wider.batch_sizes, wider.recompute):
            candidate = Candidate(stages, batch, recompute, zero_stage=2, even=True)
            estimate = estimator.estimate(candidate)
            if estimate is None or not estimator.fits(estimate):
                continue
            rate = hardware_flops(wider) / estimate.iteration_s / 1e12
            if best is None or rate > best[0]:
                best = (rate, f"{describe(estimator, candidate)}, ZeRO-2, global batch {wider.global_batch_size}")
    return best


def hardware_flops(model: Model) -> float:
    """FLOPs of one iteration with full recomputation of the layers (the paper's HFU counts them)."""
    s = model.seq_length
    return model.global_batch_size * (4.0 * model.num_layers * model.layer_flops(s) + 3.0 * model.head_flops(s))


# The search on random clusters: against smaller pools, single kinds, fewer schedules, random search, and its bound.


KINDS = ("A100-40", "A100-80", "H100-SXM", "H200", "L40S", "A10G", "V100-16", "T4", "RTX-3090")
TOLERANCE = 0.005
RANDOM_CANDIDATES = 2000
MOST_OPERATIONS = 100_000  # larger plans are not simulated again as a whole


def random_pool(seed: int, model: str = "dense") -> tuple[Cluster, Model]:
    """A random cluster of 10 to 200 GPUs of 2 to 4 kinds with prices, and a random model.

    Args:
        model: ``dense``, ``experts`` or ``vocabulary`` (large for the model's width).
    """
    rng = random.Random(seed)
    kinds = rng.sample(KINDS, rng.randint(2, 4))
    size = {kind: rng.choice((1, 2, 4, 8)) for kind in kinds}
    rate = {kind: rng.choice((1.25e9, 3e9, 12.5e9, 25e9, 50e9)) for kind in kinds}
    wanted = round(10 * 20 ** rng.random())
    count = dict.fromkeys(kinds, 1)
    while sum(count[k] * size[k] for k in kinds) < wanted:
        count[rng.choice(kinds)] += 1
    while sum(count[k] * size[k] for k in kinds) > 200:
        count[max(kinds, key=lambda k: count[k] * size[k])] -= 1
    prices = random.Random(f"prices {seed}")
    nodes = tuple(
        NodeGroup(
            gpu=k,
            count=count[k],
            gpus_per_node=size[k],
            zone="lab-a",
            network_bytes_per_s=rate[k],
            usd_per_gpu_hour=round(catalog()[k].peak("fp16") / 1e14 * prices.uniform(0.5, 2), 2),
        )
        for k in kinds
    )
    layers, hidden, heads = rng.choice(((12, 2048, 16), (24, 2048, 16), (32, 4096, 32), (40, 5120, 40)))
    made = model_of(
        layers=layers,
        hidden=hidden,
        ffn=rng.choice((3, 4)) * hidden,
        heads=heads,
        words=rng.choice((32000, 128256)),
        tokens=rng.choice((1024, 2048, 4096)),
        batch=rng.choice((64, 128, 256, 480)),
        precision="fp16",
        distributed_optimizer=rng.random() < 0.8,
        recompute=("none", "full"),
    )
    if model == "experts":
        experts = Experts(count=8, top_k=2, ffn_hidden_size=made.ffn_hidden_size // 2)
        made = made.model_copy(update={"experts": experts})
    if model == "vocabulary":
        made = made.model_copy(update={"vocab_size": 128 * 1024 if hidden > 2048 else 256 * 1024})
    return Cluster(nodes=nodes), made


def read_back(estimator: Estimator, plan: Plan) -> tuple[Candidate, float]:
    """The candidate of a plan file, and its simulated seconds as in the command ``simulate``."""
    candidate, seated = candidate_of(plan, estimator.cluster)
    estimate = estimator.estimate(candidate)
    assert estimate is not None
    return candidate, simulate_candidate(estimator, candidate, estimate, plan, seated).iteration_s


def promised(estimator: Estimator, outcome: SearchResult) -> float | None:
    """Ratio of the simulated time of the written plan to the time predicted by the search; None if not simulated."""
    best = outcome.best
    if best is None or not best.runnable:
        return None
    if operations_of(estimator, best.candidate) * best.candidate.blocks > MOST_OPERATIONS:
        return None
    estimator = estimator.running(best.candidate.gpus())
    plan = build_plan(estimator, best.candidate, best.estimate)
    if waits_for_nobody(best.candidate):
        estimate = estimator.estimate(candidate_of(plan, estimator.cluster)[0])
        assert estimate is not None
        return estimate.iteration_s / best.iteration_s
    return read_back(estimator, plan)[1] / best.iteration_s


def random_search(estimator: Estimator, goal: Goal, seed: int) -> float:
    """Value of the best of many random plans with balanced layers, of which the finalists are simulated."""
    rng, model = random.Random(seed), estimator.model
    memo = CandidateCache(estimator, goal, Progress())
    for _ in range(RANDOM_CANDIDATES):
        like = Candidate(
            (), rng.choice(model.batch_sizes), rng.choice(model.recompute), zero_stage=int(model.distributed_optimizer)
        )
        groups = _random_groups(estimator, rng)
        if groups is not None:
            memo.try_groups(groups, like)
            memo.try_groups(groups, like.with_(schedule="interleaved", chunks=rng.choice((2, 3, 4))))
    outcome = SearchResult("random")
    finish(memo, outcome, estimator, goal, Effort(), lambda c: c)
    return outcome.best.value(goal) if outcome.best else inf


def _random_groups(estimator: Estimator, rng: random.Random) -> Groups | None:
    """A random number of stages, with a random TP size, share and division over stages for each kind of GPU."""
    stages = rng.choice((1, 1, 2, 2, 3, 4, 4, 6, 8))
    if stages > estimator.model.num_layers:
        return None
    out: list[dict[tuple[int, int], int]] = [{} for _ in range(stages)]
    for pool, node in enumerate(estimator.cluster.nodes):
        tp = rng.choice([t for t in (1, 2, 4, 8) if t <= node.gpus_per_node])
        replicas = round(rng.choice((0.0, 0.5, 1.0, 1.0, 1.0)) * node.quota) // tp
        mine = rng.sample(range(stages), rng.randint(1, stages))
        for i, s in enumerate(mine):
            each = replicas // len(mine) + (1 if i < replicas % len(mine) else 0)
            if each:
                out[s][pool, tp] = each
    if not all(out):
        return None
    return tuple(tuple(Group(p, t, n) for (p, t), n in sorted(stage.items())) for stage in out)


def best_value(nodes: Iterable[NodeGroup], model: Model, goal: Goal) -> float:
    """Value of the plan that the search finds for these nodes."""
    return value_of(search("auto", with_catalog(Cluster(nodes=tuple(nodes)), model), goal), goal)


def value_of(outcome: SearchResult, goal: Goal) -> float:
    """Value of the best plan found, even if the search chose a simpler one."""
    return min((found.value(goal) for found in outcome.found if found.runnable), default=inf)


def without_one(found: Sequence[NodeGroup], less: int) -> list[NodeGroup]:
    """The nodes, with one node less in pool ``less``."""
    fewer = [n.model_copy(update={"count": n.count - (i == less)}) for i, n in enumerate(found)]
    return [n for n in fewer if n.count]
