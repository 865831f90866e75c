"""The cluster as boxes: zones, nodes, and GPUs in the colour of their stage; links are drawn by a script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .data import ClusterMap, LinkOnMap, NodeOnMap, PoolOnMap
from .markup import Html, cell, scaled, share, size, table, tag, usd

FULL = 0.5
"""Load of a link from which it is drawn as a busy one."""


def cluster_section(cluster: ClusterMap, hues: Sequence[int]) -> Iterator[Html]:
    """The map and the table of links."""
    yield tag(
        "p",
        "Every square is a GPU in the colour and with the number of its stage; empty squares stay unused. The line "
        "under a node is the share of the iteration in which its network is busy.",
        class_="hint",
    )
    regions = {zone["region"] for zone in cluster["zones"]}
    zones = []
    for zone in cluster["zones"]:
        title = zone["name"] + (f" ({zone['region']})" if len(regions) > 1 and zone["region"] != zone["name"] else "")
        pools = [_pool(p, cluster["pools"], hues) for p in zone["pools"]]
        zones.append(tag("div", tag("h3", title), tag("div", *pools, class_="pools"), class_="zone"))
    drawing = Html('<svg class="links" aria-hidden="true"></svg>')
    yield tag("div", drawing, *zones, class_="map", id="map")
    for pool in cluster["pools"]:
        if pool["left_out"]:
            yield tag("p", f"{pool['gpu']}: {pool['left_out']}.", class_="left-out")
    if cluster["links"]:
        yield _links(cluster)


def _pool(index: int, pools: Sequence[PoolOnMap], hues: Sequence[int]) -> Html:
    pool = pools[index]
    price = pool["usd_per_gpu_hour"]
    network = pool["network_bytes_per_s"]
    each = f"{pool['gpus_per_node']} " if pool["gpus_per_node"] > 1 else ""
    facts = [f"{pool['count']} × {each}{_pool_name(index, pools)}"]
    if pool["used_gpus"] != pool["quota"]:
        facts.append(f"{pool['used_gpus']} of {pool['quota']} used")
    if network:
        facts.append(f"network {scaled(network, 'B/s')}")
    if price:
        facts.append(f"{usd(price)} an hour each")
    nodes = [_node(pool["gpu"], node, hues) for node in pool["nodes"]]
    title = tag("p", tag("b", facts[0]), tag("small", " · ".join(facts[1:])))
    return tag("div", title, tag("div", *nodes, class_="nodes"), class_="pool", data_pool=index)


def _node(gpu: str, node: NodeOnMap, hues: Sequence[int]) -> Html:
    squares = []
    for g, held in enumerate(node["gpus"]):
        if not held:
            squares.append(tag("i", class_="gpu", data_tip=f"{node['name']}, GPU {g}: {gpu}, unused"))
            continue
        stage, replica, rank = held
        tip = f"{node['name']}, GPU {g}: {gpu}, stage {stage}, replica {replica}, rank {rank}"
        style = f"--hue:{hues[stage]}"
        squares.append(tag("i", str(stage), class_="gpu used", style=style, data_tip=tip, data_stage=stage))
    busy = (
        f"{node['name']}: network busy {share(node['load'])} of the iteration; sends {size(node['sent_bytes'])}, "
        f"receives {size(node['received_bytes'])}"
    )
    width = min(1.0, node["load"])
    line = tag("u", style=f"width:{100 * width:.2f}%", class_="full" if node["load"] > FULL else None)
    wide = "node wide-node" if len(squares) > 4 else "node"
    return tag("div", tag("div", *squares, class_="gpus"), tag("div", line, class_="load", data_tip=busy), class_=wide)


_LINK_COLUMNS = ("between", "activations and gradients", "reductions and gathers", "bandwidth", "busiest link busy")


def _links(cluster: ClusterMap) -> Html:
    names = [_pool_name(p, cluster["pools"]) for p in range(len(cluster["pools"]))]
    zones = {p: zone["name"] for zone in cluster["zones"] for p in zone["pools"]}
    return table(_LINK_COLUMNS, (list(_link(link, names, zones)) for link in cluster["links"]))


def _pool_name(index: int, pools: Sequence[PoolOnMap]) -> str:
    """The kind of GPU, with a number where several pools have it."""
    gpu = pools[index]["gpu"]
    alike = [p for p, pool in enumerate(pools) if pool["gpu"] == gpu]
    return f"{gpu} #{alike.index(index) + 1}" if len(alike) > 1 else gpu


def _link(link: LinkOnMap, names: Sequence[str], zones: dict[int, str]) -> Iterator[Html]:
    first, second = link["first"], link["second"]
    if first == second:
        text = f"nodes of {names[first]}"
    elif zones[first] == zones[second]:
        text = f"{names[first]} – {names[second]}"
    else:
        text = f"{names[first]} ({zones[first]}) – {names[second]} ({zones[second]})"
    load = link["load"]
    bar = tag("i", class_="c-full" if load > FULL else "c-compute", style=f"width:{100 * min(1.0, load):.2f}%")
    yield tag("th", text, scope="row")
    yield cell(_LINK_COLUMNS[1], size(link["transfer_bytes"]))
    yield cell(_LINK_COLUMNS[2], size(link["collective_bytes"]))
    yield cell(_LINK_COLUMNS[3], scaled(link["bytes_per_s"], "B/s"))
    yield cell(_LINK_COLUMNS[4], tag("div", bar, class_="bar"), tag("small", share(load)), class_="wide")
