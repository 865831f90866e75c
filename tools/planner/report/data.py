"""Contents of a page: plain values, as they are embedded in the page as JSON."""

from typing import Any, NotRequired, TypedDict


class Figure(TypedDict):
    """One figure in large type.

    ``unit`` is s, bytes, usd, share, tokens/s, FLOP/s, count or empty (then ``value`` is a text).
    """

    name: str
    value: float | str | None
    unit: str
    note: str


class NodeOnMap(TypedDict):
    """One node.  ``gpus`` holds ``[stage, replica, rank]`` of every GPU, empty for one that no rank uses."""

    name: str
    gpus: list[list[int]]
    sent_bytes: float
    received_bytes: float
    load: float  # share of the iteration in which its network is busy, the busier direction


class PoolOnMap(TypedDict):
    """Equal nodes: an entry of ``nodes`` in the cluster file."""

    gpu: str
    gpus_per_node: int
    count: int
    used_gpus: int
    quota: int
    usd_per_gpu_hour: float | None
    network_bytes_per_s: float | None
    nodes: list[NodeOnMap]
    left_out: str  # note on nodes that are not drawn; empty if all are


class ZoneOnMap(TypedDict):
    """The pools of one zone."""

    name: str
    region: str
    pools: list[int]


class LinkOnMap(TypedDict):
    """Traffic between nodes of two pools in one iteration, both directions together."""

    first: int
    second: int
    transfer_bytes: float
    collective_bytes: float
    load: float  # share of the iteration in which the busiest pair of nodes keeps its link busy
    bytes_per_s: float


class ClusterMap(TypedDict):
    """The cluster with a plan's ranks and traffic."""

    name: str
    pools: list[PoolOnMap]
    zones: list[ZoneOnMap]
    links: list[LinkOnMap]


class Lane(TypedDict):
    """One device (replica of a stage) of a timeline, with its idle time by cause."""

    name: str
    stage: int
    compute_s: float
    idle_s: dict[str, float]


class TimelineData(TypedDict):
    """One iteration.

    ``events`` are columns of equal length: lane, start and duration in nanoseconds, index into ``labels``,
    microbatch, slice, chunk, peer (a lane, or -1) and bytes (-1 where there is nothing to say).
    """

    title: str
    makespan_s: float
    lanes: list[Lane]
    labels: list[list[str]]  # [mnemonic, name, group] of every kind of operation that occurs
    events: dict[str, list[int]]
    left_out: list[str]


class PageData(TypedDict):
    """Everything on a page.  Sections that are missing or empty are left out."""

    title: str
    subtitle: str
    figures: list[Figure]
    cluster: NotRequired[ClusterMap]
    stages: NotRequired[list[dict[str, Any]]]  # of ``tables.stages_of``, with busy_s, limit_bytes and note
    timelines: NotRequired[list[TimelineData]]
    causes: NotRequired[dict[str, float]]
    replay: NotRequired[dict[str, Any]]  # courses (of ``replay --json``, each with its curve), end_s, pools (plans)
    # Plans: what, plan, iteration_s, tokens_per_s, usd_per_iteration (None: no plan, or no price) and gpus.
    comparison: NotRequired[list[dict[str, Any]]]
    runners_up: NotRequired[list[dict[str, Any]]]
    one_more_node: NotRequired[list[dict[str, Any]]]  # of ``analysis.one_more_node``
    binding: NotRequired[list[str]]
    notes: NotRequired[list[str]]
    plan: NotRequired[dict[str, Any]]
