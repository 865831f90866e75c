"""The command ``replan``: correction of cluster and profile by a run's measurements, search, and gain of a change."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, groupby, product
from math import ceil
from pathlib import Path
from typing import Any

from megatron_het.plan import Plan, save_plan
from megatron_het.safe_io import add_options, amount
from megatron_het.schedule.ir import Kind
from megatron_het.schedule.kinds import Direction

from ..costs.build import as_said, candidate_of, read_plan, rooms_of
from ..costs.estimate import Estimator, estimator_of
from ..costs.layer import CPU_GLOO
from ..costs.simulation import simulate_candidate
from ..errors import PlannerError
from ..inputs.catalog import Gpu
from ..inputs.cluster import Cluster, NodeGroup, ZoneLink, load_cluster
from ..inputs.files import check_target, write_text
from ..inputs.model import Model, load_model
from ..inputs.packing import Seat, seat_replicas
from ..inputs.profile_schema import DeviceProfile, LinkProfile, Profile, load_profile, save_profile
from ..report.analysis import complete
from ..report.tables import say, table
from ..search.methods import search
from ..search.outcome import Goal, Progress, SearchResult, check_memory_margin, cpu_limit, file_text, goal_from, left_s
from .measured import DeviceTimes, Watched, find_files, load_watched

# Correction of the planner's inputs: a cluster and a profile with the run's measured figures.
#
# A deviation that all devices of a kind share scales the figures of the kind.  A device with its own finding, or at
# an end of a slow link, becomes a separate kind: its GPUs leave their group of nodes, so that the search can give
# them less work, put them elsewhere in the pipeline, or leave them out.


Factors = tuple[float, float]  # measured over predicted seconds of forwards and backwards


@dataclass(frozen=True, slots=True)
class Corrected:
    """The planner's inputs as the run has found them."""

    # cluster, profile: corrected; no profile where there was none
    cluster: Cluster
    profile: Profile | None
    plan: Plan  # the run's plan, with its replicas on the kinds of devices of the corrected cluster
    notes: tuple[str, ...]  # what was changed, in sentences, and what could not be expressed


def correct(plan: Plan, cluster: Cluster, profile: Profile | None, watched: Watched) -> Corrected:
    """Correct cluster and profile by the measurements; raises PlannerError if the plan does not fit the cluster."""
    seats = [seat for stage in seat_replicas(plan, rooms_of(cluster)) for seat in stage]
    own = _own_kinds(watched)
    # A replica may span several kinds by its context-parallel ranks; they are measured together only.
    before = [replica.devices for stage in plan.stages for replica in stage.replicas]
    kinds = [tuple(kind + own.get(device, "") for kind in names) for device, names in enumerate(before)]
    factors = _factors(watched, own, before)
    notes = _notes(watched, factors, {device: " and ".join(dict.fromkeys(kinds[device])) for device in own})
    leaving = [
        (list(here), cluster.nodes[pool].gpu + ending)
        for device, ending in own.items()
        for (pool, _), here in groupby(sorted(seats[device]), key=lambda seat: (seat.pool, seat.node))
    ]
    cluster = _split(cluster, leaving, notes)
    links = _slow_pairs(watched, kinds)
    base = {kind + ending: kind for device, ending in own.items() for kind in before[device]}
    if profile is not None:
        profile = _corrected_profile(profile, base, factors, links)
    else:
        cluster = _scaled_gpus(cluster, base, factors)
    if profile is None or not any(k.operation == "p2p" for k in profile.links):
        cluster = _slow_zones(cluster, links)
    return Corrected(cluster, profile, _renamed(plan, kinds), tuple(notes))


def _own_kinds(watched: Watched) -> dict[int, str]:
    """Returns the suffix of the kind's name, by device with its own kind."""
    names = {watched.name_of(d.device): d.device for d in watched.devices}
    slow = {names[f.name] for f in watched.active if f.what in ("device", "operation") and f.name in names}
    ends: set[int] = set()
    for finding in watched.active:
        if finding.what == "link":
            ends |= {names[end] for end in finding.name.split(" -> ") if end in names}
    out = {device: f" slow {device}" for device in sorted(slow)}
    return out | {device: f" link {device}" for device in sorted(ends - slow)}


def _factors(watched: Watched, own: Mapping[int, str], kinds: Sequence[tuple[str, ...]]) -> dict[str, Factors]:
    """Returns factors by kind, from its devices without a slow finding if any; new kinds get those of their device."""
    out: dict[str, Factors] = {}
    for kind in dict.fromkeys(kind for names in kinds for kind in names):
        mine = [d for d in watched.devices if kind in kinds[d.device]]
        alike = [d for d in mine if "slow" not in own.get(d.device, "")] or mine
        alike = [d for d in alike if len(set(kinds[d.device])) == 1] or alike
        out[kind] = _factor(alike, Direction.FORWARD), _factor(alike, Direction.BACKWARD)
    for device, ending in own.items():
        one = [watched.devices[device]]
        slow = (_factor(one, Direction.FORWARD), _factor(one, Direction.BACKWARD)) if " slow " in ending else None
        out |= {kind + ending: slow or out[kind] for kind in kinds[device]}
    return out


def _factor(devices: Sequence[DeviceTimes], direction: Direction) -> float:
    """Measured over predicted seconds, all operations of a direction together."""
    rows = [times for d in devices for name, times in d.operations.items() if Kind.rows[name].direction is direction]
    predicted = sum(row.predicted_s for row in rows)
    return sum(row.measured_s for row in rows) / predicted if predicted > 0 else 1.0


def _notes(watched: Watched, factors: Mapping[str, Factors], own: Mapping[int, str]) -> list[str]:
    notes = [
        f"{name}: forwards take {forward:.2f} times, backwards {backward:.2f} times the planned time"
        for name, (forward, backward) in factors.items()
    ]
    for device, name in own.items():
        one = watched.devices[device]
        notes.append(
            f"{watched.name_of(device)} on {one.host or 'its host'} is a kind of its own now, {name}: place the ranks "
            "of this kind there"
        )
    return notes


def _split(cluster: Cluster, leaving: Sequence[tuple[list[Seat], str]], notes: list[str]) -> Cluster:
    """Returns the cluster with some GPUs, each set from one node, in separate groups of nodes."""
    nodes: list[NodeGroup] = []
    gpus = dict(cluster.gpus)
    by_node: dict[tuple[int, int], list[tuple[list[int], str]]] = {}
    for seats, name in leaving:
        by_node.setdefault((seats[0].pool, seats[0].node), []).append(([seat.gpu for seat in seats], name))
    for pool, group in enumerate(cluster.nodes):
        touched = [n for p, n in by_node if p == pool or group.shares_nodes_with(cluster.nodes[p])]
        mine = {node: by_node.get((pool, node), []) for node in touched}
        hosts, shares = group.hosts, bool(group.shared_node)
        if len(mine) < group.count:
            kept = tuple(host for i, host in enumerate(hosts) if i not in mine)
            taken = sum(len(gpus) for parts in mine.values() for gpus, _ in parts)
            quota = None if group.max_gpus is None else max(0, group.max_gpus - taken)
            nodes.append(_group(group, count=group.count - len(mine), hosts=kept, max_gpus=quota))
        for node, parts in mine.items():
            whole = shares or (len(parts) == 1 and len(parts[0][0]) == group.gpus_per_node)
            host = (hosts[node],) if hosts and whole else ()
            if hosts and not whole:
                notes.append(f"{hosts[node]} has GPUs of several kinds now: hosts of these groups are left open")
            left = set(range(group.gpus_per_node)).difference(*(there for there, _ in parts))
            for there, name in [(sorted(left), group.gpu), *parts]:
                if name != group.gpu:
                    gpus[name] = cluster.gpu(group.gpu)
                if there:
                    found = _group(group, gpu=name, count=1, gpus_per_node=len(there), hosts=host, max_gpus=None)
                    devices = tuple(group.devices[i] for i in there) if shares else ()
                    name_of_node = f"{group.shared_node} {node}" if shares else ""
                    nodes.append(found.model_copy(update={"shared_node": name_of_node, "devices": devices}))
    return cluster.model_copy(update={"nodes": tuple(nodes), "gpus": gpus})


def _group(group: NodeGroup, **changes: object) -> NodeGroup:
    """Returns the group with an explicit region, so that its zone may be renamed."""
    return group.model_copy(update={"region": group.where, **changes})


def _scaled_gpus(cluster: Cluster, base: Mapping[str, str], factors: Mapping[str, Factors]) -> Cluster:
    """Without a profile: divide the catalog's rates by the measured slowdown of compute."""
    gpus = dict(cluster.gpus)
    for name, (forward, backward) in factors.items():
        gpu = cluster.gpu(base.get(name, name))
        longer = (forward + 2 * backward) / 3  # a backward is about twice a forward
        gpus[name] = _slower(gpu, longer)
    return cluster.model_copy(update={"gpus": gpus})


def _slower(gpu: Gpu, longer: float) -> Gpu:
    flops = {precision: rate / longer for precision, rate in gpu.flops.items()}
    changed = {"memory_bytes_per_s": gpu.memory_bytes_per_s / longer, "launch_s": gpu.launch_s * longer}
    return gpu.model_copy(update={"flops": flops, **changed})


def _slow_zones(cluster: Cluster, slow: Mapping[tuple[str, str], float]) -> Cluster:
    """Without measured links: put both ends of a slow link in separate zones, with a link between them."""
    if not slow:
        return cluster
    ends = {name for pair in slow for name in pair}
    groups = {node.gpu: node for node in cluster.nodes if node.gpu in ends}
    zones = {name: f"{group.zone}-{name.replace(' ', '-')}" for name, group in groups.items()}
    links = list(cluster.links)
    for name, group in groups.items():
        for link in cluster.links:
            if group.zone in link.between:
                other = next((z for z in link.between if z != group.zone), group.zone)
                links.append(link.model_copy(update={"between": (zones[name], other)}))
    for (a, b), factor in slow.items():
        rate, latency, usd = cluster.link(groups[a], groups[b])
        between = (zones[a], zones[b])
        links.insert(
            0, ZoneLink(between=between, bytes_per_s=rate / factor, latency_s=latency * factor, usd_per_gb=usd)
        )
    nodes = tuple(
        node.model_copy(update={"zone": zones[node.gpu], "region": node.where}) if node.gpu in zones else node
        for node in cluster.nodes
    )
    return cluster.model_copy(update={"nodes": nodes, "links": tuple(links)})


def _corrected_profile(
    profile: Profile, base: Mapping[str, str], factors: Mapping[str, Factors], slow: Mapping[tuple[str, str], float]
) -> Profile:
    devices: list[DeviceProfile] = []
    for device in profile.devices:
        names = [device.kind, *(name for name, kind in base.items() if kind == device.kind)]
        devices += [_slower_device(device, name, factors.get(name, (1.0, 1.0))) for name in names]
    links = [*profile.links, *_new_links(profile.links, base)]
    return replace(profile, devices=devices, links=[_slower_link(link, slow) for link in links])


def _slower_device(device: DeviceProfile, name: str, factors: Factors) -> DeviceProfile:
    forward, backward = factors
    by = {"forward_s": forward, "backward_s": backward, "fixed_forward_s": forward, "fixed_backward_s": backward}
    timings = [replace(t, **{of: getattr(t, of) * factor for of, factor in by.items()}) for t in device.timings]
    return replace(device, kind=name, timings=timings)


def _new_links(links: Sequence[LinkProfile], base: Mapping[str, str]) -> list[LinkProfile]:
    """Returns links for the kinds that were split off, copied from those of their original kinds."""
    out = []
    for link in links:
        ends = [
            [kind, *(name for name, old in base.items() if old == kind)] for kind in (link.first_kind, link.second_kind)
        ]
        is_one = link.first_kind == link.second_kind
        _, *more = combinations_with_replacement(ends[0], 2) if is_one else product(ends[0], ends[1])
        out += [replace(link, first_kind=a, second_kind=b) for a, b in more]
    return out


def _slower_link(link: LinkProfile, slow: Mapping[tuple[str, str], float]) -> LinkProfile:
    pair = tuple(sorted((link.first_kind, link.second_kind)))
    factor = slow.get((pair[0], pair[1]), 1.0)
    if link.operation != "p2p" or factor == 1.0:
        return link
    return replace(link, latency_s=link.latency_s * factor, bytes_per_s=link.bytes_per_s / factor)


def _slow_pairs(watched: Watched, kinds: Sequence[tuple[str, ...]]) -> dict[tuple[str, str], float]:
    """Returns, by pair of kinds in the order of their names, the slowdown factor of a transfer."""
    named = {f.name for f in watched.active if f.what == "link"}
    groups = {f.name.removesuffix(" in one machine") for f in watched.active if f.what == "profile"}
    out: dict[tuple[str, str], float] = {}
    for link in watched.links:
        if link.measured_s is None or link.predicted_s <= 0:
            continue
        factor = max(link.measured_s / link.predicted_s, 1e-3)
        ends = f"{watched.name_of(link.source)} -> {watched.name_of(link.target)}"
        sort = f"{watched.devices[link.source].kind} -> {watched.devices[link.target].kind}"
        if ends in named or sort in groups:
            for a, b in product(kinds[link.source], kinds[link.target]):
                pair = min(a, b), max(a, b)
                out[pair] = max(factor, out.get(pair, 0.0))
    return out


def _renamed(plan: Plan, kinds: Sequence[tuple[str, ...]]) -> Plan:
    """Returns the plan with the new kinds of devices."""
    stages, device = [], 0
    for stage in plan.stages:
        replicas = []
        for replica in stage.replicas:
            names = kinds[device]
            several = names if len(set(names)) > 1 else ()
            anywhere = replace(replica, zone="", node_group=-1)
            replicas.append(replace(anywhere, device=" + ".join(dict.fromkeys(names)), cp_devices=several))
            device += 1
        stages.append(replace(stage, replicas=tuple(replicas)))
    return replace(plan, stages=tuple(stages))


Search = Callable[[Estimator, Goal], SearchResult]


@dataclass(frozen=True, slots=True)
class Replanned:
    """The better plan, if any, and its gain."""

    corrected: Corrected  # the planner's inputs as the run has found them
    plan: Plan | None  # the better plan; None where the run's own plan is the best that was found
    measured_s: float  # iteration time of the run now
    # before_s, after_s: times predicted from the measured figures: of the run's own plan, and of the better one
    before_s: float
    after_s: float
    outcome: SearchResult
    restart_s: float  # assumed cost of a change

    @property
    def gain(self) -> float:
        """Share of the iteration time that the better plan saves."""
        return 1 - self.after_s / self.before_s

    @property
    def expected_s(self) -> float:
        """Iteration time under the better plan: the gain applied to the measured time."""
        return self.measured_s * (1 - self.gain)

    @property
    def pays_after(self) -> int | None:
        """Iterations after which the cost of the change is recovered; None if never."""
        saved_s = self.measured_s - self.expected_s
        return ceil(self.restart_s / saved_s) if self.plan is not None and saved_s > 0 else None


def replan(
    plan: Plan,
    cluster: Cluster,
    model: Model,
    watched: Watched,
    *,
    profile: Profile | None = None,
    goal: Goal | None = None,
    memory_margin: float = 0.95,
    restart_s: float = 60.0,
    find: Search | None = None,
) -> Replanned:
    """Search for a better plan from a run's measurements.  The controller of elastic jobs calls this, too.

    Args:
        cluster, model, profile: What it was planned from.
        restart_s: Seconds that a change of the plan costs: save, stop, start, load.
        find: The search; by default the one of ``plan``.

    Raises:
        PlannerError: The plan does not fit the cluster or is not priced; nothing fits.
    """
    corrected = correct(plan, cluster, profile, watched)
    # As in the plan's prediction: on a CPU the host computes and posts.
    is_cpu = plan.predicted is not None and plan.predicted.costs is not None and plan.predicted.costs.host_blocks
    runtime = CPU_GLOO if is_cpu else None
    estimator = estimator_of(corrected.cluster, model, corrected.profile, runtime, memory_margin)
    before_s = predicted_s(estimator, corrected.plan)
    goal = goal or Goal()
    outcome = search("auto", estimator, goal, Progress()) if find is None else find(estimator, goal)
    best = outcome.best
    better = None
    if best is not None and best.runnable and best.iteration_s < before_s:
        better = complete(estimator.running(best.candidate.gpus()), best, "made by replan from measured figures")
    after_s = before_s if better is None or best is None else best.iteration_s
    return Replanned(
        corrected=corrected,
        plan=better,
        measured_s=watched.iteration_s,
        before_s=before_s,
        after_s=after_s,
        outcome=outcome,
        restart_s=restart_s,
    )


def predicted_s(estimator: Estimator, plan: Plan) -> float:
    """The simulated time of a plan's iteration.

    Raises:
        PlannerError: The plan does not fit the cluster, or there are no figures for one of its replicas.
    """
    candidate, seated = candidate_of(plan, estimator.cluster, "the run's plan")
    estimator = estimator.running(candidate.gpus())
    candidate = as_said(estimator, candidate, plan)
    estimate = estimator.estimate(candidate)
    if estimate is None:
        raise PlannerError("the run's plan", "stages", len(plan.stages), "no figures for some replica of this plan")
    return simulate_candidate(estimator, candidate, estimate, replace(plan, predicted=None), seated).iteration_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    found = "(default: found in RUN)"
    # fmt: off
    add_options(parser, {
        "folder": (None, "RUN", "folder of the run", {"type": Path}),
        "--plan": (None, "FILE", f"plan of the run {found}"),
        "--cluster": (None, "FILE", f"cluster file of the plan {found}"),
        "--model": (None, "FILE", f"model file {found}"),
        "--profile": (None, "FILE", f"profile of the plan, if any {found}"),
        "--watch": (None, "FILE", f"watch.json with the run's measurements {found}"),
        "--out": (None, "FILE", "plan to write (default: plan-2.json in RUN)", {"type": Path}),
        "--restart-s": (60.0, "S", "cost of a change in seconds: save, stop, start, load (default %(default)g)",
                        {"type": amount(0.0, 1e7)}),
        "--memory-margin": (0.95, "SHARE", "share of GPU memory that a plan may use (default 0.95)"),
    })
    # fmt: on


def run(options: argparse.Namespace) -> int:
    """Run ``replan``: search, write the better plan, print its gain; exit code 1 if there is none."""
    names = ("plan", "cluster", "model", "profile", "watch")
    files = find_files(options.folder, {name: getattr(options, name) for name in names})
    out = options.out or options.folder / "plan-2.json"
    check_target(out, "--out")
    check_memory_margin(options)
    plan = read_plan(files.plan)
    watched = load_watched(files.watched, plan)
    goal = goal_from(options)

    def find(estimator: Any, wanted: Any) -> SearchResult:
        progress = Progress(limit_s=left_s(options))
        with cpu_limit(progress, options.limit_s):
            return search(options.search, estimator, wanted, progress)

    found = replan(
        plan,
        load_cluster(files.cluster),
        load_model(files.model),
        watched,
        profile=load_profile(files.profile) if files.profile is not None else None,
        goal=goal,
        memory_margin=options.memory_margin,
        restart_s=options.restart_s,
        find=find,
    )
    written = write(found, out) if found.plan is not None else []
    say(body(found, [str(path) for path in written]), options, *_tables(found, written, watched.findings))
    return 0 if found.plan is not None else 1


def write(found: Replanned, out: Path) -> list[Path]:
    """Write the better plan, and the corrected cluster and profile beside it."""
    assert found.plan is not None
    out.parent.mkdir(parents=True, exist_ok=True)
    save_plan(found.plan, out)
    cluster = out.with_suffix(".cluster.yaml")
    write_text(cluster, file_text(found.corrected.cluster))
    written = [out, cluster]
    if found.corrected.profile is not None:
        profile = out.with_suffix(".profile.json")
        save_profile(found.corrected.profile, profile)
        written.append(profile)
    return written


def body(found: Replanned, files: list[str]) -> dict[str, Any]:
    """Returns the output of ``--json``."""
    return {
        "measured_iteration_s": found.measured_s,
        "predicted_before_s": found.before_s,
        "predicted_after_s": found.after_s,
        "gain": found.gain,
        "expected_iteration_s": found.expected_s,
        "restart_s": found.restart_s,
        "pays_after_iterations": found.pays_after,
        "notes": list(found.corrected.notes),
        "kinds": _kinds(found),
        "files": files,
        "search_cpu_s": found.outcome.cpu_s,
    }


def _kinds(found: Replanned) -> dict[str, list[int]]:
    """Returns the ranks of the run's plan by corrected kind of device."""
    out: dict[str, list[int]] = {}
    for stage in found.corrected.plan.stages:
        for replica in stage.replicas:
            for part, device in enumerate(replica.devices):
                out.setdefault(device, []).extend(replica.tp_group(part))
    return out


def _tables(found: Replanned, written: list[Path], findings: Any) -> list[Any]:
    seen = table("What the run found", "what", "where", "factor", "since iteration")
    for finding in findings:
        where = f"{finding.name} {finding.operation}".strip()
        over = f", over at {finding.ended}" if finding.ended is not None else ""
        seen.add_row(finding.what, where, f"{finding.factor:.2f}", f"{finding.since or 'the start'}{over}")
    times = table("Iteration, s", "", "seconds")
    times.add_row("measured now", f"{found.measured_s:.4g}")
    times.add_row("this plan, from the measured figures", f"{found.before_s:.4g}")
    times.add_row("the best plan found, from the same figures", f"{found.after_s:.4g}")
    lines = [seen, *found.corrected.notes, times]
    if found.plan is None:
        return [*lines, "no better plan was found: the run has the best one for what was measured"]
    stages = " | ".join(
        f"{sum(stage.layers)} layers on "
        + " + ".join(f"{r.device} ({len(r.microbatches)} microbatches)" for r in stage.replicas)
        for stage in found.plan.stages
    )
    return [
        *lines,
        f"better: {stages}",
        f"an iteration becomes {100 * found.gain:.1f} % shorter, about {found.expected_s:.4g} s; with "
        f"{found.restart_s:g} s for the change it pays after {found.pays_after} iterations",
        "wrote " + ", ".join(map(str, written)),
    ]
