"""``emit``: from plan.json to the flags and scripts of a job.

Writes into one folder: ``plan.json``, ``args.sh``, ``train.sbatch`` (heterogeneous),
``train-plain.sbatch`` if an ordinary job suffices, ``torchrun-node-<n>.sh``, and ``layout.txt``
with Megatron's own layout string when the plan needs no extension.  In place of the batch scripts ``jobset.yaml`` or
``skypilot.yaml``.
"""

import argparse
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron_het.arguments.megatron_args import environment_of
from megatron_het.doctor.check import Expectations, LayerExpectation, LayerModel, LinkExpectation
from megatron_het.doctor.links import pairs_of
from megatron_het.features.registry import check_plan_alone
from megatron_het.plan import Plan, PlanError, plan_hash, save_plan
from megatron_het.plan.run_config import check_batch_schedule
from megatron_het.store.job import token_of_file

from ..costs.build import check_same_model, read_plan, rooms_of
from ..errors import PlannerError, plan_errors
from ..inputs.catalog import common_builds
from ..inputs.cluster import Cluster, NodeGroup, load_cluster
from ..inputs.files import check_target, write_text
from ..inputs.model import Model
from ..inputs.packing import Node, Seat, components, place, seat_replicas, strayed, whole_kind
from ..inputs.profile_schema import LayerTiming, Profile, load_profile
from ..search.outcome import CLUSTER, MODEL, PROFILE, check_planned_precision, keep_inputs
from .elastic import SCRIPT, ElasticOptions, check_elastic, checked_sbatch, elastic_environment, load_more
from .elastic import notes as elastic_notes
from .flags import Turns, args_sh, extension_reasons, layout_string, model_arguments, plan_arguments, stock_arguments
from .options import (
    check_belongs,
    check_experts,
    check_launch,
    check_start,
    check_told_apart,
    check_training,
    check_turns,
    extra_flags,
    launch_options,
    node_kinds,
    pod_options,
    to_fill_in,
    training_group,
)
from .pods import PodOptions
from .pods import render as pod_texts
from .scripts import LaunchOptions, het_sbatch, plain_obstacle, plain_sbatch, torchrun_script

# Expected times and bandwidths of a plan's ranks, with which the doctor compares its measurements.


def expectations_of_files(plan: Plan, cluster: str | os.PathLike[str], profile: str | None) -> Expectations:
    """Returns the expectations from the plan's files; see :func:`expectations`.

    Raises:
        PlannerError: A bad file, or a plan that does not fit the cluster.
    """
    return expectations(plan, load_cluster(cluster), load_profile(profile) if profile else None)


def expectations(plan: Plan, cluster: Cluster, profile: Profile | None = None) -> Expectations:
    """Returns links between neighbouring stages by the cluster file, and layer times by the profile.

    Raises:
        PlannerError: The plan does not fit the cluster.
    """
    seats = seats_of(plan, cluster)
    links = tuple(_link(first, second, seats, cluster) for first, second in pairs_of(plan))
    if profile is None:
        return Expectations(plan_hash(plan), links)
    model = profile.model
    shape = LayerModel(**{field.name: getattr(model, field.name) for field in fields(LayerModel)})

    def distance(timing: LayerTiming) -> tuple[int, int, bool]:
        """Distance of an operating point from the plan's."""
        sequences = abs(timing.micro_batch_size - plan.training.micro_batch_size)
        tokens = abs(timing.slice_tokens - plan.model.seq_length)
        return sequences, tokens, timing.recompute != plan.training.recompute

    layers = []
    for device in profile.devices:
        found = [t for t in device.timings if t.layer == "layer" and t.tp == 1 and not t.context_tokens]
        if found:
            best = min(found, key=distance)
            same = ("micro_batch_size", "recompute", "forward_s", "backward_s")
            figures: dict[str, Any] = {name: getattr(best, name) for name in same}
            layers.append(LayerExpectation(kind=device.kind, tokens=best.slice_tokens, **figures))
    return Expectations(plan_hash(plan), links, tuple(layers), shape)


def seats_of(plan: Plan, cluster: Cluster) -> Mapping[int, Seat]:
    """The node of every rank, as the launch files place it."""
    seated = seat_replicas(plan, rooms_of(cluster))
    return {
        rank: seat
        for stage, replicas in zip(plan.stages, seated)
        for replica, seats in zip(stage.replicas, replicas)
        for rank, seat in zip(replica.ranks, seats)
    }


def _link(first: int, second: int, seats: Mapping[int, Seat], cluster: Cluster) -> LinkExpectation:
    """Returns the link of one pair of GPUs alone: the node's bandwidth, limited by that of one GPU."""
    a, b = (cluster.nodes[seats[rank].pool] for rank in (first, second))
    if seats[first].host == seats[second].host:
        rates = [node.intra_node_bytes_per_s or cluster.gpu(node.gpu).intra_node_bytes_per_s for node in (a, b)]
        return LinkExpectation(first, second, 0.0, min(rates))
    rate, latency_s, _ = cluster.link(a, b)
    streams = [node.stream_bytes_per_s for node in (a, b) if node.stream_bytes_per_s is not None]
    return LinkExpectation(first, second, latency_s, min([rate, *streams]))


@dataclass(slots=True)
class Emitted:
    """The written files, and notes on them."""

    files: dict[str, Path] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)  # all nodes of the launch
    notes: list[str] = field(default_factory=list)  # for the reader, e.g. why there is no plain job


def emit(
    plan: Plan,
    out: Path,
    kinds: Mapping[str, NodeGroup],
    groups: Mapping[str, Sequence[str]],
    launch: LaunchOptions,
    header: Sequence[str] = (),
    expected: Expectations | None = None,
    elastic: ElasticOptions | None = None,
    turns: Turns | None = None,
    pods: PodOptions | None = None,
) -> Emitted:
    """Write all files, or none if the plan cannot run or does not fit the nodes.

    Args:
        kinds: Groups of nodes by name (``node_kinds``).
        groups: Megatron flags besides those of the plan, by purpose.
        launch: Settings of the scripts; ``run_dir`` is the path of ``out`` on the nodes.
        expected: The doctor's expectations, if it runs first (``launch.doctor``).

    Raises:
        PlannerError: The plan cannot run, or it does not fit the nodes.
    """
    with plan_errors():
        check_plan_alone(plan)
    check_launch(launch, kinds)
    nodes = place(plan, kinds)
    if any(node.kinds for node in nodes):  # number devices by PCI bus; CUDA's default starts with the fastest
        launch = replace(launch, environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **(launch.environment or {})})
    if turns is not None:
        check_turns(plan, turns, nodes, kinds)
    args = args_sh(plan, f"{launch.run_dir}/plan.json", groups, header, elastic=elastic is not None, turns=turns)
    texts = {**({"prologue.sh": launch.prologue} if launch.prologue else {}), "args.sh": args}
    result = Emitted()
    if pods is None:
        texts |= _slurm_texts(plan, nodes, kinds, launch, elastic, result)
    else:
        # The nodes of a kind are numbered in a row.
        parts = components(nodes, kinds)
        nodes = [node for part in parts for node in part.nodes]
        of_pods = launch
        if elastic is not None:
            check_elastic(plan, nodes, kinds, launch, elastic)
            of_pods = replace(launch, environment=elastic_environment(plan, launch, elastic))
        texts |= pod_texts(parts, kinds, of_pods, pods, elastic)
    result.nodes = nodes
    launch = replace(launch, environment={**environment_of(plan), **(launch.environment or {})})
    if pods is None or elastic is None:
        for i, node in enumerate(nodes):
            texts[f"torchrun-node-{i}.sh"] = torchrun_script(nodes, i, launch, kinds[node.kind].python)
    reasons = extension_reasons(plan, turns)
    if reasons:
        result.notes.append("stock Megatron cannot run this plan: " + "; ".join(reasons))
    else:
        texts["layout.txt"] = layout_string(plan) + "\n"
        result.notes.append("stock Megatron can run this plan: " + shlex.join(stock_arguments(plan)))
    if launch.doctor:
        promised = expected or Expectations(plan_hash(plan))
        texts["expectations.json"] = json.dumps(promised.to_json(), indent=1) + "\n"
    plans = {"plan.json": plan} | (elastic.named if elastic else {}) | (turns.named if turns else {})
    result.files = _write(out, plans, texts)
    ours = "*.sbatch torchrun-node-*.sh elastic-node.sh jobset.yaml skypilot.yaml layout.txt expectations.json"
    if old := sorted({file.name for name in ours.split() for file in out.glob(name)} - set(texts)):
        result.notes.append(f"of an earlier plan or target, and wrong for this one: {', '.join(old)}. Remove them")
    if pods is not None:
        token_of_file(out / "token", create=True)  # pods share no home folder, the default place
    return result


def _slurm_texts(
    plan: Plan,
    nodes: Sequence[Node],
    kinds: Mapping[str, NodeGroup],
    launch: LaunchOptions,
    elastic: ElasticOptions | None,
    result: Emitted,
) -> dict[str, str]:
    """Returns the batch scripts by name, and adds notes on them to ``result``."""
    alike = check_told_apart({node.name: whole_kind(node, kinds) for node in nodes})
    texts = {}
    if elastic is not None:
        texts[SCRIPT] = checked_sbatch(plan, nodes, kinds, launch, elastic)
        result.notes += elastic_notes(nodes, kinds)
    launch = replace(launch, environment={**environment_of(plan), **(launch.environment or {})})
    texts["train.sbatch"] = het_sbatch(nodes, kinds, launch)
    result.notes += alike
    if obstacle := plain_obstacle(nodes, kinds):
        result.notes.append(f"no train-plain.sbatch: {obstacle}")
    else:
        texts["train-plain.sbatch"] = plain_sbatch(nodes, kinds, launch)
    return texts


def _write(out: Path, plans: Mapping[str, Plan], texts: Mapping[str, str]) -> dict[str, Path]:
    """Write plans and texts by name into a folder; writes none if one of them cannot be written."""
    for name in (*plans, *texts):
        check_target(out / name, "--out")
    (out / "logs").mkdir(parents=True, exist_ok=True)
    for name, plan in plans.items():
        save_plan(plan, out / name)
    for name, text in texts.items():
        write_text(out / name, text, executable=name != "args.sh" and name.endswith((".sh", ".sbatch")))
    return {name: out / name for name in (*plans, *texts)}


def run(options: argparse.Namespace, model: Model, cluster: Cluster) -> Emitted:
    """Carry out the command.

    Raises:
        PlannerError: A bad plan, a plan of another model or cluster, a bad option.
    """
    check_belongs(options)
    plan = read_plan(options.plan)
    check_same_model(plan, model, str(options.plan), str(options.model))
    check_experts(plan, model, str(options.plan))
    check_planned_precision(plan, model, str(options.plan))
    check_training(options)
    extra = extra_flags(options.extra, model.flags)
    if any(word.endswith("NullTokenizer") for word in extra) and not any(w.startswith("--vocab-size") for w in extra):
        extra += ["--vocab-size", str(model.vocab_size)]  # else Megatron raises a TypeError
    check_target(options.out / "plan.json", "--out")
    launch = launch_options(options, plan)
    profile = load_profile(options.profile) if options.profile else None
    local, device_notes = device_arguments(plan, cluster.as_profiled(profile), extra)
    groups = {
        "MODEL": model_arguments(plan, model, extra),
        "DEVICE": local,
        "TRAINING": training_group(options),
        "EXTRA": extra,
    }
    turns = turns_of(options, model, plan)
    line = [word for words in groups.values() for word in words]
    line += plan_arguments(plan, turns.batch_sizes if turns else "")
    expected = expectations(plan, cluster, profile) if options.doctor else None
    inputs = (CLUSTER, MODEL, PROFILE) if profile else (CLUSTER, MODEL)  # for the search of plans if no given one fits
    elastic = ElasticOptions(load_more(options.plans), inputs) if options.elastic else None
    kinds = node_kinds(cluster, options)
    pods = pod_options(options, cluster)
    check_launch(launch, kinds)  # quick checks come before those that import Megatron
    notes = check_start([*line, "--het-plan", *map(str, (options.plan, *options.plans))], plan.world_size)
    notes += to_fill_in(extra)
    written = emit(plan, options.out, kinds, groups, launch, expected=expected, elastic=elastic, turns=turns, pods=pods)
    if model.flags.get("rope-scaling-factor", 8) != 8:
        notes.append(
            "stock Megatron takes no notice of --rope-scaling-factor, which is 8 there: run this model with the plan"
        )
    written.notes += [*device_notes, *strayed(plan, seat_replicas(plan, rooms_of(cluster))), *notes]
    written.files |= keep_inputs(options.out, cluster, model, profile)
    return written


LOCAL_LAYERS = (
    ("--transformer-impl", "local"),
    ("--no-rope-fusion",),
    ("--no-persist-layer-norm",),
    ("--no-gradient-accumulation-fusion",),
    ("--no-masked-softmax-fusion",),
)
"""Flags of a run without Transformer Engine and Apex: all ranks need the same layers."""


DEFAULT_BUILD = "cu130"  # the wheels of PyTorch that this project's requirements install


def device_arguments(plan: Plan, cluster: Cluster, extra: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the flags that the plan's kinds of GPU need, and notes on the software to install on them.

    Raises:
        PlannerError: ``extra`` asks for Transformer Engine, which is not on all kinds; kinds are of several vendors.
    """
    used = {device for stage in plan.stages for r in stage.replicas for device in r.devices}
    names = dict.fromkeys(node.gpu for node in cluster.nodes if node.gpu in used)
    gpus = {name: cluster.gpu(name) for name in names if not cluster.gpu(name).is_processor}
    if problem := cluster.vendors_problem(i for i, node in enumerate(cluster.nodes) if node.gpu in used):
        raise PlannerError("emit", "stages", " ".join(gpus), problem, "Plan without one of them")
    without = [name for name, gpu in gpus.items() if not gpu.has_transformer_engine]
    flags: list[str] = []
    notes: list[str] = []
    if without:
        problem = f"no Transformer Engine on {', '.join(without)}"
        for flag in ("transformer_engine", "--moe-grouped-gemm"):
            if flag in extra:
                hint = "All ranks have the same layers: leave it out, or plan without these GPUs"
                raise PlannerError("emit", "--extra", flag, problem, hint)
        flags = [word for words in LOCAL_LAYERS if words[0] not in extra for word in words]
        notes.append(f"{problem}: all ranks run Megatron's own layers ({' '.join(flags) or 'given'})")
    common, known = common_builds(gpus)
    if known and not common:
        each = "; ".join(f"{name}: {' or '.join(builds)}" for name, builds in known.items())
        notes.append(f"no build of PyTorch has kernels for all kinds ({each}): give each node group its 'python'")
    elif known and DEFAULT_BUILD not in common:
        notes.append(f"install PyTorch's {common[0]} wheels on all nodes: others lack kernels for a kind of this plan")
    return flags, notes


def turns_of(options: argparse.Namespace, model: Model, first: Plan) -> Turns | None:
    """Returns the plans of ``--step-batch-size-schedule`` without the first; raises PlannerError."""
    if not options.step_batch_size_schedule:
        return None
    more = load_more(options.plans)
    for file, plan in more:
        of_size = model.model_copy(update={"global_batch_size": plan.training.global_batch_size})
        check_same_model(plan, of_size, file, str(options.model))
        check_experts(plan, of_size, file)
    try:  # the same check as at the start of the run
        check_batch_schedule([first, *(plan for _, plan in more)], options)
    except PlanError as error:
        hint = error.hint.replace("--het-plan PLAN PLAN", "--plans PLAN")
        raise PlannerError("emit", error.where, error.value, error.problem, hint) from None
    return Turns(options.step_batch_size_schedule, more)
