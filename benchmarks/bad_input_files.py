"""The good files that ``benchmarks.bad_input`` makes bad ones of."""

from __future__ import annotations

import json
from typing import Any

MODEL: dict[str, Any] = {
    "name": "small",
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 512,
    "seq_length": 128,
    "global_batch_size": 8,
    "micro_batch_sizes": [1],
    "precision": "bf16",
    "gated": True,
    "recompute": ["none"],
}
CLUSTER: dict[str, Any] = {
    "name": "mixed",
    "nodes": [
        {
            "gpu": "A100-40",
            "count": 2,
            "gpus_per_node": 2,
            "zone": "east-a",
            "network_bytes_per_s": 12.5e9,
            "network_latency_s": 2e-5,
            "usd_per_gpu_hour": 3.0,
            "hosts": ["n1", "n2"],
            "slurm": {"partition": "gpu", "constraint": "a100", "account": "lab", "gres": "gpu:a100"},
        },
        {
            "gpu": "mine",
            "count": 1,
            "gpus_per_node": 2,
            "zone": "west-a",
            "collective_bytes_per_s": 1e9,
            "max_gpus": 2,
            "measured_rates": [[1, 1e6, 1e9], [1, 64e6, 2e9]],
            "hosts": ["n3"],
            "slurm": {"partition": "gpu", "constraint": "mine", "account": "lab", "gres": "gpu:mine"},
        },
    ],
    "links": [{"between": ["east", "west"], "bytes_per_s": 1e9, "latency_s": 1e-3, "usd_per_gb": 0.02}],
    "gpus": {
        "mine": {
            "flops": {"bf16": 1e14, "fp32": 2e13},
            "memory_bytes": 24_000_000_000,
            "memory_bytes_per_s": 9e11,
            "intra_node_bytes_per_s": 3e10,
            "launch_s": 1e-5,
            "source": "made up",
        }
    },
}


def _timing(layer: str, speed: float) -> dict[str, Any]:
    return {
        "layer": layer,
        "micro_batch_size": 1,
        "tp": 1,
        "slice_tokens": 128,
        "forward_s": 1e-3 / speed,
        "backward_s": 2e-3 / speed,
        "update_s": 1e-4,
        "parameters": 50_000,
        "activation_bytes": 1_000_000,
        "output_bytes": 16_384,
        "context_tokens": 0,
        "recompute": "none",
        "workspace_bytes": 0,
    }


PROFILE: dict[str, Any] = {
    "format": "megatron_het.profile",
    "version": 1,
    "model": {
        **{k: MODEL[k] for k in ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")},
        **{k: MODEL[k] for k in ("vocab_size", "seq_length", "precision", "name")},
    },
    "devices": [
        {
            "kind": kind,
            "memory_bytes": 24_000_000_000,
            "gpus_per_node": 2,
            "timings": [_timing(layer, speed) for layer in ("embedding", "layer", "head")],
            "largest_batches": [{"tp": 1, "layers": 2, "micro_batch_size": 4, "recompute": "none"}],
            "reserved_bytes": 0,
        }
        for kind, speed in (("A100-40", 2.0), ("mine", 1.0))
    ],
    "links": [
        {
            "scope": "network",
            "first_kind": "A100-40",
            "second_kind": "mine",
            "operation": "p2p",
            "participants": 2,
            "latency_s": 1e-4,
            "bytes_per_s": 1e9,
            "samples": [[1024, 1e-4], [1_048_576, 1e-3]],
        }
    ],
    "complete": True,
    "notes": "made up",
}


def _replica(ranks: list[int], microbatches: list[int], device: str, speed: float) -> dict[str, Any]:
    return {"ranks": ranks, "microbatches": microbatches, "device": device, "speed": speed}


PLAN: dict[str, Any] = {
    "format": "megatron_het.plan",
    "version": 1,
    "model": {
        **{k: MODEL[k] for k in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups")},
        **{k: MODEL[k] for k in ("seq_length", "ffn_hidden_size", "vocab_size")},
        "tied_embeddings": False,
    },
    "training": {
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "precision": "bf16",
        "sequence_parallel": False,
        "recompute": "none",
        "distributed_optimizer": False,
    },
    "stages": [
        {
            "layers": [3],
            "replicas": [_replica([0], [0, 2, 4, 6], "A100-40", 1.0), _replica([1], [1, 3, 5, 7], "A100-40", 1.0)],
        },
        {"layers": [1], "replicas": [_replica([2], list(range(8)), "mine", 0.5)]},
    ],
    "schedule": {"name": "1f1b", "parameters": {"slack": 0.5}},
    "predicted": {
        "iteration_s": 0.1,
        "bubble_fraction": 0.2,
        "per_rank": [
            {
                "rank": rank,
                "compute_s": 0.05,
                "parameter_bytes": 1000,
                "gradient_bytes": 1000,
                "optimizer_bytes": 4000,
                "activation_bytes": 100,
            }
            for rank in range(3)
        ],
    },
    "notes": "made up",
}


def sliced_plan() -> dict[str, Any]:
    """The same stages with slices."""
    return {**PLAN, "schedule": {"name": "slimpipe", "parameters": {"slices": 4}}}


def other_plans() -> dict[str, dict[str, Any]]:
    """Plans of further kinds for the same model and cluster, by name."""
    in_a_v = [{**stage, "layers": [1, 1]} for stage in PLAN["stages"]]
    one = {
        "layers": [4],
        "replicas": [
            _replica([0], [0, 3], "A100-40", 1.0),
            _replica([1], [1, 4], "A100-40", 1.0),
            _replica([2], [2, 5], "mine", 0.5),
        ],
    }
    sizes = [2, 2, 1, 1, 1, 1]
    first, second = PLAN["stages"]
    routed = [
        {**first, "replicas": [_replica([0], [0, 2, 4], "A100-40", 1.0), _replica([1], [1, 3, 5], "A100-40", 1.0)]},
        {**second, "replicas": [_replica([2], list(range(6)), "mine", 0.5)]},
    ]
    unequal = {**PLAN["training"], "micro_batch_size": max(sizes), "micro_batch_sizes": sizes}
    sharded = {**unequal, "distributed_optimizer": True}
    window = {"window": True, "zero": 3}
    return {
        "zb-v": {**PLAN, "stages": in_a_v, "schedule": {"name": "zb-v", "parameters": {}}},
        "v-half": {**PLAN, "stages": in_a_v, "schedule": {"name": "v-half", "parameters": {}}},
        "depths": {**PLAN, "schedule": {"name": "1f1b", "parameters": {"depths": [2]}}},
        "unequal": {**PLAN, "training": unequal, "stages": routed},
        "data-parallel": {
            **PLAN,
            "training": unequal,
            "stages": [one],
            "schedule": {"name": "data-parallel", "parameters": {}},
        },
        "zero-3": {
            **PLAN,
            "training": sharded,
            "stages": [{**one, "layers": [2, 2]}],
            "schedule": {"name": "data-parallel", "parameters": window},
        },
    }


def document_text(document: Any) -> str:
    """JSON, which YAML readers read too."""
    return json.dumps(document, indent=1)
