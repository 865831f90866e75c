"""Options of ``het-plan emit``, and the settings of a launch that are made from them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from megatron_het.plan import Plan

from ..errors import PlannerError
from ..inputs.names import text_problem
from .nodes import NodeKind
from .pods import PodKind, PodOptions, Target
from .scripts import AtTimeLimit, Container, LaunchOptions


def training_group(options: argparse.Namespace) -> list[str]:
    """Returns the flags of the optimization that the command line offers."""
    length = ["--train-samples", str(options.train_samples)]
    if not options.train_samples:
        length = ["--train-iters", str(options.train_iters)]
    more = "--lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0"
    more += " --log-interval 10 --eval-interval 1000 --eval-iters 10 --distributed-timeout-minutes 10"
    return [*length, "--lr", options.lr, "--min-lr", f"{float(options.lr) / 10:g}", *more.split()]


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
        help="what it does then (default %(default)s): be queued again, submit another job that goes on, or end",
    )
    parser.add_argument(
        "--target",
        choices=get_args(Target),
        default="slurm",
        help="what starts the job (default %(default)s): slurm (torchrun scripts as well), jobset (Kubernetes) "
        "or skypilot (clouds; its job groups are experimental); see docs/kubernetes.md",
    )
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="NAME:FOLDER",
        help="without Slurm: claim (jobset) or bucket (skypilot) that nodes see as FOLDER; one has the run's folder",
    )
    parser.add_argument("--queue", default="", metavar="NAME", help="with --target jobset: Kueue's queue")
    parser.add_argument(
        "--restarts",
        type=int,
        default=10,
        metavar="N",
        help="with --target jobset: starts after a failure (default %(default)s)",
    )
    parser.add_argument("--modules", nargs="+", default=[], metavar="NAME", help="environment modules to load first")
    parser.add_argument(
        "--prologue", type=Path, metavar="FILE", help="bash that the scripts run first; a copy is written beside them"
    )
    parser.add_argument("--container", default="", metavar="IMAGE", help="image in which the ranks run (Slurm, pods)")
    parser.add_argument(
        "--container-runtime",
        choices=("pyxis", "apptainer"),
        default="pyxis",
        help="who starts it (default %(default)s): pyxis (Slurm's plugin for enroot) or apptainer",
    )
    parser.add_argument(
        "--container-mounts",
        nargs="+",
        default=[],
        metavar="DIR",
        help="folders besides that of the run, as /FOLDER[:/INSIDE[:ro]]",
    )


def launch_options(options: argparse.Namespace, plan: Plan) -> LaunchOptions:
    """Returns the settings of the scripts.

    Raises:
        PlannerError: Options of a container without one.
    """
    iterations = options.train_iters
    if options.train_samples is not None:
        iterations = options.train_samples // plan.training.global_batch_size
    container = None
    if options.container and options.target == "slurm":
        container = Container(options.container, options.container_runtime, tuple(options.container_mounts))
    elif options.container_mounts:
        raise PlannerError(
            "emit", "--container-mounts", options.container_mounts[0], "is for Slurm jobs with --container"
        )
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


def pod_options(options: argparse.Namespace, cluster: Any, kinds: Mapping[str, NodeKind]) -> PodOptions | None:
    """Returns what a launch without Slurm is told; None with Slurm.

    Raises:
        PlannerError: An option that the target does not have, or GPUs that the target has no name for.
    """
    for option in ("volume", "queue"):
        if getattr(options, option) and (
            options.target == "slurm" or (option, options.target) == ("queue", "skypilot")
        ):
            problem = f"does not go with --target {options.target}"
            raise PlannerError("emit", f"--{option}", getattr(options, option), problem)
    if options.target == "slurm":
        return None
    volumes = {}
    for text in options.volume:
        name, _, folder = text.rpartition(":")
        if not name or not folder.startswith("/") or text_problem(text, 1000):
            raise PlannerError("emit", "--volume", text, "is not NAME:/FOLDER")
        volumes[folder] = name
    found = {}
    for name, group in zip(kinds, cluster.nodes, strict=True):
        has_gpus = not cluster.gpu(group.gpu).is_processor
        sky = group.skypilot
        if options.target == "skypilot" and has_gpus and not sky.accelerators:
            problem = "SkyPilot's name of the GPU is not known"
            raise PlannerError("cluster", f"{name}: skypilot.accelerators", None, problem, "See 'sky show-gpus'")
        found[name] = PodKind(
            node_selector=group.kubernetes.node_selector,
            resource=group.kubernetes.resource if has_gpus else "",
            accelerators=sky.accelerators if has_gpus else "",
            infra=sky.infra,
            use_spot=sky.use_spot,
        )
    return PodOptions(options.target, options.container, volumes, options.queue, options.restarts, found)


def read_prologue(file: Path | None) -> str:
    """Returns the text of ``--prologue``.

    Raises:
        PlannerError: It cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8") if file else ""
    except (OSError, UnicodeError) as error:
        raise PlannerError("emit", "--prologue", str(file), f"cannot be read: {error}") from None


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
