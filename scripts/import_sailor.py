"""Carries published measurements of the Sailor project over into ``data/sailor.json``.

    python -m scripts.import_sailor DIRECTORY > benchmarks/published/data/sailor.json

Figures only, in this project's own compact form: repeated layers once, sizes once, bandwidths as the
measured maxima.  What is known to be wrong at the source is left out here (see ``OMITTED``).
"""

import csv
import json
import statistics
import sys
from math import log2
from pathlib import Path
from typing import Any

SOURCE = (
    "Sailor project (ETH Zurich and others, MIT licence): layer times, bandwidths, prices and real runs measured "
    "on real GPUs, fp32 with TF32 where the GPU has it, sequence length 2048"
)
OMITTED = (
    "LLAMA-3-8 and OPT-30 (times inconsistent between GPU types), GPT-Neo-2.7's last layer (a norm only: its tied "
    "output projection was not profiled), update times of 0"
)
SHAPES: dict[str, dict[str, Any]] = {
    "OPT-350": {
        "num_layers": 24,
        "hidden_size": 1024,
        "ffn_hidden_size": 4096,
        "num_attention_heads": 16,
        "vocab_size": 50272,
        "seq_length": 2048,
        "learned_positions": 2048,
        "tied_embeddings": False,
    },
    "GPT-Neo-2.7": {
        "num_layers": 32,
        "hidden_size": 2560,
        "ffn_hidden_size": 10240,
        "num_attention_heads": 32,
        "vocab_size": 50304,
        "seq_length": 2048,
        "learned_positions": 2048,
        "tied_embeddings": True,
    },
}
LAYERS = ("embedding", "layer", "head")


def _representative(layers: dict[str, Any], model: str) -> list[tuple[str, list[Any]]]:
    """(layer kind, the entries it stands for): first, all in between, last."""
    keys = sorted(layers, key=int)
    groups = [("embedding", keys[:1]), ("layer", keys[1:-1]), ("head", keys[-1:])]
    if model == "GPT-Neo-2.7":
        groups.pop()
    return [(kind, [layers[k] for k in names]) for kind, names in groups]


def timings(directory: Path) -> dict[str, dict[str, list[list[Any]]]]:
    """``{model: {gpu: [[layer kind, micro batch, tp, forward_s, backward_s, update_s], ...]}}``."""
    document = json.loads((directory / "layer_profiles.json").read_text())
    out: dict[str, dict[str, list[list[Any]]]] = {}
    for model in SHAPES:
        for gpu, batches in document[model].items():
            rows = out.setdefault(model, {}).setdefault(gpu, [])
            for batch in sorted(batches, key=int):
                for tp in sorted(batches[batch], key=int):
                    for kind, entries in _representative(batches[batch][tp], model):
                        times = [round(statistics.median(e[i] for e in entries), 7) for i in range(3)]
                        rows.append([kind, int(batch), int(tp), *times])
    return out


def sizes(directory: Path) -> dict[str, list[list[Any]]]:
    """``{model: [[layer kind, tp, parameters, activation_bytes, output_bytes], ...]}``, micro batch 1."""
    document = json.loads((directory / "layer_sizes.json").read_text())
    out: dict[str, list[list[Any]]] = {}
    for model in SHAPES:
        for tp in sorted(document[model], key=int):
            for kind, entries in _representative(document[model][tp], model):
                size = {k: int(statistics.median(e[k] for e in entries)) for k in entries[0]}
                out.setdefault(model, []).append(
                    [kind, int(tp), size["params_floats"], size["act_mem_bytes"], size["act_output_bytes"]]
                )
    return out


def bandwidths(directory: Path) -> dict[str, dict[str, dict[str, float]]]:
    """``{scope: {gpu: {participants: largest measured bytes per second}}}``."""
    document = json.loads((directory / "network_coeffs_all_homo.json").read_text())
    return {
        scope: {gpu: {n: round(value[1]) for n, value in by_count.items()} for gpu, by_count in gpus.items()}
        for scope, gpus in document.items()
    }


MEGABYTES = (1, 4, 16, 64, 256, 1024)


def rates(directory: Path) -> dict[str, list[list[Any]]]:
    """``{gpu: [[streams, message bytes, bytes per second], ...]}`` between two equal nodes.

    The source's polynomials over the logarithm of the message size, held at the largest measured bandwidth, and
    from their vertex on.
    """
    document = json.loads((directory / "network_coeffs_all_homo.json").read_text())
    out: dict[str, list[list[Any]]] = {}
    for gpu, by_count in document["inter"].items():
        for count, ((a, b, c), most) in sorted(by_count.items(), key=lambda item: int(item[0])):
            best = 0.0
            for size in MEGABYTES:
                x = log2(size)
                best = max(best, min(most, 1e9 * (a * x * x + b * x + c)))
                out.setdefault(gpu, []).append([int(count), size * 10**6, round(best)])
    return out


def zone_rates(directory: Path) -> list[list[Any]]:
    """``[[zone, zone, bytes per second of one A100 node with 4 GPUs], ...]``."""
    document = json.loads((directory / "multizone_bandwidths_het.json").read_text())
    rows = []
    for first, gpus in document.items():
        for second, targets in gpus["A100-40"]["4"].items():
            if "A100-40" in targets and "4" in targets["A100-40"]:
                rows.append([first, second, round(targets["A100-40"]["4"][1])])
    return rows


def runs(directory: Path) -> list[dict[str, Any]]:
    """The measured runs, with numbers as numbers."""
    out = []
    with (directory / "measured_runs.csv").open(newline="") as stream:
        for row in csv.DictReader(stream):
            out.append(
                {
                    "run": row["run"],
                    "model": row["model"],
                    "micro_batch_size": int(row["micro_batch_size"]),
                    "global_batch_size": int(row["global_batch_size"]),
                    "tp": int(row["tp"]),
                    "layers_per_stage": [int(n) for n in row["layers_per_stage"].split(";")],
                    "gpus_per_stage": row["gpus_per_stage"],
                    "iteration_s": float(row["measured_iteration_s"]),
                    "memory_bytes": None
                    if row["note"].startswith("time only")
                    else int(row["measured_peak_memory_bytes"]),
                }
            )
    return out


def convert(directory: Path) -> dict[str, Any]:
    """Everything that is carried over."""
    nodes = json.loads((directory / "basic_cluster_config.json").read_text())
    nodes.pop("zone", None)
    return {
        "source": SOURCE,
        "omitted": OMITTED,
        "models": SHAPES,
        "nodes": nodes,
        "usd_per_gpu_hour": {"A100-40": 3.673, "V100-16": 2.860, "GH-96": 11.06},
        "egress_usd_per_gb": json.loads((directory / "egress_usd_per_gb.json").read_text()),
        "bandwidths": bandwidths(directory),
        "rates": rates(directory),
        "zone_rates": zone_rates(directory),
        "sizes": sizes(directory),
        "timings": timings(directory),
        "runs": runs(directory),
    }


if __name__ == "__main__":
    json.dump(convert(Path(sys.argv[1])), sys.stdout, separators=(",", ":"))
