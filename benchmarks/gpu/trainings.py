"""Compares plans of 2 to 4 ranks on one GPU over NCCL with stock Megatron in one process.

``python -m benchmarks.gpu.trainings --json OUT``: the smallest plan of every schedule, of what is offloaded, split or
exchanged, and of models with experts and with latent attention (``benchmarks.combinations`` and ``benchmarks.models``
have all of them); with ``--cuda-graphs`` plans whose layers are captured (with ``HET_TRY_GRAPHS=1`` what is refused
too), with ``--fp8`` plans that train in fp8, each against one process with the same recipe.  Layers are Megatron's own
in fp32, with ``--te`` those of Transformer Engine in bf16.  Bounds are ``testing.compare.BOUNDS``.  ``failures`` counts
cases that exceeded them, ended with an error or did not run in time; the file is written after every case.
``--dry`` shows the cases, which needs no GPU.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, scratch
from benchmarks.models import case_for
from benchmarks.parity import measure, with_precision
from megatron_het.features.layer_graphs.spec import TRY
from megatron_het.safe_io import amount, check_target, write_json
from testing.cases import Case
from testing.combination_cases import PARAMETERS, Feature, case_of, pair_row, title
from testing.compare import BOUNDS, failures
from testing.families import WIDE, printed
from testing.feature_cases import with_expert_parallel
from testing.runner import Device, has_gpu, words

_LIMIT_S, _CASE_S, _AT_ONCE, _MAX_RANKS = 200.0, 60.0, 7, 4
_SERVICE_S = 20.0
_FEATURES: tuple[tuple[Feature, ...], ...] = (
    *((("schedule", schedule),) for schedule in PARAMETERS["schedule"]),
    (("context_exchange", True),),
    (("schedule", "slimpipe"), ("vocabulary", True)),
    (("schedule", "slimpipe"), ("cp", 2)),
    (("window", "exact"), ("offload_activations", 0.75), ("recompute", "full")),
    (("window", "ZeRO-3"),),
    (("tp", "by stage"), ("sequence_parallel", True)),
    (("overlap", "gradients and parameters"),),
    (("schedule", "zb-h1"), ("overlap", "gradients and parameters")),
)
_LEAST = 0.01
"""Least relative difference between gradients in fp8 and in bf16: a value in fp8 has a mantissa of 3 bits."""
_MODELS = ("mixtral", "deepseek_v3")  # families with experts, and with experts and latent attention
_GRAPHS: tuple[tuple[Feature, str, str], ...] = (
    (("schedule", "1f1b"), "transformer_engine", ""),
    (("schedule", "zb-v"), "transformer_engine", ""),
    (("schedule", "interleaved"), "transformer_engine", ""),
    (("schedule", "interleaved"), "transformer_engine", "attn"),
    (("schedule", "slimpipe"), "transformer_engine", "mlp"),
    (("overlap", "gradients and parameters"), "transformer_engine", ""),
    (("schedule", "interleaved"), "local", ""),
)
"""Plans with CUDA graphs: a feature, the implementation that captures, and the part of a layer; refused ones last."""
_ADMITTED_GRAPHS = 3


def cases(has_te: bool) -> list[Case]:
    """Returns the cases to train, the most important ones first.

    Args:
        has_te: Whether layers are those of Transformer Engine.
    """
    found = [case_of(pair_row(chosen), " and ".join(map(title, chosen)), 0) for chosen in _FEATURES]
    staged = next(case for case in found if case.plan.schedule.name == "slimpipe")
    found.append(replace(staged, name="slimpipe staged", transport="staged"))
    window = case_of(pair_row([("window", "exact")]), "ministage and offload", 0)
    parameters = {**window.plan.schedule.parameters, "offload": True, "offload_optimizer": True}
    plan = replace(window.plan, schedule=replace(window.plan.schedule, parameters=parameters))
    found.append(replace(window, plan=plan))
    for family in _MODELS:
        for schedule in ("1f1b", "slimpipe"):
            case = case_for(family, pair_row([("schedule", schedule)]), f"{family} {schedule}", 0)
            # Slices round differently in bf16, and one token with another expert is 0.12 of that expert's gradient.
            found.append(replace(case, extra=_every_expert(family) if has_te and schedule == "slimpipe" else ()))
    shared = case_for(_MODELS[0], pair_row([("window", "exact")]), f"{_MODELS[0]} over replicas in a window", 0)
    sizes = [[len(stage.replicas)] * len(stage.replicas) for stage in shared.plan.stages]
    found.append(replace(shared, plan=with_expert_parallel(shared.plan, sizes)))
    found = [replace(case, name=case.name.replace(" ", "-").replace(":", "")) for case in found]
    assert all(2 <= case.plan.world_size <= _MAX_RANKS for case in found)
    return with_precision(found, "bf16") if has_te else found


def _every_expert(family: str) -> tuple[str, ...]:
    """Returns flags with which every token goes to all experts."""
    flags = printed(family, "small")
    pairs = {"--moe-router-topk": "--num-experts", "--moe-router-group-topk": "--moe-router-num-groups"}
    return tuple(w for to, of in pairs.items() if of in flags for w in (to, flags[flags.index(of) + 1]))


_TENSORWISE = words("--fp8-format hybrid --fp8-recipe tensorwise")
_BLOCKWISE = words("--fp8-format e4m3 --fp8-recipe blockwise")
_DELAYED = words("--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16")
_ENDS_IN_BF16 = words("--first-last-layers-bf16 --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 1")
_WHOLE, _CUT, _YARDSTICK = "fp8", "fp8 of cut tensors", "fp8 against bf16"
_MIXED: tuple[Feature, ...] = (("tp", "by stage"), ("routing", "uneven"))  # TP 2, then two replicas
# Name, features, recipe, and whether plan and reference quantise the same tensors.
_FP8: tuple[tuple[str, tuple[Feature, ...], tuple[str, ...], str], ...] = (
    ("1f1b", (("schedule", "1f1b"),), _TENSORWISE, _WHOLE),
    ("slimpipe", (("schedule", "slimpipe"),), _TENSORWISE, _CUT),
    ("interleaved, ends in bf16", (("schedule", "interleaved"),), (*_TENSORWISE, *_ENDS_IN_BF16), _WHOLE),
    ("zb-v", (("schedule", "zb-v"),), _TENSORWISE, _WHOLE),
    ("window, offload and recompute", (("window", "exact"), ("recompute", "full")), _TENSORWISE, _WHOLE),
    ("ZeRO-3", (("window", "ZeRO-3"),), _TENSORWISE, _WHOLE),
    ("mixed TP, weights kept", (*_MIXED, ("distributed_optimizer", True)), _TENSORWISE, _CUT),
    ("slimpipe, blockwise", (("schedule", "slimpipe"),), _BLOCKWISE, _WHOLE),
    ("TP, delayed", (("tp", "by stage"), ("sequence_parallel", True)), _DELAYED, _CUT),
)


def fp8_cases() -> list[Case]:
    """Returns the cases in fp8, with sizes that fp8 products accept in every slice and on every TP rank."""
    found = []
    for name, chosen, flags, precision in _FP8:
        case = case_of(pair_row(chosen), f"fp8 {name}", 0)
        if "offload" in name:
            parameters = {**case.plan.schedule.parameters, "offload": True}
            case = replace(case, plan=replace(case.plan, schedule=replace(case.plan.schedule, parameters=parameters)))
        if "kept" in name:  # from a checkpoint: main parameters begin with what is left of it in fp8
            case = replace(case, own=(*case.own, "--fp8-param-gather"))
        model = replace(case.plan.model, hidden_size=256, ffn_hidden_size=512, seq_length=512)  # the family's
        plan = replace(case.plan, model=model, training=replace(case.plan.training, precision="bf16"))
        made = {**case.chosen, "precision": precision}
        found.append(replace(case, plan=plan, family=WIDE, chosen=made, extra=flags))
    # Distance of fp8 from bf16 in this model: if nothing were computed in fp8, it would be 0.
    own = replace(found[0], name="fp8 against bf16", extra=(), own=_TENSORWISE)
    found.insert(1, replace(own, chosen={**own.chosen, "precision": _YARDSTICK}))
    return [replace(case, name=re.sub("[, ]+", "-", case.name)) for case in found]


def graph_cases(with_refused: bool = False) -> list[Case]:
    """Returns plans with CUDA graphs of layers, against a process without; capture is after three of ten steps."""
    found = []
    for feature, kind, part in _GRAPHS if with_refused else _GRAPHS[:_ADMITTED_GRAPHS]:
        flags = ("--cuda-graph-impl", kind, *(("--cuda-graph-modules", part) if part else ()))
        name = "-".join(("graphs", kind, part or "layers", title(feature).replace(" ", "-").replace(":", "")))
        case = case_of(pair_row([feature]), name, 0)
        found.append(replace(case, own=(*case.own, *flags)))
    return with_precision(found, "bf16")


def train(chosen: Sequence[Case], out: Path, has_te: bool, deadline_s: float) -> dict[str, Any]:
    """Train all cases; those that have not run by the deadline of ``time.monotonic()`` count as failures."""
    entries: list[dict[str, Any]] = []
    device: Device = "cuda" if has_gpu() else "cpu"
    lock = threading.Lock()

    def report() -> dict[str, Any]:
        ran = {entry["name"] for entry in entries}
        missing = [case.name for case in chosen if case.name not in ran]
        in_fp8 = [entry for entry in entries if entry["chosen"]["precision"] == _YARDSTICK]
        alike = [e["name"] for e in in_fp8 if e.get("relative_gradient_difference", 1.0) < _LEAST]  # to one in bf16
        bad = failures(entries, device) + alike
        return {
            "failures": len(bad) + len(missing),
            "failed": bad,
            "not_run": missing,
            "bounds": BOUNDS[device],
            "machine": machine(),
            "cases": entries,
        }

    def keep(entry: dict[str, Any]) -> None:
        with lock:
            entries.append(entry)
            write_json(out, report())

    write_json(out, report())
    limit_s = min(_CASE_S, max(1.0, deadline_s - time.monotonic()))

    def measure_group(number: int, members: list[Case]) -> None:
        at_once = max(1, round(_AT_ONCE * len(members) / len(chosen)))
        own = folder / str(number)
        measure(members, own, at_once, device, has_te=has_te, limit_s=limit_s, on_entry=keep)

    # Cases wait for their reference: those of other references run beside them, with a rank server of their own.
    groups = groupby(sorted(chosen, key=_reference_key), key=_reference_key)
    with scratch("gpu-trainings-") as folder:
        with shared_gpu(folder) if device == "cuda" else contextlib.nullcontext(), ThreadPoolExecutor() as pool:
            started = [pool.submit(measure_group, i, list(members)) for i, (_, members) in enumerate(groups)]
        for one in started:
            one.result()
    return report()


@contextlib.contextmanager
def shared_gpu(folder: Path) -> Iterator[None]:
    """Run CUDA's multi-process service for processes that start meanwhile; do nothing if it is not installed.

    Without the service the processes on a GPU take turns, and every transfer between two of them waits for both.

    Args:
        folder: For its sockets and logs.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log")}
    with contextlib.ExitStack() as stack:
        if control is not None:
            for path in own.values():
                Path(path).mkdir(parents=True)
            outer = {name: os.environ.get(name) for name in own}
            stack.callback(_set_environment, outer)
            _set_environment(own)
            begun = subprocess.run([control, "-d"], timeout=_SERVICE_S, check=False, capture_output=True)
            if begun.returncode == 0:
                stack.callback(_end_service, control)
            else:
                _set_environment(outer)
        yield


def _end_service(control: str) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([control], input=b"quit -t 5\n", timeout=_SERVICE_S, check=False, capture_output=True)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _reference_key(case: Case) -> str:
    return repr((case.reference, "ministages" in case.chosen))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 where a case failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.trainings", description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--te", action="store_true", help="layers of Transformer Engine, in bf16")
    parser.add_argument("--fp8", action="store_true", help="these layers in fp8")
    parser.add_argument("--cuda-graphs", action="store_true", help="CUDA graphs of layers of Transformer Engine")
    parser.add_argument("--only", metavar="REGEX", help="cases whose name contains it")
    parser.add_argument("--dry", action="store_true", help="show the cases and train nothing")
    parser.add_argument("--limit-s", type=amount(1, 3600), default=_LIMIT_S, help="of all (default: %(default)g)")
    options = parser.parse_args(argv)
    try:
        graphs = graph_cases(os.environ.get(TRY) == "1") if options.cuda_graphs else None
        found = fp8_cases() if options.fp8 else graphs or cases(options.te)
        chosen = [case for case in found if re.search(options.only or "", case.name)]
    except re.error as error:
        parser.error(f"argument --only: {options.only!r} is no regular expression: {error}")
    if not chosen:
        parser.error(f"argument --only: no case has {options.only!r} in its name; --dry shows them")
    if options.dry:
        for case in chosen:
            print(f"{case.name:55} {case.plan.world_size} ranks {case.plan.training.precision}")
        return 0
    if options.json is None or not has_gpu():
        parser.error("--json is required" if options.json is None else "there is no NVIDIA GPU here; --dry needs none")
    check_target(options.json)
    has_te = options.te or options.fp8 or options.cuda_graphs
    report = train(chosen, options.json, has_te, time.monotonic() + options.limit_s)
    print(f"{report['failures']} of {len(chosen)} failed: {[*report['failed'], *report['not_run']]}")
    return int(report["failures"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
