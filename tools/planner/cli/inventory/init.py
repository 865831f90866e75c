"""The command ``init``: a cluster file with comments, from what the machine says."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from megatron_het.safe_io import parse_yaml

from ...command import command
from ...errors import PlannerError
from ...inputs.catalog import catalog, find_gpu
from ...inputs.cluster import cluster_from_document
from ...inputs.files import check_target, write_text
from ...inputs.names import comment
from ...report.tables import say
from .naming import Named
from .probes import GIB, Nodes, Seen, host_names, slurm_nodes, this_machine

UNKNOWN = "FILL-IN"


def init(options: argparse.Namespace) -> int:
    """Ask, write, say what is left to do."""
    check_target(options.out, "--out", (".yaml", ".yml"))
    if os.path.lexists(options.out) and not options.force:
        raise PlannerError(
            "command line", "--out", options.out, "this file is there already", "Give another name, or --force"
        )
    found, source, left_out = _found(options)
    text = cluster_text(found, source)
    todo = [gpu.name for nodes in found for gpu in nodes.gpus if gpu.gpu is None]
    if not todo:  # what is written can be read
        cluster_from_document(parse_yaml(text, options.out), options.out)
    write_text(options.out, text)
    body = {
        "cluster": options.out,
        "source": source,
        "nodes": [
            {"gpu": g.gpu.name if g.gpu else None, "seen": g.name, "count": nodes.count, "gpus_per_node": g.count}
            for nodes in found
            for g in nodes.gpus
        ],
        "unknown": todo,
        "left_out": left_out,
    }
    say(body, options, *_lines(found, source, options.out), *_left_out(left_out))
    return 0


def _left_out(nodes: Sequence[str]) -> list[str]:
    if not nodes:
        return []
    more = f" and {len(nodes) - 20} more" if len(nodes) > 20 else ""
    return [f"Left out, because no job gets them now: {', '.join(nodes[:20])}{more}"]


def _found(options: argparse.Namespace) -> tuple[list[Nodes], str, list[str]]:
    """Returns what there is, who says so, and which nodes cannot be used now."""
    hosts = host_names(options.hosts) if options.hosts else ()
    if options.gpu:
        find_gpu(options.gpu, {}, "command line", "--gpu")
        seen = Seen(options.gpu, Named(options.gpu), options.gpus_per_node)
        return [Nodes((seen,), len(hosts) or 1, hosts)], "the command line", []
    if options.source in ("auto", "slurm") and not hosts:
        nodes_of_slurm = _of_slurm(options)
        if nodes_of_slurm and nodes_of_slurm[0]:
            return nodes_of_slurm[0], "sinfo", nodes_of_slurm[1]
        if options.source == "slurm":
            what = "sinfo is not on PATH" if nodes_of_slurm is None else "sinfo lists no node with GPUs (gres gpu)"
            if nodes_of_slurm and nodes_of_slurm[1]:
                what += f" that is up: {', '.join(nodes_of_slurm[1][:5])}"
            raise PlannerError("command line", "--from", "slurm", what, "Run it where Slurm's commands work")
    if options.source != "slurm" and (here := this_machine(hosts)):
        return here, "nvidia-smi", []
    raise PlannerError(
        "command line",
        "--from",
        options.source,
        "no GPU was found: neither sinfo nor nvidia-smi lists one",
        "Run it on a node with GPUs or where Slurm's commands work, or say what there is: "
        "--gpu A100-40 --gpus-per-node 8 --hosts n[1-4]",
    )


def _of_slurm(options: argparse.Namespace) -> tuple[list[Nodes], list[str]] | None:
    """Nodes that Slurm lists; where nobody insists on Slurm, one that does not answer is no error if there are GPUs."""
    try:
        return slurm_nodes()
    except PlannerError:
        if options.source == "slurm" or not this_machine():
            raise
        return None


def cluster_text(found: Sequence[Nodes], source: str) -> str:
    """The cluster file."""
    lines = [
        f"# Cluster file written by '{command()} init' from {source}. Check the lines that say so.",
        "# Every key is described in docs/planner.md.",
        "name: cluster",
        "nodes:",
    ]
    for nodes in found:
        lines += _group(nodes)
    lines += [
        "# Zones or regions that are far from each other need a link, for example:",
        "# links:",
        "#   - {between: [us-a, eu-b], bytes_per_s: 0.5e9, latency_s: 0.09, usd_per_gb: 0.02}",
    ]
    return "\n".join(lines) + "\n"


def _group(nodes: Nodes) -> list[str]:
    several = len(nodes.gpus) > 1
    lines = [f"  # Found: {nodes.count} x {comment(_seen(nodes))}."]
    if any(seen.gpu is None for seen in nodes.gpus):
        which = "a GPU of these" if several else "such GPU"
        lines.append(f"  # The catalog has no {which}: CHECK. Name the nearest one, or describe it under 'gpus:'.")
    if several:
        lines.append("  - gpus:  # CHECK: in the order of nvidia-smi" if nodes.gpus[0].gres else "  - gpus:")
        for seen in nodes.gpus:
            gres = f", gres: {_word(seen.gres)}" if seen.gres else ""
            lines.append(f"      - {{type: {_catalog_word(seen)}, count: {seen.count}{gres}}}{_doubt(seen)}")
    else:
        lines.append(f"  - gpu: {_catalog_word(nodes.gpus[0])}{_doubt(nodes.gpus[0])}")
    lines.append(f"    count: {nodes.count}")
    if not several:
        lines.append(f"    gpus_per_node: {nodes.gpus[0].count}")
    lines += ["    zone: local                  # nodes near each other; us-a-1 is in region us-a"]
    if nodes.network:
        rate, known = nodes.network
        lines.append(f"    network_bytes_per_s: {rate:g}   # of a whole node, one direction: {known}")
    else:
        lines.append("    network_bytes_per_s: 12.5e9  # CHECK: of a whole node, one direction; 12.5e9 is 100 Gbit/s")
    first = nodes.gpus[0]
    price = catalog()[first.gpu.name].usd_per_hour if first.gpu else None
    where = ", in the entries of gpus" if several else ""
    lines.append(f"    # usd_per_gpu_hour: {price if price is not None else 2.0}       # your price, for costs{where}")
    if nodes.memory_bytes:
        lines.append(
            f"    # host_memory_bytes: {0.8 * nodes.memory_bytes:.0f}   # main memory that plans may offload to; "
            f"a node has {nodes.memory_bytes / GIB:.0f} GiB"
        )
    if nodes.hosts:
        lines.append(f"    hosts: [{', '.join(_word(host) for host in nodes.hosts)}]")
    slurm = dict(nodes.slurm) | ({"gres": first.gres} if first.gres and not several else {})
    if slurm:
        words = (f"{key}: {text if key == 'cpus' else _word(text)}" for key, text in slurm.items())
        lines.append(f"    slurm: {{{', '.join(words)}}}")
    return lines


def _seen(nodes: Nodes) -> str:
    return " + ".join(f"{seen.count} {seen.name}" for seen in nodes.gpus)


def _catalog_word(seen: Seen) -> str:
    return UNKNOWN if seen.gpu is None else _word(seen.gpu.name)


def _doubt(seen: Seen) -> str:
    return f"  # CHECK: {seen.gpu.doubt}" if seen.gpu is not None and seen.gpu.doubt else ""


def _word(text: str) -> str:
    """A YAML text; quoted, because names such as ``1e3`` or ``on`` mean something else without quotes."""
    return json.dumps(text)


def _lines(found: Sequence[Nodes], source: str, out: str) -> list[Any]:
    lines = [
        f"{nodes.count} x {_seen(nodes)}: "
        + " + ".join(seen.gpu.name if seen.gpu else "not in the catalog" for seen in nodes.gpus)
        for nodes in found
    ]
    lines.append(f"wrote {out} (from {source})")
    if any(seen.gpu is None for nodes in found for seen in nodes.gpus):
        lines.append(f"Replace {UNKNOWN} in it: name the nearest GPU of the catalog, or describe yours under 'gpus:'")
    lines.append(f"Next: check it, then '{command()} plan --cluster {out} --model MODEL'")
    return lines
