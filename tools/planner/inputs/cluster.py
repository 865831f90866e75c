"""The cluster file: nodes, their places, networks and prices."""

import os
from collections.abc import Iterable
from math import log
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from megatron_het.safe_io import MAX_DEVICES

from ..errors import PlannerError, validated
from .catalog import Gpu, Strict, find_gpu, parse_gpu
from .files import SLURM_RULES, expanded_hosts, read_yaml, text_problem
from .profile_schema import Profile

MAX_GPUS = MAX_DEVICES
MAX_GROUPS = 256
MAX_LINKS = 10_000  # bounds of a cluster file: a search beyond them takes too long
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _in_bytes(value: float) -> float:
    """Returns a bandwidth in bytes per second; refuses values that look like megabytes, gigabytes or bits."""
    if value < 1e5:
        raise ValueError("is in bytes per second, and no link is as slow. 100 Gbit/s is 12.5e9, and 25 GB/s is 25e9")
    return value


Rate = Annotated[float, Field(gt=0), AfterValidator(_in_bytes)]


def _as_name(value: str) -> str:
    if problem := text_problem(value) or ("" if value.strip() else "is blank"):
        raise ValueError(problem)
    return value


Name = Annotated[str, AfterValidator(_as_name)]
"""A name that people choose: one short line of characters that can be shown."""


class SlurmSettings(Strict):
    """Slurm options for nodes of this kind."""

    # partition, constraint, account, gres, qos, reservation, licenses, mem: values of Slurm's options; ``gres`` without
    # its number, ``mem`` per node
    partition: str | None = None
    constraint: str | None = None
    account: str | None = None
    gres: str | None = None
    qos: str | None = None
    reservation: str | None = None
    licenses: str | None = None
    mem: str | None = None
    # whether the job has its nodes for itself; None: if it uses all GPUs of nodes whose cores are not known
    exclusive: bool | None = None
    cpus: int | None = Field(default=None, ge=1, le=4096)  # cores of a node; None: not known

    @field_validator("mem", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if type(value) is int else value

    @field_validator(*SLURM_RULES)
    @classmethod
    def _as_slurm_allows(cls, value: str | None, info: ValidationInfo) -> str | None:
        problem = SLURM_RULES[str(info.field_name)](value) if value else ""
        if problem:
            raise ValueError(problem)
        return value


class KubernetesSettings(Strict):
    """Kubernetes settings of nodes of this kind: their labels, and the resource name of their GPUs."""

    node_selector: dict[str, str] = Field(default_factory=dict)
    resource: str = Field(default="nvidia.com/gpu", min_length=1, max_length=200)


class SkypilotSettings(Strict):
    """SkyPilot settings of nodes of this kind: name of the GPU, cloud and region, spot machines."""

    accelerators: str = ""
    infra: str = ""
    use_spot: bool = False


MeasuredRate = tuple[Annotated[int, Field(ge=1, le=1024)], Positive, Positive]


class NodeGroup(Strict):
    """Equal nodes."""

    gpu: Name  # kind of GPU, from the catalog or from ``gpus:`` of the file
    count: int = Field(ge=1, le=MAX_GPUS)  # nodes of this kind (the quota)
    gpus_per_node: int = Field(ge=1, le=1024)
    # zone, region: where they are; region defaults to the zone without its last ``-part``
    zone: Name = "local"
    region: Name | None = None
    network_bytes_per_s: Rate = 12.5e9  # network bandwidth of a whole node, one direction
    # main memory of a node that training may use for what it offloads; None = not known: twice the GPUs'
    host_memory_bytes: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    # bandwidth of one GPU to main memory; overrides the catalog's
    host_bytes_per_s: Rate | None = None
    # what one GPU alone reaches over the network, when less than the node
    stream_bytes_per_s: Rate | None = None
    # measured bandwidths to an equal node, ``(streams, message bytes, bytes per second)``: the total of that many GPUs
    # of a node when each sends messages of this size
    measured_rates: tuple[MeasuredRate, ...] = Field(default=(), max_length=1000)
    network_latency_s: float = Field(default=20e-6, ge=0)  # latency between two nodes of the same zone
    # what one rank's collectives reach over the network, when known to be less than its share of the network (software
    # limits); None = its share
    collective_bytes_per_s: Rate | None = None
    intra_node_bytes_per_s: Rate | None = None  # overrides the catalog's figure
    usd_per_gpu_hour: float | None = Field(default=None, ge=0)  # price; overrides the catalog's
    # interruptions and failures of a node per day, for ``rent``
    interruptions_per_day: float = Field(default=0.0, ge=0, le=86400)
    max_gpus: int | None = Field(default=None, ge=0)  # quota in GPUs, when less than ``count * gpus_per_node``
    hosts: tuple[str, ...] = ()  # host names, for generated scripts; ``node[01-04]`` stands for four
    # the interpreter of these nodes, for generated scripts, where kinds need environments of their own; None = that of
    # ``emit --python``
    python: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_./+-]+$")
    slurm: SlurmSettings = SlurmSettings()
    # name of the nodes, where groups of other kinds have more GPUs of the same nodes; empty: none
    shared_node: str = ""
    # numbers of these GPUs within such a node, in the order of the PCI bus
    devices: tuple[Annotated[int, Field(ge=0, lt=1024)], ...] = ()
    kubernetes: KubernetesSettings = KubernetesSettings()
    skypilot: SkypilotSettings = SkypilotSettings()

    @field_validator("hosts")
    @classmethod
    def _are_hosts(cls, hosts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        found: list[str] = []
        for host in hosts:
            found += expanded_hosts(host)
            if len(found) > MAX_GPUS:
                raise ValueError(f"more than {MAX_GPUS} hosts")
        if found and len(found) != (count := info.data.get("count", len(found))):
            raise ValueError(f"{len(found)} hosts for count = {count} nodes")
        return tuple(found)

    @model_validator(mode="after")
    def _has_its_devices(self) -> "NodeGroup":
        wanted = self.gpus_per_node if self.shared_node else 0
        if len(set(self.devices)) != wanted or len(self.devices) != wanted:
            raise ValueError(f"a group {'with' if wanted else 'without'} shared_node has {wanted} different devices")
        return self

    def cores(self, ranks: int) -> int:
        """Returns the cores for a number of ranks of a node, which share its cores; 0: unknown."""
        return (self.slurm.cpus or 0) * ranks // self.gpus_per_node

    def shares_nodes_with(self, other: "NodeGroup") -> bool:
        """Whether both groups are GPUs of the same nodes."""
        return bool(self.shared_node) and self.shared_node == other.shared_node

    def measured_rate(self, streams: int, size: float) -> float:
        """Bytes per second of a number of streams with messages of ``size`` bytes, from ``measured_rates``.

        Rates are interpolated over the logarithm of the size; beyond the measured sizes the nearest counts.  For
        the streams, the nearest smaller measured number is used; below the smallest, the rate in proportion.
        """
        counts = sorted({n for n, _, _ in self.measured_rates})
        count = max((n for n in counts if n <= streams), default=counts[0])
        points = sorted((s, r) for n, s, r in self.measured_rates if n == count)
        scale = min(1.0, streams / count)
        for (small, low), (large, high) in zip(points, points[1:]):
            if small <= size <= large:
                return scale * (low + (high - low) * log(size / small) / log(large / small))
        return scale * (points[0][1] if size < points[0][0] else points[-1][1])

    @property
    def quota(self) -> int:
        """GPUs that may be used."""
        total = self.count * self.gpus_per_node
        return total if self.max_gpus is None else min(total, self.max_gpus)

    @property
    def where(self) -> str:
        """The region."""
        if self.region is not None:
            return self.region
        return self.zone.rsplit("-", 1)[0] if "-" in self.zone else self.zone


class ZoneLink(Strict):
    """The connection between two zones or two regions (both directions)."""

    between: tuple[str, str]
    bytes_per_s: Rate
    latency_s: float = Field(default=1e-3, ge=0)
    usd_per_gb: float = Field(default=0.0, ge=0)


class Cluster(Strict):
    """A cluster file."""

    name: Name = "cluster"
    nodes: tuple[NodeGroup, ...] = Field(min_length=1, max_length=MAX_GROUPS)
    links: tuple[ZoneLink, ...] = Field(default=(), max_length=MAX_LINKS)
    gpus: dict[str, Gpu] = Field(default_factory=dict)

    @field_validator("nodes")
    @classmethod
    def _usable(cls, nodes: tuple[NodeGroup, ...]) -> tuple[NodeGroup, ...]:
        hosts: dict[str, int] = {}
        for i, node in enumerate(nodes):
            for host in map(str.lower, node.hosts):
                if host in hosts and not node.shares_nodes_with(nodes[hosts[host]]):
                    raise ValueError(f"host {host} is there twice (nodes[{hosts[host]}] and nodes[{i}])")
                hosts[host] = i
        if not any(node.quota for node in nodes):
            raise ValueError("max_gpus = 0 everywhere leaves no GPU to plan for")
        if sum(node.count * node.gpus_per_node for node in nodes) > MAX_GPUS:
            raise ValueError(f"more than {MAX_GPUS} GPUs")
        return nodes

    @model_validator(mode="after")
    def _regions(self) -> "Cluster":
        seen: dict[str, str] = {}
        for node in self.nodes:
            if seen.setdefault(node.zone, node.where) != node.where:
                raise ValueError(f"zone {node.zone} is in two regions: {seen[node.zone]} and {node.where}")
        return self

    def gpu(self, name: str) -> Gpu:
        """Returns the catalog entry of a kind of GPU."""
        return find_gpu(name, self.gpus, self.name, "gpu")

    def as_profiled(self, profile: Profile | None) -> "Cluster":
        """Returns the cluster without Transformer Engine on the GPUs whose layers were measured without."""
        without = {d.kind for d in profile.devices if not d.transformer_engine} if profile is not None else set()
        names = without.intersection(node.gpu for node in self.nodes)
        changed = {name: self.gpu(name).model_copy(update={"transformer_engine": False}) for name in names}
        return self.model_copy(update={"gpus": self.gpus | changed}) if changed else self

    @property
    def total_gpus(self) -> int:
        """All GPUs within the quotas."""
        return sum(n.quota for n in self.nodes)

    def place(self, node: NodeGroup) -> str:
        """Returns the kind of a group's GPUs, with the zone if the cluster has several."""
        return node.gpu + (f" ({node.zone})" if len({n.zone for n in self.nodes}) > 1 else "")

    def vendors_problem(self, pools: Iterable[int]) -> str:
        """Why the kinds of these groups cannot train together: they are of several vendors; empty if they can."""
        used = set(pools)
        names = " and ".join(sorted({self.nodes[pool].gpu for pool in used}))
        problem = f"{names} are of several vendors: no library of collectives joins them (docs/scale.md)"
        return problem if len(self.of_vendors(used)) > 1 else ""

    def of_vendors(self, pools: Iterable[int]) -> list[list[int]]:
        """Returns the groups by vendor; a group of unknown vendor is added to each."""
        builds = {pool: self.gpu(self.nodes[pool].gpu).torch_builds for pool in pools}
        vendors = sorted({"rocm" in names for names in builds.values() if names})
        return [[p for p, names in builds.items() if not names or ("rocm" in names) == rocm] for rocm in vendors]

    @staticmethod
    def in_one_node(first: NodeGroup, second: NodeGroup) -> bool:
        """Whether all GPUs of two groups of different kinds are in one and the same node."""
        return first is not second and first.count == second.count == 1 and first.shares_nodes_with(second)

    def link(self, first: NodeGroup, second: NodeGroup) -> tuple[float, float, float]:
        """(bytes_per_s of a node, latency_s, usd_per_gb) between nodes of two groups."""
        rate = min(first.network_bytes_per_s, second.network_bytes_per_s)
        latency = max(first.network_latency_s, second.network_latency_s)
        if self.in_one_node(first, second):
            each = [n.intra_node_bytes_per_s or self.gpu(n.gpu).intra_node_bytes_per_s for n in (first, second)]
            return min(each) * min(first.gpus_per_node, second.gpus_per_node), 0.0, 0.0
        if first.zone == second.zone:
            return rate, latency, 0.0
        for names in ((first.zone, second.zone), (first.where, second.where)):
            for link in self.links:
                if set(link.between) == set(names) and (names[0] != names[1] or link.between[0] == names[0]):
                    return min(rate, link.bytes_per_s), link.latency_s, link.usd_per_gb
        return rate, max(latency, 1e-3 if first.where != second.where else latency), 0.0


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster file (YAML or JSON); raises PlannerError."""
    return cluster_from_document(read_yaml(path), str(path))


def cluster_from_document(document: Any, file: str) -> Cluster:
    """A Cluster from parsed YAML; see ``load_cluster``."""
    if not isinstance(document, dict):
        raise PlannerError(file, "(document)", document, "expected a mapping with 'nodes:'")
    own_bodies = document.get("gpus") or {}
    if not isinstance(own_bodies, dict):
        raise PlannerError(file, "gpus", own_bodies, "expected a mapping of names to figures")
    for name in own_bodies:
        if text_problem(name) or not name.strip():
            raise PlannerError(file, "gpus", name, "a name needs characters that can be shown, at most 200")
    own = {name: parse_gpu(body, file, name) for name, body in own_bodies.items()}
    groups, keys = single_kinds(document.get("nodes"), file)
    cluster: Cluster = validated(Cluster, {**document, "nodes": groups, "gpus": own_bodies}, file)
    for node, key in zip(cluster.nodes, keys, strict=True):
        find_gpu(node.gpu, own, file, key)
    _check_shared_nodes(cluster, file)
    _check_links(cluster, file)
    return cluster


class GpusOfNode(Strict):
    """An entry of ``gpus`` of a node group: GPUs of one kind in nodes with several kinds."""

    type: str
    # How many of them a node has.  Entries follow each other as devices do on the PCI bus.
    count: int = Field(ge=1, le=1024)
    # max_gpus, usd_per_gpu_hour, intra_node_bytes_per_s, host_bytes_per_s: as of a node group, for this kind
    max_gpus: int | None = Field(default=None, ge=0)
    usd_per_gpu_hour: float | None = Field(default=None, ge=0)
    intra_node_bytes_per_s: Rate | None = None
    host_bytes_per_s: Rate | None = None
    gres: str | None = None  # Slurm's name for this kind


_OF_WHOLE_NODE = ("network_bytes_per_s", "host_memory_bytes")
"""Fields of a node that are divided among its kinds by their number of GPUs."""


def single_kinds(groups: Any, file: str) -> tuple[Any, list[str]]:
    """Returns groups of a single kind each, and the key of each kind in the file.

    The first kind of mixed nodes replaces their group, so that errors name the right entry; the other kinds
    come after all groups.

    Raises:
        PlannerError: Malformed mixed nodes.
    """
    if not isinstance(groups, list):
        return groups, []
    out, keys = list(groups), [f"nodes[{i}].gpu" for i in range(len(groups))]
    for i, group in enumerate(groups):
        if isinstance(group, dict) and "gpus" in group:
            out[i], *more = _kinds_of_nodes(group, file, f"nodes[{i}]")
            out += more
            keys[i] = f"nodes[{i}].gpus"
            keys += [keys[i]] * len(more)
    return out, keys


def _kinds_of_nodes(group: dict[str, Any], file: str, where: str) -> list[dict[str, Any]]:
    if isinstance(group["gpus"], int) and "gpu" in group:
        hint = f"Nodes with GPUs of one kind have 'gpus_per_node: {group['gpus']}'"
        raise PlannerError(file, f"{where}.gpus", group["gpus"], "is for nodes with several kinds of GPUs", hint)
    for key, hint in {
        "gpu": "Each entry of 'gpus' has a 'type'",
        "gpus_per_node": "Each entry of 'gpus' has a 'count'",
        "max_gpus": "Give it in the entries of 'gpus'",
        "shared_node": "It is for groups of a single kind",
        "devices": "The order of 'gpus' says it",
    }.items():
        if key in group:
            raise PlannerError(file, f"{where}.{key}", group[key], "does not go with 'gpus'", hint)
    if not isinstance(group["gpus"], list) or not group["gpus"]:
        raise PlannerError(file, f"{where}.gpus", group["gpus"], "expected a list", "Like [{type: T4, count: 2}]")
    entries = [validated(GpusOfNode, body, file, (where, "gpus", j)) for j, body in enumerate(group["gpus"])]
    kinds: dict[str, list[int]] = {}
    total = 0
    for entry in entries:
        kinds.setdefault(entry.type, []).extend(range(total, total + entry.count))
        total += entry.count
    common = {key: value for key, value in group.items() if key != "gpus"}
    out = []
    for kind, devices in kinds.items():
        mine = [e.model_dump(exclude={"type", "count"}, exclude_none=True) for e in entries if e.type == kind]
        own = {key: value for entry in mine for key, value in entry.items()}
        if "gres" in own:
            own["slurm"] = {**(group.get("slurm") or {}), "gres": own.pop("gres")}
        for key in _OF_WHOLE_NODE:
            whole = group.get(key, NodeGroup.model_fields[key].default)
            if isinstance(whole, int | float) and not isinstance(whole, bool):
                own[key] = whole * len(devices) / total
        out.append(common | own | {"gpu": kind, "gpus_per_node": len(devices)})
        if len(kinds) > 1:
            out[-1] |= {"shared_node": where, "devices": devices}
    return out


def _check_shared_nodes(cluster: Cluster, file: str) -> None:
    """Check that groups of the same nodes have different kinds and devices, and the same hosts."""
    for i, first in enumerate(cluster.nodes):
        for k, second in enumerate(cluster.nodes[:i] if first.shared_node else ()):
            if not first.shares_nodes_with(second):
                continue
            for key in ("count", "hosts", "python"):
                if getattr(first, key) != getattr(second, key):
                    problem = f"nodes[{k}] says otherwise of the same nodes ({first.shared_node})"
                    raise PlannerError(file, f"nodes[{i}].{key}", getattr(first, key), problem)
            if first.gpu == second.gpu or set(first.devices) & set(second.devices):
                problem = f"nodes[{k}] has some of the same nodes ({first.shared_node}) already"
                raise PlannerError(file, f"nodes[{i}].devices", list(first.devices), problem)


def _check_links(cluster: Cluster, file: str) -> None:
    """Check that links name existing places, and that every pair of regions has one."""
    places = {n.zone for n in cluster.nodes} | {n.where for n in cluster.nodes}
    for i, link in enumerate(cluster.links):
        for end in link.between:
            if end not in places:
                problem = "no node is in this zone or region"
                raise PlannerError(file, f"links[{i}].between", end, problem, f"Known: {', '.join(sorted(places))}")
    known: dict[frozenset[str], int] = {}
    for i, link in enumerate(cluster.links):
        pair = frozenset(link.between)
        earlier = known.setdefault(pair, i)
        one, other = (cluster.links[n].model_dump(exclude={"between"}) for n in (earlier, i))
        if one != other:
            problem = f"links[{earlier}] has other figures for the same two places"
            hint = "Keep one of them: a link counts in both directions"
            raise PlannerError(file, f"links[{i}]", list(link.between), problem, hint)
    for i, first in enumerate(cluster.nodes):
        for second in cluster.nodes[i + 1 :]:
            if first.where != second.where and not any(
                set(link.between) in ({first.zone, second.zone}, {first.where, second.where}) for link in cluster.links
            ):
                problem = f"nothing says how {first.where} reaches {second.where}"
                hint = f"Add '- between: [{first.where}, {second.where}]' with bytes_per_s, latency_s and usd_per_gb"
                raise PlannerError(file, "links", [list(link.between) for link in cluster.links], problem, hint)
