"""``emit``: from plan.json to everything that Megatron, torchrun and Slurm run.

Writes into one folder: ``plan.json``, ``args.sh``, ``train.sbatch`` (heterogeneous),
``train-plain.sbatch`` where an ordinary job can do it, ``torchrun-node-<n>.sh``, and ``layout.txt``
with Megatron's own layout string when the plan needs no extension.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_het.config import environment_of
from megatron_het.config_plan import check_plan_alone
from megatron_het.plan import Plan, PlanError, load_plan, save_plan
from tools.planner.emit_flags import (
    ModelOptions,
    args_sh,
    extension_reasons,
    layout_string,
    model_arguments,
    stock_arguments,
)
from tools.planner.emit_nodes import Node, NodeKind, place
from tools.planner.emit_scripts import LaunchOptions, het_sbatch, plain_obstacle, plain_sbatch, torchrun_script
from tools.planner.errors import PlannerError
from tools.planner.files import check_target


@dataclass(slots=True)
class Emitted:
    """What was written.

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
) -> Emitted:
    """Write all files; nothing is written when the plan cannot run or does not fit the nodes.

    Args:
        plan: A checked plan.
        out: A folder, made when it is missing.
        kinds: Node kinds by name (the plan's device names, unless ``gpu`` says otherwise).
        groups: Megatron flags besides those of the plan, by purpose.
        launch: Settings of the scripts; ``run_dir`` is how the nodes see ``out``.
        header: Comment lines for args.sh.

    Raises:
        PlannerError: No run can have the plan, or it does not fit the nodes.
    """
    try:
        check_plan_alone(plan)
    except PlanError as error:
        raise PlannerError("plan", error.where, error.value, error.problem, error.hint) from None
    nodes = place(plan, kinds)
    launch = replace(launch, environment={**environment_of(plan), **(launch.environment or {})})
    texts = {
        "args.sh": args_sh(plan, f"{launch.run_dir}/plan.json", groups, header),
        "train.sbatch": het_sbatch(nodes, kinds, launch),
    }
    result = Emitted(nodes=nodes)
    obstacle = plain_obstacle(nodes, kinds)
    if obstacle:
        result.notes.append(f"no train-plain.sbatch: {obstacle}")
    else:
        texts["train-plain.sbatch"] = plain_sbatch(nodes, kinds, launch)
    for i in range(len(nodes)):
        texts[f"torchrun-node-{i}.sh"] = torchrun_script(nodes, i, launch)
    reasons = extension_reasons(plan)
    if reasons:
        result.notes.append("stock Megatron cannot run this plan: " + "; ".join(reasons))
    else:
        texts["layout.txt"] = layout_string(plan) + "\n"
        result.notes.append("stock Megatron can run this plan: " + shlex.join(stock_arguments(plan)))
    (out / "logs").mkdir(parents=True, exist_ok=True)
    save_plan(plan, out / "plan.json")
    result.files["plan.json"] = out / "plan.json"
    for name, text in texts.items():
        _write(out / name, text)
        result.files[name] = out / name
    return result


def _write(path: Path, text: str) -> None:
    """Write or replace a file in one step; scripts become executable."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    if path.suffix in (".sh", ".sbatch") and path.name != "args.sh":
        scratch.chmod(0o755)
    os.replace(scratch, path)


def training_group(options: argparse.Namespace) -> list[str]:
    """Flags of the optimization that the command line offers."""
    return [
        "--train-iters", str(options.train_iters),
        "--lr", options.lr,
        "--min-lr", f"{float(options.lr) / 10:g}",
        "--lr-decay-style", "cosine",
        "--lr-warmup-fraction", "0.01",
        "--weight-decay", "0.1", "--adam-beta2", "0.95", "--clip-grad", "1.0",
        "--log-interval", "10", "--eval-interval", "1000", "--eval-iters", "10",
        "--distributed-timeout-minutes", "10",
    ]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options (``--cluster``, ``--model`` and ``--json`` belong to the command line)."""
    parser.add_argument("plan", type=Path, help="plan.json")
    parser.add_argument("--out", type=Path, default=Path("run"), help="folder to write into (made if missing)")
    parser.add_argument("--run-dir", default="", help="the same folder as the nodes see it (default: its absolute path)")
    parser.add_argument("--train-iters", type=int, default=1000)
    parser.add_argument("--lr", default="3e-4")
    parser.add_argument("--save-interval", type=int, default=500, help="iterations between checkpoints")
    parser.add_argument("--time-limit", default="24:00:00", help="Slurm's time limit")
    parser.add_argument("--job-name", default="megatron-het")
    parser.add_argument("--python", default="python", help="interpreter on the nodes")
    parser.add_argument("--cpus-per-task", type=int, default=0)
    parser.add_argument("--extra", default="", metavar="FLAGS",
                        help="further Megatron flags in one string: data, tokenizer, logging, ...")


def run(options: argparse.Namespace, model: Any, cluster: Any) -> Emitted:
    """Carry out the command.

    Args:
        options: Parsed options.
        model: A ``tools.planner.model.Model``.
        cluster: A ``tools.planner.cluster.Cluster``.

    Raises:
        PlannerError: A bad plan, a plan of another model or cluster, a bad option.
    """
    try:
        plan = load_plan(options.plan)
    except PlanError as error:
        raise PlannerError(str(options.plan), error.where, error.value, error.problem, error.hint) from error
    _check_model(plan, model, str(options.plan))
    if options.train_iters < 1 or options.save_interval < 1:
        raise PlannerError("emit", "--train-iters, --save-interval", [options.train_iters, options.save_interval],
                           "must be at least 1")
    try:
        float(options.lr)
        extra = shlex.split(options.extra)
    except ValueError as error:
        raise PlannerError("emit", "--lr, --extra", [options.lr, options.extra], str(error)) from error
    check_target(options.out / "plan.json", "--out")
    launch = LaunchOptions(
        run_dir=options.run_dir or str(options.out.resolve()),
        job_name=options.job_name,
        time_limit=options.time_limit,
        python=options.python,
        save_interval=options.save_interval,
        cpus_per_task=options.cpus_per_task,
    )
    groups = {
        "MODEL": model_arguments(plan, model_options(model)),
        "TRAINING": training_group(options),
        "EXTRA": extra,
    }
    return emit(plan, options.out, node_kinds(cluster), groups, launch)


def model_options(model: Any) -> ModelOptions:
    """What the model file says beyond the plan."""
    return ModelOptions(
        normalization="LayerNorm" if model.biases else "RMSNorm",
        swiglu=model.gated,
        biases=model.biases,
        learned_positions=model.learned_positions,
        vocab_size=model.vocab_size,
    )


def node_kinds(cluster: Any) -> dict[str, NodeKind]:
    """The cluster file's groups of nodes, named after their GPU, and after their place where that is not enough."""
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
        )
    return kinds


def _check_model(plan: Plan, model: Any, file: str) -> None:
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if getattr(plan.model, name) != getattr(model, name):
            raise PlannerError(
                file, f"model.{name}", getattr(plan.model, name),
                f"the model file says {getattr(model, name)}", "Make a plan for this model",
            )
