"""How fast every device is: compared with its kind, and with the profile that the plan was made from.

All ranks measure at the same time, as the profile did and as the training does, so that what devices share (a
core, a PCIe switch, power) counts.
"""

from __future__ import annotations

import logging
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from megatron_het.doctor.check import Answers, Check, Finding, Names, Seat
from megatron_het.doctor.expectations import LayerExpectation, LayerModel
from megatron_het.doctor.throttling import Throttling
from megatron_het.doctor.words import amount, duration
from megatron_het.planner_package import planner

_WINDOW_S, _WINDOWS = 0.3, 3
_MOST_TOKENS = 8192
_MOST_PASS_S = 1.5
_BARRIER_S = 5.0
_GEMM = 1024
_LIBRARY = re.compile(r"\.so\b|load.*librar|librar.*load", re.IGNORECASE)
_LONGEST = 300


@dataclass
class Devices(Check):
    """Times of one transformer layer and of a matrix product on every device.

    Attributes:
        slow_ratio: A device that takes this many times as long as its kind, or as the profile says, is a fault.
    """

    slow_ratio: float = 1.25
    name: str = field(default="devices", init=False)
    limit_s: float = field(default=45.0, init=False)

    def measure(self, seat: Seat) -> dict[str, Any]:
        """Seconds of a layer and of a GEMM; what throttled the device meanwhile."""
        from megatron_het.device import activate

        platform = activate()
        index = None
        if platform.is_cuda:
            import torch

            index = seat.local_rank % torch.cuda.device_count()
            torch.cuda.set_device(index)
        throttling = Throttling(index)
        barrier = _Barrier(seat)
        gemm_s = gemm_seconds(seat.plan.training.precision, platform, barrier)
        answer: dict[str, Any] = {"gemm_s": gemm_s, "point": None, "layer_s": None, "note": "", "unloaded": ""}
        expected = seat.expectations.layer(seat.kind)
        model, point = operating_point(seat, expected)
        if 3 * point["flops"] / (2 * _GEMM**3 / gemm_s) > _MOST_PASS_S:
            answer["note"] = "a layer of the model takes too long here to be timed"
        else:
            try:
                answer |= {"point": point, **_layer(model, point, barrier)}
            except (ImportError, OSError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and not _LIBRARY.search(str(error)):
                    raise
                answer |= {"note": "no layer was timed", "unloaded": " ".join(str(error).split())[:_LONGEST]}
        again_s = gemm_seconds(seat.plan.training.precision, platform, barrier)
        answer |= {"spread": max(again_s, gemm_s) / min(again_s, gemm_s), "load": os.getloadavg()[0]}
        answer["cores"] = os.cpu_count() or 1
        if expected is not None and point["measured_as"] == "the profile":
            answer["expected_s"] = expected.forward_s + expected.backward_s
        return answer | {"throttling": throttling.found(), "state": throttling.state}

    def judge(self, answers: Answers, names: Names) -> list[Finding]:
        """Slow devices by kind, and what throttled."""
        found = []
        for judged, kind in ((self.fault, "faults"), (self.warning, "warnings")):
            for reason, ranks in _by_reason(answers, kind).items():
                found.append(
                    judged(names.of(ranks), f"slowed down by {reason}", "Times measured meanwhile are too long")
                )
        lacking: dict[str, list[int]] = {}
        for rank, answer in answers.items():
            if answer["unloaded"]:
                lacking.setdefault(answer["unloaded"], []).append(rank)
        for error, ranks in lacking.items():
            text = f"a library that a layer needs cannot be loaded: {error}"
            found.append(self.fault(names.of(ranks), text, "Install it there, or correct LD_LIBRARY_PATH"))
        kinds: dict[str, dict[int, dict[str, Any]]] = {}
        for rank, answer in answers.items():
            kinds.setdefault(names.kind(rank) or "device", {})[rank] = answer
        for kind, members in kinds.items():
            found += self._judge_kind(kind, members, names)
        return found

    def _judge_kind(self, kind: str, members: dict[int, dict[str, Any]], names: Names) -> list[Finding]:
        what = "layer_s" if all(a["layer_s"] for a in members.values()) else "gemm_s"
        task = "a layer" if what == "layer_s" else f"a GEMM of {_GEMM}"
        times = {rank: a[what] for rank, a in members.items()}
        # Of two devices the faster one is the measure: hence the lower median.
        usual = sorted(times.values())[(len(times) - 1) // 2]
        found = []
        doubt = _doubt(members)
        spread = max(a["spread"] for a in members.values())
        for rank, seconds in times.items():
            if seconds > self.slow_ratio * usual:
                text = (
                    f"{task} takes {duration(seconds)}, {seconds / usual:.2f} times the {duration(usual)} of its kind"
                )
                if seconds > self.slow_ratio * spread * usual:
                    found.append(self.fault(names.of([rank]), f"{kind}: {text}", "A slow device slows all others down"))
                else:
                    found.append(self.warning(names.of([rank]), f"{kind}: {text}", doubt))
        text = f"{kind}: {task} takes {duration(usual)}"
        expected = next((a["expected_s"] for a in members.values() if "expected_s" in a), None)
        if what == "gemm_s" or expected is None:
            note = next((a["note"] for a in members.values() if a["note"]), "")
            more = f" ({note})" if note else ""
            return [*found, self.ok(names.of(times), f"{text}{more}, {_speed(members)}")]
        text += f", {usual / expected:.2f} times the {duration(expected)} of the profile"
        if self.slow_ratio * expected < usual <= self.slow_ratio * spread * expected:
            found.append(self.warning(names.of(times), text, doubt))
        elif usual > self.slow_ratio * expected:
            found.append(self.fault(names.of(times), text, "The plan counts on faster devices; profile and plan again"))
        elif usual * self.slow_ratio < expected:
            found.append(self.warning(names.of(times), text, "The profile is of slower devices; profile again"))
        else:
            found.append(self.ok(names.of(times), text))
        return found


def _by_reason(answers: Answers, kind: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, answer in answers.items():
        for reason in answer["throttling"][kind]:
            found.setdefault(reason, []).append(rank)
    return found


def _doubt(members: dict[int, dict[str, Any]]) -> str:
    """Why figures of a busy machine say little."""
    worst = max(members.values(), key=lambda answer: answer["spread"])
    return (
        f"The figure is not to be trusted: repeats differ by a factor of {worst['spread']:.1f}, at a load of "
        f"{worst['load']:.1f} on {worst['cores']} cores. Repeat it on an idle machine"
    )


def _speed(members: dict[int, dict[str, Any]]) -> str:
    """Returns what the GEMM says of the devices of one kind."""
    return amount(2 * _GEMM**3 / statistics.median(a["gemm_s"] for a in members.values()), "FLOP/s") + " in a GEMM"


def operating_point(seat: Seat, expected: LayerExpectation | None) -> tuple[LayerModel, dict[str, Any]]:
    """Returns what to time: the profile's point, or the plan's layer without tensor parallelism."""
    model, plan = seat.expectations.model, seat.plan
    if expected is None or model is None:
        shape = plan.model
        ffn = shape.ffn_hidden_size or 4 * shape.hidden_size
        tokens = min(shape.seq_length, _MOST_TOKENS)
        model = LayerModel(
            shape.hidden_size,
            ffn,
            shape.num_attention_heads,
            shape.num_query_groups,
            128,
            tokens,
            plan.training.precision,
        )
        point: dict[str, Any] = {
            "batch": plan.training.micro_batch_size,
            "tokens": tokens,
            "recompute": "none",
            "measured_as": "plan",
        }
    else:
        point = {
            "batch": expected.micro_batch_size,
            "tokens": expected.tokens,
            "recompute": expected.recompute,
            "measured_as": "the profile",
        }
    s, h, groups = point["tokens"], model.hidden_size, model.num_query_groups / model.num_attention_heads
    point["flops"] = 2 * s * point["batch"] * h * (2 * h * (1 + groups) + 3 * model.ffn_hidden_size + s)
    return model, point


def _layer(model: LayerModel, point: dict[str, Any], barrier: Callable[[], None]) -> dict[str, Any]:
    """Seconds of forward and backward of one layer, with the planner's own measurement."""
    import torch.distributed as dist

    from megatron_het import megatron_patches as upstream

    upstream.install("stock")
    layers, settings, schema = planner("profile.layers"), planner("profile.settings"), planner("inputs.profile_schema")
    import torch

    torch.set_float32_matmul_precision("high" if model.precision == "tf32" else "highest")
    run = settings.ProfileSettings(
        model=schema.ProfiledModel(**asdict(model)), out="", kinds=("",), window_s=_WINDOW_S, windows=_WINDOWS
    )
    where = settings.Point("layer", point["batch"], 1, point["tokens"], point["recompute"])
    # A world of this rank alone: a layer without tensor parallelism talks to nobody.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    logging.disable(logging.WARNING)  # Megatron tells of every parameter
    try:
        timing = _measured_alone(layers, run, where, barrier)
    finally:
        logging.disable(logging.NOTSET)
        dist.destroy_process_group()
    return {"layer_s": timing.forward_s + timing.backward_s, "forward_s": timing.forward_s}


def _measured_alone(layers: Any, run: Any, where: Any, barrier: Callable[[], None]) -> Any:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    try:
        model_parallel_cuda_manual_seed(1234)
        return layers.measure(run, where, barrier)
    finally:
        parallel_state.destroy_model_parallel()


def gemm_seconds(precision: str, platform: Any, barrier: Callable[[], None], repeats: int = 9) -> float:
    """Median seconds of a square matrix product in the plan's precision."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    if not platform.is_cuda:
        dtype = torch.float32  # half precision is not what a CPU is judged by
    a, b = (torch.randn(_GEMM, _GEMM, device=platform.device).to(dtype) for _ in range(2))
    barrier()
    times = []
    for _ in range(repeats + 2):
        platform.synchronize()
        start_s = time.perf_counter()
        a @ b
        platform.synchronize()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[2:])


class _Barrier:
    """All ranks of the check, over the store; gives up after a bound, because a measurement is better than none."""

    def __init__(self, seat: Seat) -> None:
        self._store, self._size, self._turn = seat.store, len(seat.hosts), 0

    def __call__(self) -> None:
        self._turn += 1
        key, deadline_s = f"barrier/{self._turn}", time.monotonic() + _BARRIER_S
        if self._store.add(key, 1) >= self._size:
            self._store.set(f"{key}/open", "1")
        while not self._store.check([f"{key}/open"]) and time.monotonic() < deadline_s:
            time.sleep(0.005)
