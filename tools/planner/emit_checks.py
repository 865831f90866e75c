"""What ``emit`` refuses before it writes anything: names that Slurm or a shell would read as something else."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_het.features import FEATURES
from megatron_het.features.experts import check_expert_parallel
from megatron_het.plan import Plan, PlanError

from .emit_nodes import NodeKind
from .errors import PlannerError, from_plan_error
from .model import Model
from .names import SLURM_RULES, folder_problem, host_problem, job_problem, text_problem, time_problem

if TYPE_CHECKING:
    from .emit_scripts import LaunchOptions

_MANAGED = (
    # Megatron's flags that the plan, the model file or the scripts set: a second value would contradict them.
    *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "group-query-attention"),
    *("num-query-groups", "seq-length", "encoder-seq-length", "max-position-embeddings", "normalization"),
    *("kv-channels", "num-experts", "moe-router-topk", "moe-ffn-hidden-size", "moe-layer-freq"),
    *("moe-shared-expert-intermediate-size", "expert-model-parallel-size", "expert-tensor-parallel-size"),
    *("window-size", "window-attn-skip-freq", "multi-latent-attention", "q-lora-rank", "kv-lora-rank"),
    *("qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim"),
    *("position-embedding-type", "swiglu", "disable-bias-linear", "untie-embeddings-and-output-weights"),
    *("micro-batch-size", "global-batch-size", "calculate-per-token-loss", "bf16", "fp16", "sequence-parallel"),
    *("recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-activations"),
    *("use-distributed-optimizer", "dist-ckpt-optim-fully-reshardable", "train-iters", "train-samples"),
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "pipeline-model-parallel-layout"),
    *("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"),
    *(flag.removeprefix("--") for feature in FEATURES for flag in feature.sets),
    *("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "het-plan", "het-schedule"),
    *("save", "save-interval", "load", "ckpt-format", "exit-on-missing-checkpoint", "lr", "yaml-cfg"),
)
_MOST = 10**12


def check_experts(plan: Plan, model: Model, file: str) -> None:
    """Check that the replicas of a plan can divide the experts of a layer.

    Raises:
        PlannerError: They cannot.
    """
    try:
        check_expert_parallel(plan, model.experts.count if model.experts else 0)
    except PlanError as error:
        raise from_plan_error(file, error) from None
    wide = next((r.tp for s in plan.stages for r in s.replicas if r.tp > 1), 1)
    if model.experts is not None and model.biases and wide > 1:
        problem = f"a replica has TP {wide}, and with experts Megatron trains biases of linear layers under TP 1 only"
        raise PlannerError(file, "stages", wide, problem, "Plan again")


def check_launch(launch: LaunchOptions, kinds: Mapping[str, NodeKind]) -> None:
    """Every text that becomes part of a script.

    Raises:
        PlannerError: naming option or key, value and rule.
    """
    for option, value, problem in (
        ("--run-dir", launch.run_dir, folder_problem(launch.run_dir)),
        ("--job-name", launch.job_name, job_problem(launch.job_name)),
        ("--time-limit", launch.time_limit, time_problem(launch.time_limit)),
        ("--python", launch.python, text_problem(launch.python, 4096) or ("" if launch.python else "is empty")),
    ):
        if problem:
            raise PlannerError("emit", option, value, problem)
    if not 0 <= launch.cpus_per_task <= 4096:
        raise PlannerError("emit", "--cpus-per-task", launch.cpus_per_task, "must be 0 (Slurm's default) to 4096")
    if not 1 <= launch.save_interval <= _MOST:
        raise PlannerError("emit", "--save-interval", launch.save_interval, "must be at least 1")
    for name, kind in kinds.items():
        if problem := text_problem(name):
            raise PlannerError("cluster", "gpu", name, problem)
        for key, rule in SLURM_RULES.items():
            value = getattr(kind, key)
            if value and (problem := rule(value)):
                raise PlannerError("cluster", f"{name}: slurm.{key}", value, problem)
        for host in kind.hosts:
            if problem := host_problem(host):
                raise PlannerError("cluster", f"{name}: hosts", host, problem)


def check_training(options: Any) -> None:
    """Iterations and learning rate.

    Raises:
        PlannerError: naming the option.
    """
    if not 1 <= options.train_iters <= _MOST:
        raise PlannerError("emit", "--train-iters", options.train_iters, f"must be 1 to {_MOST}")
    try:
        rate = float(options.lr)
    except ValueError:
        rate = math.nan
    if not (math.isfinite(rate) and rate > 0 and options.lr.isprintable()):
        raise PlannerError("emit", "--lr", options.lr, "must be a positive number")


def extra_flags(text: str) -> list[str]:
    """The words of ``--extra``.

    Raises:
        PlannerError: Unbalanced quotes, control characters, a flag that plan, model file or scripts set.
    """
    if problem := text_problem(text, 100_000):
        raise PlannerError("emit", "--extra", text, problem)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise PlannerError("emit", "--extra", text, f"cannot be split into words: {error}") from None
    if words and not words[0].startswith("-"):
        raise PlannerError("emit", "--extra", words[0], "is no flag: the first word must begin with --")
    _check_contradictions(words)
    return words


def _check_contradictions(words: Sequence[str]) -> None:
    for word in words:
        name = word.split("=", 1)[0].removeprefix("--")
        if not word.startswith("--") or not name:
            continue
        # argparse takes the beginning of a flag for the flag.
        managed = next((m for m in _MANAGED if m == name or (len(name) > 3 and m.startswith(name))), None)
        if managed is not None:
            raise PlannerError(
                "emit",
                "--extra",
                word,
                f"--{managed} follows from the plan, the model file or an option of emit, and would contradict it",
                "Leave it out; change the model file, plan again or use the option of emit",
            )
