"""``emit``: from plan.json to everything that Megatron, torchrun and Slurm run.

Writes into one folder: ``plan.json``, ``args.sh``, ``train.sbatch`` (heterogeneous),
``train-plain.sbatch`` where an ordinary job can do it, ``torchrun-node-<n>.sh``, and ``layout.txt``
with Megatron's own layout string when the plan needs no extension.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from megatron_het.doctor.expectations import Expectations
from megatron_het.features.documents.spec import DOCUMENT_FLAGS
from megatron_het.features.plan_checks import check_plan_alone
from megatron_het.launch.megatron_args import environment_of
from megatron_het.plan import Plan, PlanError, load_plan, plan_hash, save_plan

from ..costs.build import check_same_model
from ..errors import PlannerError, from_plan_error
from ..inputs.catalog import common_builds
from ..inputs.files import check_target, write_text
from ..inputs.kept import CLUSTER, MODEL, PROFILE, keep_inputs
from ..inputs.profile_schema import load_profile
from ..search.setup import check_planned_precision
from .checks import (
    check_experts,
    check_launch,
    check_start,
    check_told_apart,
    check_training,
    check_turns,
    extra_flags,
    to_fill_in,
)
from .elastic import SCRIPT, ElasticOptions, checked_sbatch, load_more
from .elastic import notes as elastic_notes
from .expect import expectations
from .flags import (
    ModelOptions,
    Turns,
    args_sh,
    extension_reasons,
    layout_string,
    model_arguments,
    plan_arguments,
    stock_arguments,
)
from .nodes import Node, NodeKind, place, whole_kind
from .scripts import AtTimeLimit, Container, LaunchOptions, het_sbatch, plain_obstacle, plain_sbatch, torchrun_script


@dataclass(slots=True)
class Emitted:
    """Holds what was written.

    Attributes:
        files: Paths, by what they are for.
        nodes: The launch, node by node.
        notes: What the reader should know, e.g. why there is no plain job.
    """

    files: dict[str, Path] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def emit(
    plan: Plan,
    out: Path,
    kinds: Mapping[str, NodeKind],
    groups: Mapping[str, Sequence[str]],
    launch: LaunchOptions,
    header: Sequence[str] = (),
    expected: Expectations | None = None,
    elastic: ElasticOptions | None = None,
    turns: Turns | None = None,
) -> Emitted:
    """Write all files; nothing is written when the plan cannot run or does not fit the nodes.

    Args:
        plan: A checked plan.
        out: A folder, made when it is missing.
        kinds: Node kinds by name (the plan's device names, unless ``gpu`` says otherwise).
        groups: Megatron flags besides those of the plan, by purpose.
        launch: Settings of the scripts; ``run_dir`` is how the nodes see ``out``.
        header: Comment lines for args.sh.
        expected: What the doctor compares with, where it goes first (``launch.doctor``).
        elastic: Of an elastic job, which is written besides.
        turns: Of a training whose batch size changes.

    Raises:
        PlannerError: No run can have the plan, or it does not fit the nodes.
    """
    try:
        check_plan_alone(plan)
    except PlanError as error:
        raise PlannerError("plan", error.where, error.value, error.problem, error.hint) from None
    check_launch(launch, kinds)
    nodes = place(plan, kinds)
    alike = check_told_apart({node.name: whole_kind(node, kinds) for node in nodes})
    if turns is not None:
        check_turns(plan, turns, nodes, kinds)
    if any(node.kinds for node in nodes):  # devices have the numbers of the bus; CUDA's own begin with the fastest
        launch = replace(launch, environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **(launch.environment or {})})
    script = None if elastic is None else checked_sbatch(plan, nodes, kinds, launch, elastic)
    launch = replace(launch, environment={**environment_of(plan), **(launch.environment or {})})
    texts = {"prologue.sh": launch.prologue} if launch.prologue else {}
    texts |= {
        "args.sh": args_sh(
            plan, f"{launch.run_dir}/plan.json", groups, header, elastic=elastic is not None, turns=turns
        ),
        "train.sbatch": het_sbatch(nodes, kinds, launch),
    }
    if script is not None:
        texts[SCRIPT] = script
    result = Emitted(nodes=nodes, notes=[] if elastic is None else elastic_notes(nodes, kinds))
    result.notes += alike
    obstacle = plain_obstacle(nodes, kinds)
    if obstacle:
        result.notes.append(f"no train-plain.sbatch: {obstacle}")
    else:
        texts["train-plain.sbatch"] = plain_sbatch(nodes, kinds, launch)
    for i in range(len(nodes)):
        texts[f"torchrun-node-{i}.sh"] = torchrun_script(nodes, i, launch, kinds[nodes[i].kind].python)
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
    return result


def _write(out: Path, plans: Mapping[str, Plan], texts: Mapping[str, str]) -> dict[str, Path]:
    """Plans and texts by name into a folder; nothing where one of them cannot be written."""
    for name in (*plans, *texts):
        check_target(out / name, "--out")
    (out / "logs").mkdir(parents=True, exist_ok=True)
    for name, plan in plans.items():
        save_plan(plan, out / name)
    for name, text in texts.items():
        write_text(out / name, text, executable=name != "args.sh" and name.endswith((".sh", ".sbatch")))
    return {name: out / name for name in (*plans, *texts)}


def training_group(options: argparse.Namespace) -> list[str]:
    """Flags of the optimization that the command line offers."""
    return [
        *(["--train-samples", str(options.train_samples)] if options.train_samples else []),
        *([] if options.train_samples else ["--train-iters", str(options.train_iters)]),
        "--lr",
        options.lr,
        "--min-lr",
        f"{float(options.lr) / 10:g}",
        "--lr-decay-style",
        "cosine",
        "--lr-warmup-fraction",
        "0.01",
        "--weight-decay",
        "0.1",
        "--adam-beta2",
        "0.95",
        "--clip-grad",
        "1.0",
        "--log-interval",
        "10",
        "--eval-interval",
        "1000",
        "--eval-iters",
        "10",
        "--distributed-timeout-minutes",
        "10",
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options (``--cluster``, ``--model`` and ``--json`` belong to the command line)."""
    parser.add_argument("plan", type=Path, help="plan.json")
    parser.add_argument(
        "--out", type=Path, default=Path("run"), help="folder to write into, made if missing (default %(default)s)"
    )
    parser.add_argument(
        "--run-dir", default="", help="the same folder as the nodes see it (default: its absolute path)"
    )
    parser.add_argument("--train-iters", type=int, default=1000, metavar="N", help="iterations (default %(default)s)")
    parser.add_argument(
        "--train-samples", type=int, metavar="N", help="sequences to train on, instead of --train-iters"
    )
    parser.add_argument(
        "--step-batch-size-schedule",
        default="",
        metavar="TEXT",
        help="Megatron's schedule of global batch sizes, like '0:256 50B:512'; with --train-samples, and a plan for "
        "each other size in --plans",
    )
    parser.add_argument("--lr", default="3e-4", help="learning rate (default %(default)s); a tenth of it at the end")
    parser.add_argument(
        "--save-interval",
        type=int,
        default=500,
        metavar="N",
        help="iterations between checkpoints (default %(default)s)",
    )
    parser.add_argument(
        "--time-limit", default="24:00:00", metavar="TIME", help="Slurm's time limit (default %(default)s)"
    )
    parser.add_argument(
        "--job-name", default="megatron-het", metavar="NAME", help="Slurm's job name (default %(default)s)"
    )
    parser.add_argument("--python", default="python", help="interpreter on the nodes (default %(default)s)")
    parser.add_argument(
        "--cpus-per-task",
        type=int,
        default=0,
        metavar="N",
        help="cores of a rank (default %(default)s: a node's ranks share its cores)",
    )
    add_site_arguments(parser)
    parser.add_argument(
        "--doctor", action="store_true", help="the scripts check the nodes before they train; see docs/doctor.md"
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="write elastic.sbatch too: the job goes on under another plan when a node goes down, and after it was "
        "queued again; see docs/elastic.md",
    )
    parser.add_argument(
        "--plans",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="with --elastic: further plans, the best one first; for nodes that none of them fits, one is searched. "
        "With --step-batch-size-schedule: the plans of the other sizes",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="profile.json that the plan was made from: --doctor compares devices with it, and replan corrects it",
    )
    parser.add_argument(
        "--extra",
        default="",
        metavar="FLAGS",
        help="further Megatron flags in one string: data, tokenizer, logging, ...",
    )


def add_site_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what an administrator asks of a job."""
    for key, text in (
        ("qos", "quality of service"),
        ("reservation", "reservation"),
        ("licenses", "licences, like name:4"),
        ("mem", "memory of a node, like 64G (default: all of it, where all GPUs of a node are used)"),
    ):
        parser.add_argument(f"--{key}", default="", help=f"Slurm's {text}; where the cluster file does not say it")
    parser.add_argument(
        "--exclusive",
        action=argparse.BooleanOptionalAction,
        help="nodes for this job alone (default: where all GPUs of a node are used and its cores are not known)",
    )
    parser.add_argument(
        "--notice-s",
        type=int,
        default=120,
        metavar="S",
        help="seconds before --time-limit at which a Slurm job saves and stops (default %(default)s)",
    )
    parser.add_argument(
        "--at-time-limit",
        choices=get_args(AtTimeLimit),
        default="requeue",
        help="what it does then: be queued again (default), submit another job that goes on, or end",
    )
    parser.add_argument("--modules", nargs="+", default=[], metavar="NAME", help="environment modules to load first")
    parser.add_argument(
        "--prologue", type=Path, metavar="FILE", help="bash that the scripts run first; a copy is written beside them"
    )
    parser.add_argument("--container", default="", metavar="IMAGE", help="image in which the ranks of a Slurm job run")
    parser.add_argument(
        "--container-runtime",
        choices=("pyxis", "apptainer"),
        default="pyxis",
        help="who starts it: pyxis (Slurm's plugin for enroot; default) or apptainer",
    )
    parser.add_argument(
        "--container-mounts",
        nargs="+",
        default=[],
        metavar="DIR",
        help="folders besides that of the run, as /FOLDER[:/INSIDE[:ro]]",
    )


def run(options: argparse.Namespace, model: Any, cluster: Any) -> Emitted:
    """Carry out the command.

    Args:
        options: Parsed options.
        model: A ``tools.planner.inputs.model.Model``.
        cluster: A ``tools.planner.inputs.cluster.Cluster``.

    Raises:
        PlannerError: A bad plan, a plan of another model or cluster, a bad option.
    """
    try:
        plan = load_plan(options.plan)
    except PlanError as error:
        raise from_plan_error(str(options.plan), error) from None
    check_same_model(plan, model, str(options.plan), str(options.model))
    check_experts(plan, model, str(options.plan))
    check_planned_precision(plan, model, str(options.plan))
    check_training(options)
    extra = extra_flags(options.extra, model.flags)
    check_target(options.out / "plan.json", "--out")
    launch = launch_options(options, plan)
    local, device_notes = device_arguments(plan, cluster, extra)
    groups = {
        "MODEL": model_arguments(plan, model_options(model, extra)),
        "DEVICE": local,
        "TRAINING": training_group(options),
        "EXTRA": extra,
    }
    turns = turns_of(options, model)
    line = [word for words in groups.values() for word in words]
    line += plan_arguments(plan, turns.batch_sizes if turns else "")
    notes = check_start([*line, "--het-plan", *map(str, (options.plan, *options.plans))], plan.world_size)
    notes += to_fill_in(extra)
    profile = load_profile(options.profile) if options.profile else None
    expected = expectations(plan, cluster, profile) if options.doctor else None
    elastic = elastic_options(options, profile is not None)
    kinds = node_kinds(cluster, options)
    written = emit(plan, options.out, kinds, groups, launch, expected=expected, elastic=elastic, turns=turns)
    if model.flags.get("rope-scaling-factor", 8) != 8:
        notes.append(
            "stock Megatron takes no notice of --rope-scaling-factor, which is 8 there: run this model with the plan"
        )
    written.notes += [*device_notes, *notes]
    written.files |= keep_inputs(options.out, cluster, model, profile)
    return written


def launch_options(options: argparse.Namespace, plan: Plan) -> LaunchOptions:
    """Returns the settings of the scripts.

    Raises:
        PlannerError: Options of a container without one.
    """
    iterations = options.train_iters
    if options.train_samples is not None:
        iterations = options.train_samples // plan.training.global_batch_size
    container = None
    if options.container:
        container = Container(options.container, options.container_runtime, tuple(options.container_mounts))
    elif options.container_mounts:
        raise PlannerError("emit", "--container-mounts", options.container_mounts[0], "needs --container")
    return LaunchOptions(
        run_dir=options.run_dir or str(options.out.resolve()),
        job_name=options.job_name,
        time_limit=options.time_limit,
        python=options.python,
        save_interval=options.save_interval,
        cpus_per_task=options.cpus_per_task,
        doctor=options.doctor,
        # How many they are when batches grow is Megatron's to say.
        iterations=0 if options.step_batch_size_schedule else iterations,
        notice_s=options.notice_s,
        at_time_limit=options.at_time_limit,
        modules=tuple(options.modules),
        prologue=read_prologue(options.prologue),
        container=container,
    )


def read_prologue(file: Path | None) -> str:
    """Returns the text of ``--prologue``.

    Raises:
        PlannerError: It cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8") if file else ""
    except (OSError, UnicodeError) as error:
        raise PlannerError("emit", "--prologue", str(file), f"cannot be read: {error}") from None


LOCAL_LAYERS = (
    ("--transformer-impl", "local"),
    ("--no-rope-fusion",),
    ("--no-persist-layer-norm",),
    ("--no-gradient-accumulation-fusion",),
    ("--no-masked-softmax-fusion",),
)
"""Flags of a run without Transformer Engine and Apex: all ranks need the same layers."""


DEFAULT_BUILD = "cu130"
"""The wheels of PyTorch that this project's requirements install."""


def device_arguments(plan: Plan, cluster: Any, extra: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags that the plan's kinds of GPU ask for, and notes on what must be installed on them.

    Args:
        plan: Its replicas name their kinds.
        cluster: A ``tools.planner.inputs.cluster.Cluster``.
        extra: The user's further flags.

    Raises:
        PlannerError: ``extra`` asks for Transformer Engine, which a kind lacks.
    """
    used = {r.device for stage in plan.stages for r in stage.replicas}
    names = dict.fromkeys(node.gpu for node in cluster.nodes if node.gpu in used)
    gpus = {name: cluster.gpu(name) for name in names if not cluster.gpu(name).is_processor}
    without = [name for name, gpu in gpus.items() if not gpu.has_transformer_engine]
    flags: list[str] = []
    notes: list[str] = []
    if without:
        problem = f"{', '.join(without)} cannot run Transformer Engine"
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


def elastic_options(options: argparse.Namespace, has_profile: bool) -> ElasticOptions | None:
    """Returns what ``--elastic`` asks for: plans are searched where no given one fits.

    Raises:
        PlannerError: A bad plan.
    """
    if not options.elastic:
        return None
    inputs = (CLUSTER, MODEL, PROFILE) if has_profile else (CLUSTER, MODEL)
    return ElasticOptions(load_more(options.plans), inputs)


def turns_of(options: argparse.Namespace, model: Any) -> Turns | None:
    """Returns the plans of ``--step-batch-size-schedule``.

    Raises:
        PlannerError: A bad plan, or one of another model.
    """
    if not options.step_batch_size_schedule:
        return None
    more = load_more(options.plans)
    for file, plan in more:
        of_size = model.model_copy(update={"global_batch_size": plan.training.global_batch_size})
        check_same_model(plan, of_size, file, str(options.model))
        check_experts(plan, of_size, file)
    return Turns(options.step_batch_size_schedule, more)


def model_options(model: Any, extra: Sequence[str] = ()) -> ModelOptions:
    """Returns what the model file says beyond the plan.

    Args:
        model: A ``tools.planner.inputs.model.Model``.
        extra: The user's further flags, which may say themselves what a document is.
    """
    return ModelOptions(
        normalization="LayerNorm" if model.biases else "RMSNorm",
        gated=model.gated,
        biases=model.biases,
        learned_positions=model.learned_positions,
        vocab_size=model.vocab_size,
        head_size=model.head_size,
        experts=model.experts,
        window=None if model.attention_window is None else (model.attention_window, model.window_period or 0),
        latent=model.latent,
        documents=model.document_lengths is not None and DOCUMENT_FLAGS.isdisjoint(extra),
        flags=model.flags,
    )


def node_kinds(cluster: Any, options: argparse.Namespace | None = None) -> dict[str, NodeKind]:
    """The cluster file's groups of nodes, named after their GPU, and after their place where that is not enough.

    Args:
        cluster: A ``tools.planner.inputs.cluster.Cluster``.
        options: Of the command line, which count where the file says nothing.
    """

    def asked(slurm: Any, key: str) -> str:
        return getattr(slurm, key) or getattr(options, key, "")

    gpus = [group.gpu for group in cluster.nodes]
    kinds: dict[str, NodeKind] = {}
    for i, group in enumerate(cluster.nodes):
        slurm = group.slurm
        name = group.gpu if gpus.count(group.gpu) == 1 else f"{group.gpu} nodes[{i}]"
        kinds[name] = NodeKind(
            devices=group.gpus_per_node,
            count=group.count,
            hosts=tuple(group.hosts),
            partition=slurm.partition or "",
            constraint=slurm.constraint or "",
            account=slurm.account or "",
            gres=slurm.gres if slurm.gres is not None else "gpu",
            gpu=group.gpu,
            quota=group.quota,
            zone=group.zone,
            python=group.python or "",
            qos=asked(slurm, "qos"),
            reservation=asked(slurm, "reservation"),
            licenses=asked(slurm, "licenses"),
            mem=asked(slurm, "mem"),
            exclusive=slurm.exclusive if slurm.exclusive is not None else getattr(options, "exclusive", None),
            cpus=slurm.cpus or 0,
            shared_node=group.shared_node,
            numbers=group.devices,
        )
    return kinds
