"""Compares training under plans with stock Megatron in one process, from one shared checkpoint.

``python -m benchmarks.parity --json OUT``: at least 40 plans chosen pairwise from every feature,
some of them in bf16 and fp16 too, 20 random ones, and under 1F1B and GPipe plans with Lion, Muon and LayerNorm-1p.
For each: the largest relative difference of the losses of 10 steps (lr 1e-3, Lion 1e-5, dropout 0) and of the
evaluations, of the norm and of every gradient at the first step (L2, per parameter, on every replica), and in fp32 of
every parameter and tensor of the optimizer after the last one.
Top-level figures are those of fp32; bf16 is separate.  Where the last parameters differ by more than the bound, stock
Megatron is also compared with itself, from weights whose last digit is changed.  OUT is written after every plan;
``--add OUT`` runs the plans that OUT lacks, and merges the results.
"""

import argparse
import fnmatch
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import add_begin_argument, command_line, save, scratch, write_report
from testing import feature_cases
from testing.cases import PARAMETERS, Case, case_from_row, is_valid, model_flags, pairwise, random_case, with_schedule
from testing.compare import BAR, BOUNDS, compare, failures
from testing.lab import Lab
from testing.runner import Device, Finished, Job, JobError, Runner, add_device_argument
from testing.slimpipe_cases import MultiHeadLab, slimpipe_cases
from testing.zorse_cases import MinistageLab, keeps_gradients, ministage_cases

# Figures that accumulate the rounding of all steps: shown, without a bound.
_LATER = ("max_relative_later_norm_difference",)
_MIN_PAIRWISE, _BF16, _FP16, _RANDOM = 40, 10, 5, 20
# Schedules that the executor runs: chunks per stage and parameters of the generator.
SCHEDULES: dict[str, tuple[int, dict[str, Any]]] = {"1f1b": (1, {}), "gpipe": (1, {})}
MODELS: dict[str, Callable[[list[Case], int], list[Case]]] = {
    "dense": lambda cases, seed: cases,
    "moe": feature_cases.with_experts,
    "packed": feature_cases.with_documents,
    "attention": feature_cases.with_attention,
    "hybrid": feature_cases.with_hybrid,
    "recurrent": feature_cases.with_recurrent,
    "shared": feature_cases.with_sharing,
}
"""Makes the cases of a kind of model, from those of a dense model and a seed."""


def all_cases(seed: int, schedule: str, quick: bool) -> tuple[list[Case], list[str]]:
    """Returns the cases of a run, and the pairs of values that no plan can have."""
    if schedule == "slimpipe":
        return list(slimpipe_cases(seed, quick)), []
    if schedule == "ministage":
        return ministage_cases(seed, quick), []
    if schedule == "zero-bubble":
        return feature_cases.zero_bubble_cases(seed, quick), []
    if schedule == "data-parallel":
        return feature_cases.zero_cases(seed, quick), []
    if schedule == "unequal-microbatches":
        return feature_cases.poplar_cases(seed, quick), []
    rng = random.Random(seed)
    rows, impossible = pairwise(PARAMETERS, is_valid, rng)
    while len(rows) < _MIN_PAIRWISE:  # cover pairs a second time
        rows += pairwise(PARAMETERS, is_valid, rng)[0][: _MIN_PAIRWISE - len(rows)]
    names = [f"pair-{i:02}" for i in range(len(rows))]
    cases = [case_from_row(row, name, rng) for row, name in zip(rows, names, strict=True)]
    bf16 = [case_from_row(rows[i], f"bf16-{i:02}", rng, "bf16") for i in range(_BF16)]
    bf16 += [case_from_row(rows[i], f"fp16-{i:02}", rng, "fp16") for i in range(_BF16, _BF16 + _FP16)]
    drawn = [random_case(f"random-{i:02}", rng) for i in range(_RANDOM)]
    if quick:
        cases, bf16, drawn = cases[:8], bf16[:2], drawn[:4]
    cases += bf16 + drawn + ([] if quick else feature_cases.optimizer_cases(seed))
    if schedule != "1f1b":
        cases = [with_schedule(case, schedule, *SCHEDULES[schedule]) for case in cases]
    return cases, sorted(" and ".join(sorted(f"{k}={v}" for k, v in pair)) for pair in impossible)


def with_precision(cases: Iterable[Case], precision: str) -> list[Case]:
    """Returns the cases in another precision, without those that already have one other than fp32."""
    found = []
    for case in cases:
        if case.plan.training.precision == "fp32":
            training = replace(case.plan.training, precision=precision)
            plan = replace(case.plan, training=training)
            found.append(replace(case, plan=plan, chosen={**case.chosen, "precision": precision}))
    return found


def labs(cases: Iterable[Case], *, saves: bool = False) -> dict[type[Lab], list[Case]]:
    """Groups the cases by the ``Lab`` that runs them.

    Args:
        cases: Of any kind.
        saves: Whether all runs whose last parameters are comparable save them, not only those of ministages.
    """
    found: dict[type[Lab], list[Case]] = {}
    for case in cases:
        is_exact = case.plan.training.precision == "fp32" and compares_parameters(case)
        if case.chosen.get("multi_head"):
            kind: type[Lab] = MultiHeadLab
        else:
            kind = MinistageLab if "ministages" in case.chosen or (saves and is_exact) else Lab
        found.setdefault(kind, []).append(case)
    return found


def compares_parameters(case: Case) -> bool:
    """Whether parameters after the last step are comparable.

    Not those of routed experts (see :func:`is_routed`), nor in bf16 key biases, whose gradient is rounding alone: Adam
    makes whole steps of it.
    """
    has_key_biases = "--disable-bias-linear" not in (flags := model_flags(case.weights)) or "--add-qkv-bias" in flags
    return not feature_cases.is_routed(case) and not (has_key_biases and case.plan.training.precision != "fp32")


def measure(
    cases: list[Case],
    folder: Path,
    at_once: int,
    device: Device = "cpu",
    *,
    has_te: bool = False,
    limit_s: float | None = None,
    on_entry: Callable[[dict[str, Any]], None] = lambda entry: None,
    shared: Path | None = None,
    begin_s: float = math.inf,
) -> list[dict[str, Any]]:
    """Run all cases; a case that fails is recorded and does not end the benchmark.

    Args:
        cases: To run.
        folder: For what they write.
        at_once: Jobs at the same time.
        device: What ranks compute on.
        has_te: Whether layers are those of Transformer Engine.
        limit_s: Bound on a case; the lab's own without.
        on_entry: Called with what was found of a case, as soon as that is known.
        shared: Folder of data, checkpoints and references, which other runs use too; the run's own without.
        begin_s: No case begins later than so long after the first one.
    """
    found = []
    end_s = time.monotonic() + begin_s
    with Runner(device, has_te=has_te) as runner:
        # On a GPU Adam turns rounding errors of a gradient into whole steps: last parameters are not comparable there.
        for kind, members in labs(cases, saves=device == "cpu").items():
            lab = kind(runner, folder / kind.__name__, shared=shared)
            for entry in _rows(lab, members, at_once, limit_s, end_s):
                found.append(entry)
                on_entry(entry)
    return sorted(found, key=lambda entry: entry["name"])


def _rows(lab: Lab, cases: list[Case], at_once: int, limit_s: float | None, end_s: float) -> Iterator[dict[str, Any]]:
    started: dict[str, Case] = {}
    failed: dict[Any, str] = {}  # references, which are not tried again for every case
    without: list[dict[str, Any]] = []

    def jobs() -> Iterator[Job]:
        for case in cases:
            if time.monotonic() > end_s:
                return
            try:
                if case.reference not in failed:
                    lab.reference(case)
            except JobError as error:
                sys.stderr.write(f"{case.name}: {error}\n")
                failed[case.reference] = f"its reference: {error}"
            if (error_text := failed.get(case.reference)) is not None:
                without.append(_entry(case, error=error_text))
                continue
            started[case.name] = case
            job = lab.job(case)
            yield job if limit_s is None else replace(job, timeout_s=limit_s)

    for finished in lab.runner.run_all(jobs(), at_once=at_once):
        yield _compared(lab, started[finished.job.name], finished)
    yield from without


def _entry(case: Case, **found: Any) -> dict[str, Any]:
    return {"name": case.name, "world_size": case.plan.world_size, "chosen": case.chosen, **found}


def _compared(lab: Lab, case: Case, finished: Finished) -> dict[str, Any]:
    """Returns the record of a case that has run."""
    entry = _entry(case, elapsed_s=round(finished.elapsed_s, 2), cpu_s=round(finished.cpu_s, 2))
    try:
        finished.check()
        figures = compare(finished.job.log_dir, case.plan, lab.reference(case), gradients=keeps_gradients(case))
        if isinstance(lab, MinistageLab) and compares_parameters(case) and lab.runner.device == "cpu":
            entry["relative_parameter_difference"] = lab.parameter_difference(case)
            if case.plan.training.precision == "fp32" and entry["relative_parameter_difference"] > BAR:
                entry["stock_parameter_difference"] = lab.rounding_difference(case)
    except (AssertionError, OSError, KeyError) as error:
        entry["error"] = str(error)
        sys.stderr.write(f"{case.name}: {error}\n")
        return entry
    entry.update(
        relative_loss_difference=figures.loss,
        relative_validation_difference=figures.validation,
        relative_gradient_difference=figures.gradient,
        worst_gradient=figures.worst,
        relative_norm_difference=figures.norm,
        relative_later_norm_difference=figures.later_norm,
    )
    parameters = entry.get("relative_parameter_difference")
    print(
        f"{case.name:18} {case.plan.world_size} ranks {finished.elapsed_s:5.1f} s, "
        f"{finished.cpu_s:5.1f} s of processor  loss {figures.loss:.1e}  gradient {figures.gradient:.1e}"
        + (f"  parameters {parameters:.1e}" if parameters is not None else ""),
        flush=True,
    )
    return entry


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the largest differences over entries that ran, and the number that did not."""
    ran = [entry for entry in entries if "error" not in entry]
    figures: dict[str, Any] = {"plans": len(entries), "failed": len(entries) - len(ran)}
    for name in ("loss", "validation", "gradient", "norm", "later_norm", "parameter"):
        key = f"relative_{name}_difference"
        values = [entry[key] for entry in ran if entry.get(key) is not None and not math.isnan(entry[key])]
        if values or name != "parameter":
            figures[f"max_{key}"] = max(values, default=None)
    return figures


def _options() -> argparse.Namespace:
    parser = command_line("benchmarks.parity", __doc__)
    parser.add_argument("--seed", type=int, default=0, help="of pairwise choice and random plans")
    parser.add_argument("--quick", action="store_true", help="a small part of the cases")
    parser.add_argument(
        "--schedule",
        choices=sorted([*SCHEDULES, "data-parallel", "ministage", "slimpipe", "unequal-microbatches", "zero-bubble"]),
        default="1f1b",
    )
    parser.add_argument(
        "--model",
        choices=sorted(MODELS),
        default="dense",
        help="dense (default); in fp32 alone: moe (layers of experts), packed (documents that do not see each other), "
        "attention (sliding windows and softmax offsets), hybrid (a kind of layer for every symbol of a pattern), "
        "recurrent (Mamba and gated delta net), shared (any of these with context parallelism, whole "
        "documents, and experts over replicas)",
    )
    parser.add_argument("--only", metavar="NAME", default="*", help="cases by name; * stands for anything")
    parser.add_argument("--at-once", type=int, default=2, help="jobs at the same time (default: 2)")
    add_device_argument(parser)
    parser.add_argument(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        default="local",
        help="layers; those of Transformer Engine need --device cuda, and train every case in bf16 (default: local)",
    )
    parser.add_argument(
        "--keep", type=Path, help="keep logs, gradients and references in this folder, whose references are used again"
    )
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="JSON", help="results of earlier runs")
    add_begin_argument(parser)
    options = parser.parse_args()
    if options.transformer_impl != "local" and options.device != "cuda":
        parser.error("--transformer-impl transformer_engine needs --device cuda")
    return options


_DRAW = ("schedule", "model", "seed", "device", "transformer_impl")


def added(options: argparse.Namespace, cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Returns the entries of earlier runs without an error, by name.

    Raises:
        SystemExit: They are of another draw.
    """
    found: dict[str, dict[str, Any]] = {}
    chosen = {case.name: json.loads(json.dumps(case.chosen)) for case in cases}
    for file in options.add:
        report = json.loads(file.read_text(encoding="utf-8"))
        for name in _DRAW:
            if report[name] != getattr(options, name):
                raise SystemExit(f"--add {file}: {name} {report[name]}, and this run has {getattr(options, name)}")
        if other := [e["name"] for e in report["cases"] if chosen.get(e["name"]) != e["chosen"]]:
            raise SystemExit(f"--add {file}: {', '.join(other)} are other plans now; train them again")
        found |= {entry["name"]: entry for entry in report["cases"] if "error" not in entry}
    return found


def report_of(entries: list[dict[str, Any]], impossible: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the report of the plans that have run so far."""
    by_precision = {p: summary([e for e in entries if e["chosen"]["precision"] == p]) for p in ("fp32", "bf16", "fp16")}
    is_cpu = options.device == "cpu"
    # On a CPU bf16 and fp16 are shown without a bound.
    failed = [entry["name"] for entry in entries if "error" in entry] if is_cpu else failures(entries, "cuda")
    fp32 = by_precision["fp32"]
    within = [v for k, v in fp32.items() if k.startswith("max_") and k not in _LATER and v is not None]
    worst = max(within, default=None)
    return {
        **{name: value for name, value in fp32.items() if name.startswith("max_")},
        "bar": BAR if is_cpu else BOUNDS["cuda"],
        "passed": not failed and (not is_cpu or (worst is not None and worst <= BAR)),
        **{name: getattr(options, name) for name in _DRAW},
        **by_precision,
        "failed": failed,
        "impossible_pairs": impossible,
        "cases": entries,
    }


def main() -> int:
    """Command line."""
    options = _options()
    has_te = options.transformer_impl != "local"
    cases, impossible = all_cases(options.seed, options.schedule, options.quick)
    cases = MODELS[options.model](cases, options.seed)
    cases = with_precision(cases, "bf16") if has_te else cases
    entries = added(options, cases)
    left = [case for case in cases if fnmatch.fnmatchcase(case.name, options.only) and case.name not in entries]
    if not left and not entries:
        raise SystemExit(f"--only {options.only}: no such case")

    def add(entry: dict[str, Any]) -> None:
        entries[entry["name"]] = entry
        save(options.json, report_of([entries[name] for name in sorted(entries)], impossible, options))

    with scratch("parity-", options.keep) as folder:
        own = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
        more: Any = {"has_te": has_te, "on_entry": add, "shared": folder / "shared", "begin_s": options.begin_s}
        measure(left, own, options.at_once, options.device, **more)
    report = report_of([entries[name] for name in sorted(entries)], impossible, options)
    write_report(options.json, report, unprinted=("cases", "impossible_pairs"))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
