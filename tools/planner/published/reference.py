"""The published measurements in ``data/sailor.json`` as profiles, clusters and runs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ..inputs.cluster import Cluster, NodeGroup, ZoneLink
from ..inputs.model import Model
from ..inputs.profile_schema import DeviceProfile, LayerTiming, Profile, ProfiledModel


@cache
def reference() -> dict[str, Any]:
    """The document."""
    text = resources.files(__package__).joinpath("data/sailor.json").read_text("utf-8")
    return json.loads(text)


def reference_model(name: str, global_batch_size: int, **changes: Any) -> Model:
    """One of the measured models, trained in fp32 with TF32 and unfused attention, as measured."""
    shape = {
        **reference()["models"][name],
        "name": name,
        "global_batch_size": global_batch_size,
        "gated": False,
        "biases": True,
        "precision": "tf32",
        "attention": "unfused",
        "recompute": ("none",),
    }
    return Model(**{**shape, **changes})


def reference_profile(name: str) -> Profile:
    """The measured layer times and sizes as a profile."""
    data = reference()
    model = reference_model(name, 1)
    sizes = {(kind, tp): (params, act, out) for kind, tp, params, act, out in data["sizes"][name]}
    devices = []
    for gpu, rows in data["timings"][name].items():
        timings = [
            LayerTiming(
                kind,
                batch,
                tp,
                model.seq_length,
                forward,
                backward,
                update,
                sizes[kind, tp][0],
                sizes[kind, tp][1] * batch,
                sizes[kind, tp][2] * batch,
            )
            for kind, batch, tp, forward, backward, update in rows
        ]
        node = data["nodes"][gpu]
        devices.append(DeviceProfile(gpu, node["mem_per_gpu"], node["gpus_per_node"], timings))
    profiled = ProfiledModel(
        model.hidden_size,
        model.ffn_hidden_size,
        model.num_attention_heads,
        model.groups,
        model.vocab_size,
        model.seq_length,
        model.precision,
        name,
    )
    return Profile(profiled, devices, notes=data["source"])


def reference_nodes(gpu: str, count: int, zone: str = "us-central1-a", **changes: Any) -> NodeGroup:
    """Nodes with the measured bandwidths and prices."""
    data = reference()
    per_node = data["nodes"][gpu]["gpus_per_node"]
    rates = data["bandwidths"]["inter"][gpu]
    fields: dict[str, Any] = {
        "gpu": gpu,
        "count": count,
        "gpus_per_node": per_node,
        "zone": zone,
        "network_bytes_per_s": rates[str(per_node)],
        "stream_bytes_per_s": rates["1"],
        "usd_per_gpu_hour": data["usd_per_gpu_hour"].get(gpu),
        "intra_node_bytes_per_s": data["bandwidths"]["intra"][gpu][str(per_node)] / (per_node / 2),
    }
    return NodeGroup(**{**fields, **changes})


def reference_links(zones: tuple[str, ...]) -> tuple[ZoneLink, ...]:
    """Measured bandwidth and price between zones."""
    data = reference()
    return tuple(
        ZoneLink(
            between=(first, second),
            bytes_per_s=rate,
            latency_s=30e-3 if first[:-2] != second[:-2] else 1e-3,
            usd_per_gb=data["egress_usd_per_gb"][first][second],
        )
        for first, second, rate in data["zone_rates"]
        if first in zones and second in zones and first < second
    )


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One real run.

    Attributes:
        layers: Transformer layers per stage (the source counts embedding and head as layers).
        stages: Per stage, the GPU kind of each replica.
        memory_bytes: Largest rank, None where the reading is not usable.
    """

    name: str
    model: str
    tp: int
    micro_batch_size: int
    global_batch_size: int
    layers: tuple[int, ...]
    stages: tuple[tuple[str, ...], ...]
    iteration_s: float
    memory_bytes: int | None

    @property
    def site(self) -> str:
        """Where it ran (the first part of its name)."""
        return self.name.split("/")[0]


def measured_runs() -> list[MeasuredRun]:
    """All of them."""
    out = []
    for row in reference()["runs"]:
        layers = list(row["layers_per_stage"])
        layers[0] -= 1
        layers[-1] -= 1
        stages = []
        for text in row["gpus_per_stage"].split(" / "):
            replicas: list[str] = []
            for part in text.split("|"):
                found = re.fullmatch(r"(\d+)\*([\w-]+)x(\d+)", part)
                assert found, part
                replicas += [found[2]] * int(found[1])
            stages.append(tuple(replicas))
        out.append(
            MeasuredRun(
                row["run"],
                row["model"],
                row["tp"],
                row["micro_batch_size"],
                row["global_batch_size"],
                tuple(layers),
                tuple(stages),
                row["iteration_s"],
                row["memory_bytes"],
            )
        )
    return out


def run_cluster(run: MeasuredRun) -> Cluster:
    """Nodes as the run used them: one replica per node."""
    counts: dict[str, int] = {}
    for stage in run.stages:
        for gpu in stage:
            counts[gpu] = counts.get(gpu, 0) + 1
    nodes = tuple(
        reference_nodes(
            gpu,
            n,
            zone=run.site,
            gpus_per_node=run.tp,
            network_bytes_per_s=_node_rate(gpu, run.tp),
            intra_node_bytes_per_s=_intra_rate(gpu, run.tp),
            measured_rates=tuple(tuple(row) for row in reference()["rates"][gpu]),
        )
        for gpu, n in counts.items()
    )
    return Cluster(name=run.name, nodes=nodes)


def _node_rate(gpu: str, tp: int) -> float:
    rates = reference()["bandwidths"]["inter"][gpu]
    return rates[str(min(tp, max(int(n) for n in rates)))]


def _intra_rate(gpu: str, tp: int) -> float:
    rates = reference()["bandwidths"]["intra"][gpu]
    count = min(max(tp, 2), max(int(n) for n in rates))
    return rates[str(count)] / (count / 2)
