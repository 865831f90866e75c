"""Options of ``het-plan emit``, the settings of a launch, and checks before a file is written."""

import argparse
import importlib.util
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from megatron_het.features.experts.spec import check_expert_parallel
from megatron_het.plan import Plan
from megatron_het.safe_io import add_options, count

from ..errors import PlannerError, plan_errors
from ..inputs import files
from ..inputs.cluster import Cluster, NodeGroup
from ..inputs.model import Model
from ..inputs.model_parts import MANAGED_FLAGS, MODEL_FLAGS, TRAINING_FLAGS, FlagValue
from ..inputs.packing import Node
from .flags import Turns
from .pods import PodOptions, Target
from .scripts import AtTimeLimit, Container, LaunchOptions

_MOST = 10**12
_START_LIMIT_S = 300.0
_WEIGHTS = (
    "The scripts load what the job itself has saved. Weights to begin with: --extra '--pretrained-checkpoint DIR', "
    "which counts until there is a checkpoint of the job"
)
_FROM_FILES = ("HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer", "SFTTokenizer")
_DATA = ("--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path", "--mock-data")


def _instead(flag: str) -> str:
    """Returns the hint for a refused flag: what to do instead."""
    if flag in ("load", "finetune", "exit-on-missing-checkpoint"):
        return _WEIGHTS
    if flag in MODEL_FLAGS:
        return f"Say it in the model file: 'flags: {{{flag}: VALUE}}'"
    return "Leave it out; change the model file, plan again or use the option of emit"


def to_fill_in(words: Sequence[str]) -> list[str]:
    """Returns what a job still needs from the user: data and tokenizer."""
    given = {word.split("=", 1)[0] for word in words}
    missing = [] if given & set(_DATA) else ["data (--data-path PREFIX, or --mock-data)"]
    kind = dict(zip(words, words[1:], strict=False)).get("--tokenizer-type", "")
    kind = next((w.partition("=")[2] for w in words if w.startswith("--tokenizer-type=")), kind)
    if not kind:
        missing.append("a tokenizer (--tokenizer-type and --tokenizer-model)")
    elif kind in _FROM_FILES and "--tokenizer-model" not in given:
        missing.append(f"the files of the {kind} (--tokenizer-model)")
    return [f"still to be filled in, with --extra or in args.sh: {' and '.join(missing)}"] if missing else []


def check_start(words: Sequence[str], world_size: int) -> list[str]:
    """Check a training's flags with Megatron's own parser and the checks of a start, in a separate process.

    Returns:
        Why nothing was checked, if Megatron is not installed or does not answer.

    Raises:
        PlannerError: The job would not start.
    """
    if os.environ.get("HET_PLAN_VERIFY", "1") == "0":
        return ["the flags were not checked: HET_PLAN_VERIFY=0"]
    if not all(map(importlib.util.find_spec, ("torch", "megatron"))):
        return ["the flags were not checked: Megatron is not installed here"]
    environment = {**os.environ, "WORLD_SIZE": str(world_size), "RANK": "0", "LOCAL_RANK": "0"}
    command = [sys.executable, "-m", "megatron_het.doctor.flags", *words]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_START_LIMIT_S, check=False
        )
        problems = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return ["the flags were not checked: Megatron's parser does not run here"]
    if problems:
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise PlannerError("emit", "(flags)", None, f"the job would not start: {problems[0]}{more}")
    return []


def check_experts(plan: Plan, model: Model, file: str) -> None:
    """Check that the replicas of a plan can divide the experts of a layer; raises PlannerError."""
    with plan_errors(file):
        check_expert_parallel(plan, model.experts.count if model.experts else 0)
    wide = next((r.tp for s in plan.stages for r in s.replicas if r.tp > 1), 1)
    if model.experts is not None and model.biases and wide > 1:
        problem = f"a replica has TP {wide}, and with experts Megatron trains biases of linear layers under TP 1 only"
        raise PlannerError(file, "stages", wide, problem, "Plan again")


def check_launch(launch: LaunchOptions, kinds: Mapping[str, NodeGroup]) -> None:
    """Check every text and number that becomes part of a script; raises PlannerError."""
    cpus = launch.cpus_per_task
    for option, value, problem in (
        ("--run-dir", launch.run_dir, files.folder_problem(launch.run_dir)),
        ("--job-name", launch.job_name, files.job_problem(launch.job_name)),
        ("--time-limit", launch.time_limit, files.time_problem(launch.time_limit)),
        ("--python", launch.python, files.text_problem(launch.python, 4096) or ("" if launch.python else "is empty")),
        ("--notice-s", launch.notice_s, "" if 10 <= launch.notice_s <= 65535 else "must be 10 to 65535"),
        ("--cpus-per-task", cpus, "" if 0 <= cpus <= 4096 else "must be 0 (a node's ranks share its cores) to 4096"),
        ("--save-interval", launch.save_interval, "" if 1 <= launch.save_interval <= _MOST else "must be at least 1"),
    ):
        if problem:
            raise PlannerError("emit", option, value, problem)
    image = launch.container.image if launch.container else ""
    for option, values, rule in (
        ("--modules", launch.modules, files.module_problem),
        ("--container", [image] if image else [], files.image_problem),
        ("--container-mounts", launch.container.mounts if launch.container else (), files.mount_problem),
    ):
        for value in values:
            if problem := rule(value):
                raise PlannerError("emit", option, value, problem)
    if files.slurm_seconds(launch.time_limit) <= launch.notice_s:
        problem = f"is over before the job saves and stops, --notice-s {launch.notice_s} seconds before its end"
        raise PlannerError("emit", "--time-limit", launch.time_limit, problem, "24:00:00 is a day")
    for name, kind in kinds.items():
        if problem := files.text_problem(name):
            raise PlannerError("cluster", "gpu", name, problem)
        for key, rule in files.SLURM_RULES.items():
            value = getattr(kind.slurm, key)
            if value and (problem := rule(value)):
                raise PlannerError("cluster", f"{name}: slurm.{key}", value, problem)
        for host in kind.hosts:
            if problem := files.host_problem(host):
                raise PlannerError("cluster", f"{name}: hosts", host, problem)


def check_told_apart(kinds: Mapping[str, NodeGroup]) -> list[str]:
    """Check that Slurm can tell nodes with different GPUs apart; else stages for one kind may land on the other.

    Returns:
        A note if the cluster file has no settings of Slurm at all.

    Raises:
        PlannerError: Slurm would get the same request for two kinds.
    """
    asked: dict[tuple[str, ...], str] = {}
    uses_slurm = any(kind.slurm.partition or kind.slurm.constraint or kind.slurm.account for kind in kinds.values())
    for name, kind in kinds.items():
        words = tuple(getattr(kind.slurm, key) or "" for key in ("partition", "constraint", "account", "gres"))
        other = asked.setdefault(words, name)
        if kinds[other].gpu == kind.gpu:
            continue
        hint = "Give both a 'slurm' section with a gres type (gpu:a100), a constraint or a partition of their own"
        problem = f"Slurm is asked for {other} and {name} by the same words, so that either may get the other's nodes"
        if uses_slurm or kind.slurm.gres not in ("", "gpu"):
            raise PlannerError("cluster", f"{name}: slurm", " ".join(filter(None, words)), problem, hint)
        return [f"train.sbatch: {problem}. {hint}"]
    return []


def check_turns(plan: Plan, turns: Turns, nodes: Sequence[Node], kinds: Mapping[str, NodeGroup]) -> None:
    """Check that the first plan's nodes can run those of other batch sizes: no rank moves. Raises PlannerError."""
    node_of = {rank: node for node in nodes for rank in node.ranks}
    for file, other in turns.more:
        if other.world_size != plan.world_size:
            problem = f"the first plan has {plan.world_size}, and no process begins or ends when the batch size changes"
            raise PlannerError(file, "number of ranks", other.world_size, problem)
        for s, stage in enumerate(other.stages):
            for q, replica in enumerate(stage.replicas):
                where, hint = f"stages[{s}].replicas[{q}]", "Plan with the same GPUs, or number ranks as the first plan"
                for part, device in enumerate(replica.devices):
                    group = replica.tp_group(part)
                    seen = [node_of[rank] for rank in group]
                    names = [node.kind_of(rank) for node, rank in zip(seen, group, strict=True)]
                    gpus = sorted({kinds[name].gpu for name in names})
                    if gpus != [device]:
                        problem = f"under the first plan these ranks are on {', '.join(gpus)}, not on {device}"
                        raise PlannerError(file, where, list(group), problem, hint)
                    if any(node is not seen[0] for node in seen):
                        problem = "under the first plan this TP group is on several nodes"
                        raise PlannerError(file, where, list(group), problem, hint)


def check_training(options: Any) -> None:
    """Check iterations, batch sizes and learning rate; raises PlannerError."""
    if options.train_iters is not None and options.train_samples is not None:
        raise PlannerError("emit", "--train-iters", options.train_iters, "--train-samples is given too", "Give one")
    options.train_iters = 1000 if options.train_iters is None else options.train_iters
    if not 1 <= options.train_iters <= _MOST:
        raise PlannerError("emit", "--train-iters", options.train_iters, f"must be 1 to {_MOST}")
    if options.train_samples is not None and not 1 <= options.train_samples <= _MOST:
        raise PlannerError("emit", "--train-samples", options.train_samples, f"must be 1 to {_MOST}")
    if options.plans and not (options.elastic or options.step_batch_size_schedule):
        problem = "is for --elastic or --step-batch-size-schedule, which are not given"
        raise PlannerError("emit", "--plans", str(options.plans[0]), problem)
    if options.elastic and options.step_batch_size_schedule:
        problem = "does not go with --elastic, where the nodes that are there choose the plan"
        raise PlannerError("emit", "--step-batch-size-schedule", options.step_batch_size_schedule, problem)
    try:
        rate = float(options.lr)
    except ValueError:
        rate = math.nan
    if not (math.isfinite(rate) and rate > 0 and options.lr.isprintable()):
        raise PlannerError("emit", "--lr", options.lr, "must be a positive number")


def extra_flags(text: str, model_flags: Mapping[str, FlagValue] = MappingProxyType({})) -> list[str]:
    """Returns the words of ``--extra``.

    Args:
        model_flags: Flags of the model file, which ``--extra`` may not repeat.

    Raises:
        PlannerError: Unbalanced quotes, control characters, a flag that plan, model file or scripts set.
    """
    if problem := files.text_problem(text, 100_000):
        raise PlannerError("emit", "--extra", text, problem)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise PlannerError("emit", "--extra", text, f"cannot be split into words: {error}") from None
    if words and not words[0].startswith("-"):
        raise PlannerError("emit", "--extra", words[0], "is no flag: the first word must begin with --")
    managed_flags = [*MANAGED_FLAGS, *(set(model_flags) - TRAINING_FLAGS)]
    for word in words:
        name = word.split("=", 1)[0].removeprefix("--")
        if not word.startswith("--") or not name:
            continue
        # argparse accepts an unambiguous prefix of a flag.
        managed = next((m for m in managed_flags if m == name or (len(name) > 3 and m.startswith(name))), None)
        if managed is not None:
            problem = f"--{managed} follows from the plan, the model file or an option of emit, and would contradict it"
            raise PlannerError("emit", "--extra", word, problem, _instead(managed))
    return words


def training_group(options: argparse.Namespace) -> list[str]:
    """Returns Megatron's flags for the training options of this command."""
    length = ["--train-samples", str(options.train_samples)]
    if not options.train_samples:
        length = ["--train-iters", str(options.train_iters)]
    more = "--lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0"
    more += " --log-interval 10 --eval-interval 1000 --eval-iters 10 --distributed-timeout-minutes 10"
    return [*length, "--lr", options.lr, "--min-lr", f"{float(options.lr) / 10:g}", *more.split()]


# fmt: off
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options (``--cluster``, ``--model`` and ``--json`` belong to the command line)."""
    add_options(parser, {
        "plan": (None, "", "plan.json", {"type": Path}),
        "--out": (Path("run"), "", "folder to write into, made if missing (default %(default)s)"),
        "--run-dir": ("", "", "path of the folder on the nodes (default: its absolute path)"),
        "--train-iters": (None, "N", "iterations (default 1000)", {"type": int}),
        "--train-samples": (None, "N", "sequences to train on, instead of --train-iters", {"type": int}),
        "--step-batch-size-schedule": (
            "", "TEXT", "Megatron's schedule of global batch sizes, like '0:256 50B:512'; with --train-samples, and a "
            "plan for each other size in --plans"),
        "--lr": ("3e-4", "", "learning rate (default %(default)s); a tenth of it at the end"),
        "--save-interval": (500, "N", "iterations between checkpoints (default %(default)s)"),
        "--time-limit": (None, "TIME", "Slurm's time limit (default 24:00:00)"),
        "--job-name": ("megatron-het", "NAME", "name of the job (default %(default)s)"),
        "--python": ("python", "", "interpreter on the nodes (default %(default)s)"),
        "--cpus-per-task": (
            None, "N", "with Slurm: cores of a rank (default: a node's ranks share its cores)", {"type": int}),
        **{f"--{key}": ("", "", f"Slurm's {text}; if the cluster file has none") for key, text in (
            ("qos", "quality of service"),
            ("reservation", "reservation"),
            ("licenses", "licences, like name:4"),
            ("mem", "memory of a node, like 64G (default: all of it, if all GPUs of a node are used)"),
        )},
        "--exclusive": (
            None, "", "nodes for this job alone (default: if all GPUs of a node are used and its cores are not "
            "known)", {"action": argparse.BooleanOptionalAction}),
        "--notice-s": (
            None, "S", "seconds before --time-limit at which a Slurm job saves and stops (default 120)", {"type": int}),
        "--at-time-limit": (
            None, "", "after that save (default requeue): queue the job again, submit another job that resumes, or end",
            {"choices": get_args(AtTimeLimit)}),
        "--target": (
            "slurm", "", "launcher of the job (default %(default)s): slurm (and torchrun scripts), jobset "
            "(Kubernetes) or skypilot (clouds; its job groups are experimental); see docs/kubernetes.md",
            {"choices": get_args(Target)}),
        "--volume": (
            [], "NAME:FOLDER", "without Slurm: claim (jobset) or bucket (skypilot) that nodes mount as FOLDER; one "
            "must contain the run's folder", {"action": "append"}),
        "--queue": ("", "NAME", "with --target jobset: Kueue's queue"),
        "--restarts": (
            None, "N", "with --target jobset: starts after a failure (default 10)", {"type": count(0, 10**6)}),
        "--modules": ([], "NAME", "environment modules that the scripts load first (not in pods)", {"nargs": "+"}),
        "--prologue": (None, "FILE", "bash that the scripts run first; a copy is written beside them", {"type": Path}),
        "--container": ("", "IMAGE", "container image of the ranks (Slurm, pods)"),
        "--container-runtime": (
            None, "", "with Slurm: container runtime, pyxis (default; Slurm's plugin for enroot) or apptainer",
            {"choices": ("pyxis", "apptainer")}),
        "--container-mounts": (
            [], "DIR", "with Slurm: folders besides that of the run, as /FOLDER[:/INSIDE[:ro]]", {"nargs": "+"}),
        "--doctor": (False, "", "the scripts check the nodes before they train; see docs/doctor.md"),
        "--elastic": (
            False, "", "write elastic.sbatch too: the job continues under another plan when a node fails, and after "
            "it was requeued; see docs/elastic.md"),
        "--plans": (
            [], "FILE", "with --elastic: further plans, the best one first; if none fits the nodes, the job searches "
            "for one. With --step-batch-size-schedule: the plans of the other sizes", {"nargs": "+", "type": Path}),
        "--profile": (
            None, "FILE", "profile.json that the plan was made from: it says which layers were measured, --doctor "
            "compares devices with it, and replan corrects it"),
        "--extra": ("", "FLAGS", "further Megatron flags in one string: data, tokenizer, logging, ..."),
    })
# fmt: on


_OF_SLURM = ("time_limit", "notice_s", "at_time_limit", "cpus_per_task", "modules")
_OF_CONTAINERS = ("container_runtime", "container_mounts")
_OF_TARGETS: dict[str, tuple[Target, ...]] = {
    **dict.fromkeys((*_OF_SLURM, *_OF_CONTAINERS, "qos", "reservation", "licenses", "mem", "exclusive"), ("slurm",)),
    "volume": ("jobset", "skypilot"),
    "queue": ("jobset",),
    "restarts": ("jobset",),
}
"""Launchers that support an option; options that are not listed apply to all of them."""


def _given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name)) not in (None, "", [])}


def check_belongs(options: argparse.Namespace) -> None:
    """Check that every option applies to the job's launcher; raises PlannerError."""
    for name, value in _given(options, _OF_TARGETS).items():
        problem, targets = "", _OF_TARGETS[name]
        if options.target not in targets:
            problem = f"does nothing with --target {options.target}, only with {' or '.join(targets)}"
        elif name in _OF_CONTAINERS and not options.container:
            problem = "does nothing without --container"
        elif name == "restarts" and options.elastic:
            problem = "does nothing with --elastic, where pods are replaced one by one"
        elif name == "notice_s" and str(options.time_limit).upper() in ("UNLIMITED", "INFINITE"):
            problem = f"does nothing with --time-limit {options.time_limit}"
        elif name in files.SLURM_RULES:
            problem = files.SLURM_RULES[name](value)
        if problem:
            raise PlannerError("emit", f"--{name.replace('_', '-')}", value, problem, "Leave it out")


def launch_options(options: argparse.Namespace, plan: Plan) -> LaunchOptions:
    """Returns the settings of the scripts; raises PlannerError."""
    iterations = options.train_iters
    if options.train_samples is not None:
        iterations = options.train_samples // plan.training.global_batch_size
    container = None
    if options.container and options.target == "slurm":
        mounts = tuple(options.container_mounts)
        container = Container(options.container, options.container_runtime or "pyxis", mounts)
    return LaunchOptions(
        run_dir=options.run_dir or str(options.out.resolve()),
        job_name=options.job_name,
        python=options.python,
        save_interval=options.save_interval,
        doctor=options.doctor,
        # With growing batches Megatron computes the number of iterations.
        iterations=0 if options.step_batch_size_schedule else iterations,
        prologue=read_prologue(options.prologue),
        container=container,
        **_given(options, _OF_SLURM) | {"modules": tuple(options.modules)},
    )


def pod_options(options: argparse.Namespace, cluster: Cluster) -> PodOptions | None:
    """Returns the settings of a launch without Slurm; None with Slurm.

    Raises:
        PlannerError: A bad volume, or GPUs without a name on the target.
    """
    if options.target == "slurm":
        return None
    volumes: dict[str, str] = {}
    for text in options.volume:
        name, _, folder = text.rpartition(":")
        is_bucket, needed = "://" in name, "s3://BUCKET" if options.target == "skypilot" else "CLAIM"
        if not name or not folder.startswith("/") or files.text_problem(text, 1000) or is_bucket != ("://" in needed):
            raise PlannerError("emit", "--volume", text, f"is not {needed}:/FOLDER")
        if volumes.setdefault(folder, name) != name:
            raise PlannerError("emit", "--volume", text, f"{volumes[folder]} is mounted at that folder, too")
    for group in cluster.nodes:
        is_named = group.skypilot.accelerators or cluster.gpu(group.gpu).is_processor
        if options.target == "skypilot" and not is_named:
            problem, names = f"SkyPilot's name of {group.gpu} is not known", "'sky show-gpus' lists the names"
            hint = f"Add 'skypilot: {{accelerators: NAME}}' to its nodes; {names}"
            raise PlannerError("cluster file", "skypilot.accelerators", None, problem, hint)
    restarts = 10 if options.restarts is None else options.restarts
    return PodOptions(options.target, options.container, volumes, options.queue, restarts)


def read_prologue(file: Path | None) -> str:
    """Returns the text of ``--prologue``; raises PlannerError."""
    try:
        return file.read_text(encoding="utf-8") if file else ""
    except (OSError, UnicodeError) as error:
        raise PlannerError("emit", "--prologue", str(file), f"cannot be read: {error}") from None


def node_kinds(cluster: Cluster, options: argparse.Namespace | None = None) -> dict[str, NodeGroup]:
    """The cluster file's groups of nodes, named after their GPU, and after their place where that is not enough.

    Args:
        options: Of the command line, used where the file has no setting.

    Returns:
        The groups with their Slurm settings filled in; nodes without GPUs have no resource and no accelerator.
    """
    gpus = [group.gpu for group in cluster.nodes]
    kinds: dict[str, NodeGroup] = {}
    for i, group in enumerate(cluster.nodes):
        slurm = group.slurm
        name = group.gpu if gpus.count(group.gpu) == 1 else f"{group.gpu} nodes[{i}]"
        asked: dict[str, Any] = {
            key: getattr(slurm, key) or getattr(options, key, "") for key in ("qos", "reservation", "licenses", "mem")
        }
        asked["gres"] = "gpu" if slurm.gres is None else slurm.gres
        asked["exclusive"] = getattr(options, "exclusive", None) if slurm.exclusive is None else slurm.exclusive
        changed: dict[str, Any] = {"slurm": slurm.model_copy(update=asked)}
        if cluster.gpu(group.gpu).is_processor:
            changed["kubernetes"] = group.kubernetes.model_copy(update={"resource": ""})
            changed["skypilot"] = group.skypilot.model_copy(update={"accelerators": ""})
        kinds[name] = group.model_copy(update=changed)
    return kinds
