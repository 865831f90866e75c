"""Which optimizers a plan can train with, and what is said of the others."""

import argparse
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_het.arguments.megatron_args import apply_plan, check_arguments
from megatron_het.features.optimizers.spec import PACKAGE, TESTED, name_of
from megatron_het.plan import Placement, Plan, PlanError, Replica
from tests.unit.plan.feature_checks import refusal
from tests.unit.plan.test_refusals import arguments, made

EMERGING = ("lion", "muon")
ALL = ("adam", "sgd", *EMERGING, "dist_muon", "adaptive_muon", "soap")
PLAIN_SHARDS = ("use_precision_aware_optimizer", "optimizer_cpu_offload")
NEEDED = ("emerging_optimizers", "absl", "triton", "transformer_engine")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, TESTED)


def pretend(monkeypatch: pytest.MonkeyPatch, version: str | None, *missing: str) -> None:
    found, find = importlib.metadata.version, importlib.util.find_spec

    def version_of(name: str) -> str:
        if name != PACKAGE:
            return found(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    def find_spec(name: str, package: str | None = None) -> Any:
        return (None if name in missing else object()) if name in NEEDED else find(name, package)

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def staged(*stages: Sequence[tuple[int, str]], **training: Any) -> Plan:
    """A plan of two stages, from the TP size and the device of every replica."""
    plan, first = made(), 0
    found = []
    for stage, replicas in zip(plan.stages, stages, strict=True):
        made_of = []
        for i, (tp, device) in enumerate(replicas):
            microbatches = tuple(range(i, plan.training.num_microbatches, len(replicas)))
            made_of.append(Replica(tuple(range(first, first + tp)), microbatches, device=device))
            first += tp
        found.append(replace(stage, replicas=tuple(made_of)))
    return replace(plan, stages=tuple(found), training=replace(plan.training, **training))


def check(plan: Plan, **given: Any) -> None:
    check_arguments(plan, arguments(**given), plan.world_size)


ONE = staged([(1, "a")], [(1, "b")])
WITH_TP = staged([(2, "a")], [(1, "b"), (1, "b")])
MIXED = staged([(1, "a")], [(2, "b"), (1, "b")])
DEVICES = staged([(1, "a")], [(1, "a"), (1, "b")])


DIVIDED = staged([(1, "a")], [(2, "b"), (1, "b")], distributed_optimizer=True)
BF16, FP16 = (staged([(1, "a")], [(1, "b")], precision=precision) for precision in ("bf16", "fp16"))
WHOLE = {"optimizer": "muon", "muon_tp_mode": "duplicated"}  # matrices are put together
DRIFT = "--muon-fp32-matmul-prec = 'medium'.*stage 1 has replicas of different"


@pytest.mark.parametrize(
    ("plan", "given", "reason"),
    [
        (WITH_TP, {"optimizer": "muon"}, r"= 'blockwise'.*TP sizes \[1, 2\].*--muon-tp-mode duplicated"),
        (WITH_TP, WHOLE, None),
        (WITH_TP, WHOLE | {"muon_tp_mode": "distributed"}, None),
        (MIXED, WHOLE, f"{DRIFT} TP or EP sizes.*drift"),
        (DEVICES, WHOLE, f"{DRIFT} devices.*drift"),
        *((plan, WHOLE | {"muon_fp32_matmul_prec": "high"}, None) for plan in (MIXED, DEVICES)),
        *((DIVIDED, {"optimizer": name}, None) for name in ("adam", "lion")),
        *(
            (DIVIDED, {"optimizer": name}, f"--optimizer = '{name}'.*shards the state of adam and lion only")
            for name in ("sgd", "muon")
        ),
        *((DIVIDED, {"optimizer": "adam", flag: True}, None) for flag in PLAIN_SHARDS),
        *(
            (DIVIDED, {"optimizer": "lion", flag: True}, f"--{flag.replace('_', '-')}.*with lion")
            for flag in PLAIN_SHARDS
        ),
        *((BF16, {"optimizer": name}, None) for name in EMERGING),
        *((FP16, {"optimizer": name}, f"--optimizer = '{name}'.*fp16.*Use bf16") for name in EMERGING),
        (ONE, {"optimizer": "dist_muon"}, "--optimizer = 'dist_muon'.*Use muon"),
        (ONE, {"optimizer": "adaptive_muon"}, "--optimizer = 'adaptive_muon'.*fails in its first update"),
        (ONE, {"optimizer": "soap"}, "--optimizer = 'soap'.*zero but for rounding"),
    ],
)
def test_what_a_plan_trains_with(plan: Plan, given: dict[str, Any], reason: str | None) -> None:
    """Cut matrices, replicas that round otherwise, shards, scaled losses, and optimizers that fail anywhere."""
    with refusal(reason):
        check(plan, **given)


def test_to_megatron_sharded_lion_is_adam() -> None:
    shown = {}
    for plan in (ONE, DIVIDED):
        args = arguments(optimizer="lion", make_vocab_size_divisible_by=128)
        apply_plan(plan, Placement(plan), args, 0)
        shown[plan.training.distributed_optimizer] = args.optimizer, name_of(args)
    assert shown == {False: ("lion", "lion"), True: ("adam", "lion")}


@pytest.mark.parametrize("name", EMERGING)
def test_the_package_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = f'pip install "{PACKAGE}=={TESTED}"'
    for version, missing, reason in (
        (None, (), f"which is not installed.*{command}"),
        ("0.1.9", (), f"0.2 or later; 0.1.9 is installed.*{command}"),
        (TESTED, ("triton",), "cannot be imported without triton. Install triton too"),
        (TESTED, ("absl", "triton"), "cannot be imported without absl-py and triton"),
    ):
        pretend(monkeypatch, version, *missing)
        check(ONE, optimizer="sgd")
        with pytest.raises(PlanError, match=f"--optimizer = '{name}'.*{reason}"):
            check(ONE, optimizer=name)


def test_moments_of_other_precision_need_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, TESTED, "transformer_engine")
    check(DIVIDED, use_precision_aware_optimizer=True, optimizer_cpu_offload=True)
    with refusal("--use-precision-aware-optimizer = True.*not installed. Leave it out"):
        check(DIVIDED, use_precision_aware_optimizer=True)


def test_every_optimizer_of_megatron_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # Megatron looks for the package as well
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    action = next(a for a in parser._actions if "--optimizer" in a.option_strings)
    assert sorted(action.choices or ()) == sorted(ALL)
