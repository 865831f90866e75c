"""Requirements of Megatron's optimizers on a plan, and Lion in the distributed optimizer.

Adam, SGD and Lion work element by element, so any sharding of weights is possible.  Muon
orthogonalizes whole matrices, and each replica of a stage computes that update by itself.

Of Megatron's optimizers, all but Adam and SGD come from the package ``emerging-optimizers``.  They update matrices;
Adam updates embeddings, the output layer, norms and biases (with Muon, ``--muon-scalar-optimizer``).

Upstream shards Lion by whole matrices, with an optimizer that supports neither ministages nor shards of unequal size,
and whose checkpoints depend on the layout.  A plan shards it element by element, like Adam: for Megatron the optimizer
is Adam, and on every rank Lion computes the updates of the matrices (``runtime.py``).
"""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_het.features.base import Feature, NoOptions, flag_of
from megatron_het.plan import Plan, PlanError, Stage

PACKAGE, TESTED, LEAST = "emerging-optimizers", "0.3.0", (0, 2)
"""The package, its tested release, and the first release that Megatron supports."""

SHARDED_LION = "het_sharded_lion"
"""Attribute of Megatron's arguments that is set if Lion updates the distributed optimizer's matrices."""

_IMPORTED = {"emerging_optimizers": PACKAGE, "absl": "absl-py", "triton": "triton"}
"""Modules that the package imports beside torch, and how to install them; not every build of torch has Triton."""

_BUILT_IN = ("adam", "sgd")
_IMPOSSIBLE = {
    "dist_muon": ("Megatron's own sharding of it is by whole matrices, which a plan does not do", "Use muon"),
    "adaptive_muon": (
        f"megatron-core 0.19.2 fails in its first update with {PACKAGE} {TESTED}, with a plan or without",
        "Use muon",
    ),
    "soap": (
        "its first updates divide numbers that are zero but for rounding by their own size, so that training would "
        "depend on the order in which a plan adds up gradients",
        "Use adam, lion or muon",
    ),
}
_OF_WHOLE_MATRICES = ("muon",)
_SHARDED = ("adam", "lion")  # optimizers whose state the distributed optimizer of a plan shards
_NOT_BESIDE_LION = ("use_precision_aware_optimizer", "optimizer_cpu_offload")
_WHOLE_MODES = ("duplicated", "distributed")  # values of ``--muon-tp-mode`` with which TP does not change the update


class Optimizers(Feature):
    """Checks of the optimizer; on with every plan."""

    name = "optimizers"
    title = "optimizers"
    always = True
    upstream_names: ClassVar[Mapping[str, str]] = {
        "megatron.core.optimizer.emerging_optimizers._is_nonlinear_or_embedding": "ba35fc287da2bf78"
    }

    def check_any_arguments(self, plan: Plan, args: Any) -> None:
        """Refuse optimizers that would not train as in a single process."""
        super().check_any_arguments(plan, args)
        check_optimizer(plan, args)

    def runs_with(self, args: Any) -> bool:
        """Whether Lion updates the distributed optimizer's matrices; see :class:`Feature`."""
        return getattr(args, SHARDED_LION, False)

    def apply(self, plan: Plan, options: NoOptions, args: Any) -> None:
        """Set Megatron's optimizer to Adam where the distributed optimizer shards Lion."""
        if plan.training.distributed_optimizer and args.optimizer == "lion":
            args.optimizer = "adam"
            setattr(args, SHARDED_LION, True)


def name_of(args: Any) -> str | None:
    """The name of the optimizer in Megatron's arguments, perhaps those of a checkpoint; None if unknown."""
    return "lion" if getattr(args, SHARDED_LION, False) else getattr(args, "optimizer", None)


def check_optimizer(plan: Plan, args: Any) -> None:
    """Refuse an optimizer, by parsed arguments, that would fail or not train as in one process; raises PlanError."""
    name = getattr(args, "optimizer", None) or "adam"
    if name in _IMPOSSIBLE:
        raise PlanError("--optimizer", name, *_IMPOSSIBLE[name])
    if plan.training.distributed_optimizer:
        _check_shards(name, args)
    elif getattr(args, "overlap_param_gather", False):
        need = "it gathers what the distributed optimizer divides"
        raise PlanError("--overlap-param-gather", True, need, "Make the plan with training.distributed_optimizer")
    if name in _BUILT_IN:
        return
    if plan.training.precision == "fp16":
        raise PlanError("--optimizer", name, "Megatron does not scale its losses for fp16", "Use bf16, or adam")
    if name in _OF_WHOLE_MATRICES:
        _check_whole_matrices(plan, args)
    _check_package(name)


def _check_shards(name: str, args: Any) -> None:
    """Refuse optimizers and options that the distributed optimizer cannot shard."""
    if name not in _SHARDED:
        problem = f"the distributed optimizer of a plan shards the state of {' and '.join(_SHARDED)} only"
        hint = "Use one of them, or make the plan without training.distributed_optimizer and what shards over it"
        raise PlanError("--optimizer", name, problem, hint)
    given = next((flag for flag in _NOT_BESIDE_LION if getattr(args, flag, False)), None)
    if name == "lion" and given is not None:
        raise PlanError(flag_of(given), True, "cannot be used with lion under the distributed optimizer", "Use adam")
    can = getattr(args, "optimizer_cpu_offload", False) or importlib.util.find_spec("transformer_engine")
    if given == _NOT_BESIDE_LION[0] and not can:
        raise PlanError(
            flag_of(given), True, "it needs Adam of Transformer Engine, which is not installed", "Leave it out"
        )


def _check_whole_matrices(plan: Plan, args: Any) -> None:
    """Refuse plans that divide matrices, and replicas that would round the update of a matrix differently."""
    sizes = sorted({r.tp for s in plan.stages for r in s.replicas})
    mode = getattr(args, "muon_tp_mode", None) or "blockwise"
    if sizes != [1] and mode not in _WHOLE_MODES:
        problem = f"each rank would orthogonalize its block of a matrix by itself, and the plan has TP sizes {sizes}"
        hint = f"Add --muon-tp-mode {_WHOLE_MODES[0]}, or use TP size 1 everywhere"
        raise PlanError("--muon-tp-mode", mode, problem, hint)
    precision = getattr(args, "muon_fp32_matmul_prec", None) or "medium"
    for number, stage in enumerate(plan.stages):
        if precision != "high" and (found := _differences(stage)):
            raise PlanError(
                "--muon-fp32-matmul-prec",
                precision,
                f"every replica makes the update itself, and stage {number} has replicas of different {found}: "
                "they would round products of bf16 otherwise, and their weights would drift apart",
                "Add --muon-fp32-matmul-prec high, or give the replicas of each stage one TP size and kind of device",
            )


def _differences(stage: Stage) -> str:
    """The properties in which replicas of a stage differ, so that they may round differently; "" if none."""
    for what, values in (
        ("TP or EP sizes", {replica.cut for replica in stage.replicas}),
        ("devices", {device for replica in stage.replicas for device in replica.devices}),
    ):
        if len(values) > 1:
            return what
    return ""


def _check_package(name: str) -> None:
    """Refuse a missing package early: Megatron imports it only when it builds the optimizer."""
    hint = f'Install it: pip install "{PACKAGE}=={TESTED}"'
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        reason = f"Megatron takes it from the package {PACKAGE}, which is not installed"
        raise PlanError("--optimizer", name, reason, hint) from None
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if numbers < LEAST:
        least = ".".join(map(str, LEAST))
        reason = f"Megatron takes it from the package {PACKAGE} {least} or later; {version} is installed"
        raise PlanError("--optimizer", name, reason, hint)
    missing = [needed for module, needed in _IMPORTED.items() if importlib.util.find_spec(module) is None]
    if missing:
        reason = f"the package {PACKAGE} {version} cannot be imported without {' and '.join(missing)}"
        raise PlanError("--optimizer", name, reason, f"Install {' '.join(missing)} too")
