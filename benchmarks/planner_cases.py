"""Clusters and models of the planner's benchmarks: the Sailor paper's sizes and the Zorse paper's clusters."""

from __future__ import annotations

from itertools import product

from tools.planner.costs.estimate import Estimator
from tools.planner.costs.layercost import CatalogCosts, MeasuredCosts
from tools.planner.inputs.catalog import catalog
from tools.planner.inputs.cluster import Cluster, NodeGroup, ZoneLink
from tools.planner.inputs.model import Model
from tools.planner.published.accuracy import reference_model, reference_nodes, reference_profile
from tools.planner.report.analysis import even_splits
from tools.planner.report.tables import describe

SEARCH_BARS_S = {
    "OPT-350, 32 A100-40 + 96 V100-16": 0.6,
    "GPT-Neo-2.7, 128 A100-40 + 384 V100-16": 5.0,
    "OPT-350, 256 A100-40 + 256 V100-16 + 256 GH-96": 1.0,
    "GPT-Neo-2.7, 256 A100-40 + 256 V100-16 + 256 GH-96": 1.0,
    "GPT-Neo-2.7, 10,000 GPUs of 4 types in 8 zones": 5.0,
}


def measured(name: str, cluster: Cluster, global_batch_size: int = 2048) -> Estimator:
    """With the published layer times."""
    model = reference_model(name, global_batch_size)
    return Estimator(cluster, model, MeasuredCosts(model, reference_profile(name), lambda gpu: catalog()[gpu]))


def search_cases() -> dict[str, Estimator]:
    """The cases of the speed requirement, and smaller and larger ones for the growth table."""
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


def growth_cases() -> dict[str, Estimator]:
    """One, two and three types with 16 to 1,024 GPUs each."""
    out = {}
    for types, count in product((1, 2, 3), (16, 64, 256, 1024)):
        kinds = ("A100-40", "V100-16", "GH-96")[:types]
        cluster = Cluster(nodes=tuple(reference_nodes(k, count // 4) for k in kinds))
        out[f"{types} type(s) with {count} GPUs each"] = measured("OPT-350", cluster, 4096)
    return out


def wide_cluster(gpus: int) -> Cluster:
    """Four types in eight zones of three regions."""
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
    return Model(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        vocab_size=32000,
        seq_length=sequence,
        global_batch_size=(1 << 20) // sequence,
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

    def nodes(gpu: str, count: int, per_node: int, gbit: float, zone: str) -> NodeGroup:
        return NodeGroup(gpu=gpu, count=count, gpus_per_node=per_node, zone=zone, network_bytes_per_s=gbit / 8 * 1e9)

    if name == "A":
        return Cluster(
            name="A", nodes=(nodes("H100-NVL", 2, 2, 50, "azure-1"), nodes("A100-80", 2, 8, 50, "azure-1"))
        ), 4096
    if name == "B":
        return Cluster(
            name="B",
            nodes=(
                nodes("A100-40", 1, 8, 50, "east-1"),
                nodes("A10G", 2, 8, 25, "east-1"),
                nodes("V100-16", 2, 8, 25, "east-1"),
                nodes("T4", 3, 8, 25, "east-1"),
            ),
        ), 1024
    return Cluster(
        name="C",
        nodes=(
            nodes("A10G", 2, 8, 25, "east-1"),
            nodes("T4", 6, 8, 25, "east-1"),
            nodes("V100-16", 2, 8, 25, "west-1"),
            nodes("T4", 6, 8, 25, "west-1"),
        ),
        links=(ZoneLink(between=("east-1", "west-1"), bytes_per_s=0.625e9, latency_s=12e-3, usd_per_gb=0.02),),
    ), 512


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
    """With datasheet costs."""
    return Estimator(cluster, model, CatalogCosts(model, lambda gpu: catalog()[gpu]), memory_margin=0.92)


def even_split_with_zero_2(cluster: Cluster, model: Model) -> tuple[float, str] | None:
    """(TFLOP/s, plan) of the best even split: all GPUs, equal stages, equal batches, gradients sharded (ZeRO-2).

    Equal batches over a number of replicas that does not divide the batch need another batch: the next
    larger one, compared by rate.
    """
    best: tuple[float, str] | None = None
    for width in (n for n in range(1, cluster.total_gpus + 1) if cluster.total_gpus % n == 0):
        wider = model.model_copy(
            update={"global_batch_size": -(-model.global_batch_size // width) * width, "micro_batch_sizes": ()}
        )
        estimator = with_catalog(cluster, wider)
        for candidate in even_splits(estimator, 2):
            if sum(g.count for g in candidate.stages[0].groups) != width:
                continue
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
