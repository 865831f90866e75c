"""Automatic batches from start to plan: all ranks measure at once, rank 0 allocates, all ranks get its plan.

``--het-auto-batch DIR`` runs this before Megatron starts.  Files are in ``DIR/auto_batch/``: ``measured.json`` has the
curves and the allocation, ``plan.json`` the plan.  A later start with the same devices, model and batch uses the
stored plan.
"""

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_het.auto_batch.allocation import (
    ZERO_STAGES,
    Curve,
    allocate,
    base_plan,
    extra_words,
    pass_seconds,
    with_zero,
)
from megatron_het.device import SHARING_RANK
from megatron_het.plan import Plan, PlanError, check_plan, load_plan, plan_hash, save_plan
from megatron_het.safe_io import FileError, check_target, one_line, read_json, write_json
from megatron_het.store import StoreError
from megatron_het.store.job import IDENTITY, Exchange, ExchangeError, end_all

# The measuring process of this rank, a child of the process that will train.


_MODULE = "megatron_het.auto_batch.measure"
_TAIL = 30
_POLL_S = 0.1


class MeasuringError(RuntimeError):
    """The measuring process failed or did not answer; the message ends with the last lines of its log."""


class MeasuringProcess:
    """One process for one ZeRO stage; use as a context manager.

    Args:
        request: See ``measure.py``; written beside the log.
        folder: Folder of the request and the log.
        watch: Called while waiting; raises if another rank has failed.
        timeout_s: Bound on the wait for each answer.
    """

    def __init__(self, request: dict[str, Any], folder: Path, watch: Callable[[], None], timeout_s: float) -> None:
        self._watch, self._timeout_s = watch, timeout_s
        name = f"measure-rank-{request['rank']}-zero-{request['zero']}"
        self._log = folder / f"{name}.log"
        request_file = folder / f"{name}.json"
        request_file.write_text(json.dumps(request), encoding="utf-8")
        self._connection, theirs = multiprocessing.Pipe()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_") or k in IDENTITY}
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(request_file), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=environment,
            )

    def __enter__(self) -> "MeasuringProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        """End the process, by force if it does not end by itself."""
        self._connection.close()  # the process ends when its connection is closed
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for the answer."""
        self.tell(**command)
        return self.answer()

    def tell(self, **command: Any) -> None:
        """Send a command; raises MeasuringError if the process has ended."""
        try:
            self._connection.send_bytes(json.dumps(command).encode())
        except OSError:
            raise self._ended() from None

    def answer(self) -> dict[str, Any]:
        """The next answer; raises MeasuringError if none came in time, or the process has ended."""
        end_s = time.monotonic() + self._timeout_s
        while not self._connection.poll(_POLL_S):
            if time.monotonic() > end_s:
                raise MeasuringError(f"no answer after {self._timeout_s:.0f} s\n{self._tail()}")
            self._watch()
        try:
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._ended() from None

    def _ended(self) -> MeasuringError:
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return MeasuringError(f"closed its answers but runs on\n{self._tail()}")
        return MeasuringError(f"ended with exit code {code}\n{self._tail()}")

    def _tail(self) -> str:
        """Returns the end of the log: the last line if that is an error of this project, else the last 30 lines."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        count = 1 if lines and lines[-1].startswith("megatron_het: ") else _TAIL
        return "\n".join([f"--- end of {self._log} ---", *lines[-count:]])


# Name of this rank's device, and its memory for training.


VARIABLE = "HET_MEMORY_LIMIT_BYTES"
"""Artificial limit per rank, for tests on small machines: one number of bytes, or one per local rank with ``;``."""

_CUDA_SHARE = 0.92  # the rest is for NCCL's buffers and fragmentation
_HOST_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Name and memory limit of a rank's device."""

    name: str
    limit_bytes: int  # most bytes of tensors
    is_artificial: bool  # whether the limit is from :data:`VARIABLE`

    def as_json(self) -> dict[str, Any]:
        """Returns JSON values, which identify the device of a stored plan.

        The free memory of a host changes from start to start, so it is 0 here.
        """
        return asdict(self) | ({"limit_bytes": 0} if self.name == "CPU" and not self.is_artificial else {})


def memory_limit() -> MemoryLimit:
    """Finds the memory that this rank may use; raises ValueError if the variable is malformed."""
    from megatron_het import device as platform

    device = platform.activate()
    given = _given(os.environ.get(VARIABLE, ""))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.is_cuda:
        import torch

        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        properties = torch.cuda.get_device_properties(index)
        sharing = -(-ranks // torch.cuda.device_count()) if SHARING_RANK in os.environ else 1
        return MemoryLimit(properties.name, given or int(_CUDA_SHARE * properties.total_memory / sharing), bool(given))
    return MemoryLimit("CPU", given or int(_HOST_SHARE * _available_bytes() / ranks), bool(given))


def _given(value: str) -> int:
    if not value:
        return 0
    entries = value.split(";")
    local_rank = os.environ.get(SHARING_RANK, os.environ.get("LOCAL_RANK", "0"))
    index = int(local_rank) if len(entries) > 1 else 0
    if index >= len(entries) or not entries[index].isdecimal() or not 0 < int(entries[index]) < 1 << 50:
        raise ValueError(f"{VARIABLE} = {value!r}: give one number of bytes, or one per local rank with ; between")
    return int(entries[index])


def _available_bytes() -> int:
    """Available memory of the host; 4 GiB if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 4 << 30


MEASURED_FORMAT = "megatron_het.auto_batch"
_TIMEOUT_S = 900.0  # bound on the wait for another rank, and for one answer
_SEARCH_S = 120.0  # bound on the search for the largest pass; the largest that has fitted by then is used
_CURVE_S = 120.0  # after this, timing ends with the current round on all ranks
_REPETITIONS, _ROUND_S, _MOST_POINTS = 5, 1.0, 7


class _Problem(RuntimeError):
    """No ZeRO stage fits, or ranks have different plans."""


def plan_for(folder: Path, words: Sequence[str], least_zero: int = 0) -> tuple[Plan, str, list[str]]:
    """The plan of this run, the same on all ranks.

    Args:
        folder: The run folder.
        least_zero: The first ZeRO stage to try; with the distributed optimizer it is at least 1.

    Returns:
        The plan, its file, and the command-line words for Megatron.

    Raises:
        PlanError: A flag is missing or cannot be combined with automatic batches.
        SystemExit: Measuring failed on a rank, or nothing fits; every rank prints the reason.
    """
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    base, rest = base_plan(words, world_size)
    exchange: Exchange | None = None
    try:
        exchange = Exchange(rank, world_size, _TIMEOUT_S)
        made = _Maker(
            base=base,
            words=rest,
            folder=folder / "auto_batch",
            rank=rank,
            world_size=world_size,
            exchange=exchange,
            least_zero=least_zero,
        )
        return made.plan()
    except (ExchangeError, FileError, MeasuringError, OSError, StoreError, ValueError, _Problem) as error:
        end_all(exchange, "--het-auto-batch", rank, error)


@dataclass(eq=False)
class _Maker:
    """Makes the plan; runs on every rank."""

    base: Plan  # model and numerics
    words: list[str]  # Megatron's flags
    folder: Path
    rank: int
    world_size: int
    exchange: Exchange
    least_zero: int  # the first ZeRO stage to try

    def __post_init__(self) -> None:
        self._first_zero = max(self.least_zero, int(self.base.training.distributed_optimizer))
        self._limit = memory_limit()
        self._plan_file, self._measured_file = self.folder / "plan.json", self.folder / "measured.json"
        self._pass_s = 0.0

    def plan(self) -> tuple[Plan, str, list[str]]:
        """Use the stored plan, or measure; returns the same as :func:`plan_for`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in (self._plan_file, self._measured_file):
            check_target(file)
        devices = self.exchange.gather("devices", self._limit.as_json())
        # A stored plan is used only if it was made for this model, first ZeRO stage and devices.
        text = json.dumps([plan_hash(self.base), self._first_zero, list(devices)], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        stored = self.exchange.decided("stored", self._stored(key) if self.rank == 0 else None)
        if stored is None:
            stored = self._measured(key, devices)
        plan = Plan.from_json(stored["plan"])  # with the checks of a plan file
        check_plan(plan)
        hashes = self.exchange.gather("agreed", plan_hash(plan))
        if len(set(hashes)) > 1:
            raise _Problem(f"ranks have different plans: {hashes}")
        if self.rank == 0:
            sys.stderr.write(f"megatron_het: {stored['summary']}\n")
        return plan, str(self._plan_file), [*self.words, *extra_words(plan, self.words)]

    def _stored(self, key: str) -> dict[str, Any] | None:
        """Returns the stored plan of an earlier start for the same key, None if there is none (rank 0)."""
        try:
            found = read_json(self._measured_file)
            if found.get("format") != MEASURED_FORMAT or found.get("key") != key:
                return None
            plan = load_plan(self._plan_file)
        except (FileError, PlanError, AttributeError):
            return None
        return {"plan": plan.to_json(), "summary": f"automatic batches of an earlier start: {_summary(plan)}"}

    def _measured(self, key: str, devices: list[Any]) -> dict[str, Any]:
        """Measure at the first ZeRO stage at which one sequence fits everywhere, and allocate."""
        started_s = time.monotonic()
        tried: list[dict[str, Any]] = []
        for zero in ZERO_STAGES[self._first_zero :]:
            curve = self._at_stage(zero, devices, tried)
            if curve is not None:
                break
        else:
            raise _Problem(f"one sequence does not fit at any ZeRO stage: {tried[-1]['problems']}")
        mine = {"sizes": curve.sizes, "seconds": curve.seconds, "communication_s": self._pass_s}
        rows = self.exchange.gather(f"curves/{zero}", mine)
        curves = [Curve(tuple(row["sizes"]), tuple(row["seconds"])) for row in rows]
        names = [device["name"] for device in devices]
        result = None
        if self.rank == 0:
            communication_s = max(row["communication_s"] for row in rows)
            allocation = allocate(curves, self.base.training.global_batch_size, zero, communication_s)
            plan = with_zero(self.base, zero, allocation.passes, names)
            summary = f"automatic batches: {_summary(plan)}; predicted {allocation.iteration_s:.4g} s per iteration"
            found = {
                "format": MEASURED_FORMAT,
                "key": key,
                "zero": zero,
                "devices": devices,
                "curves": rows,
                "passes": allocation.passes,
                "predicted_compute_s": allocation.predicted_s,
                "predicted_iteration_s": allocation.iteration_s,
                "did_not_fit": tried,
                "measured_in_s": round(time.monotonic() - started_s, 1),
            }
            save_plan(plan, self._plan_file)
            write_json(self._measured_file, found)  # last: if it exists, the plan does, too
            result = {"plan": plan.to_json(), "summary": summary}
        return self.exchange.decided("result", result)

    def _at_stage(self, zero: int, devices: list[Any], tried: list[dict[str, Any]]) -> Curve | None:
        """This rank's curve at a ZeRO stage; None if one sequence does not fit on some rank."""
        names = [device["name"] for device in devices]
        plan = with_zero(self.base, zero, [[1]] * self.world_size, names)
        file = self.folder / f"measured-plan-rank-{self.rank}-zero-{zero}.json"
        save_plan(plan, file)
        request = {
            "rank": self.rank,
            "world_size": self.world_size,
            "zero": zero,
            "plan": str(file),
            "words": [*self.words, *extra_words(plan, self.words)],
            "limit_bytes": self._limit.limit_bytes,
            "store": self.exchange.meeting(f"links/{zero}") if zero > 1 else None,
        }
        self._say(
            f"measuring at ZeRO-{zero}: a training starts on every rank, then passes grow for {_SEARCH_S:g} s and "
            f"are timed for {_CURVE_S:g} s at most; its logs are in {self.folder}"
        )
        with MeasuringProcess(request, self.folder, self.exchange.check, _TIMEOUT_S) as process:
            opened = process.answer()
            first = process.ask(do="try", size=1) if opened["open"] else {"fits": False, **opened}
            answers = self.exchange.gather(f"fits/{zero}", first)
            problems = {f"rank {r}": answer["problem"] for r, answer in enumerate(answers) if not answer["fits"]}
            if problems:
                tried.append({"zero": zero, "problems": problems})
                self._say(f"one sequence does not fit at ZeRO-{zero} on {', '.join(problems)}")
                return None
            self._pass_s = pass_seconds(zero, opened["links"], opened["amounts"])
            return self._curve(process, zero, self._largest(process))

    def _largest(self, process: MeasuringProcess) -> int:
        """Sequences of the largest pass that fits, by doubling and then bisection.

        Poplar, algorithm 1, without its first estimate.
        """
        most = self.base.training.global_batch_size - self.world_size + 1  # each other rank has at least one sequence
        end_s = time.monotonic() + _SEARCH_S
        fits, fails = 1, most + 1
        while fits < most and fails == most + 1 and time.monotonic() < end_s:
            size = min(2 * fits, most)
            if self._fits(process, size):
                fits = size
            else:
                fails = size
        while fails - fits > 1 and fails <= most and time.monotonic() < end_s:
            middle = (fits + fails) // 2
            if self._fits(process, middle):
                fits = middle
            else:
                fails = middle
        return fits

    def _fits(self, process: MeasuringProcess, size: int) -> bool:
        """Whether a pass of ``size`` sequences fits on this rank."""
        answer = process.ask(do="try", size=size)
        shown = (
            f"took {answer['seconds']:.3g} s"
            if answer["fits"]
            else f"does not fit ({one_line(answer['problem'], 160)})"
        )
        self._say(f"a pass of {size} sequences {shown} on rank {self.rank}")
        return answer["fits"]

    def _say(self, text: str) -> None:
        """Print a line of progress on rank 0."""
        if self.rank == 0:
            sys.stderr.write(f"megatron_het: automatic batches: {text}\n")

    def _curve(self, process: MeasuringProcess, zero: int, largest: int) -> Curve:
        """Times a few sizes.  All ranks measure at the same time, because devices may share cores, power or buses."""
        first, *between = _points(largest)
        sizes = [first, *between[-1:], *between[:-1]]  # smallest and largest first, in case time runs out
        rounds = max(self.exchange.gather(f"points/{zero}", len(sizes)))
        points: dict[int, list[float]] = {}
        end_s = time.monotonic() + _CURVE_S
        for turn in range(rounds):
            size = sizes[min(turn, len(sizes) - 1)]
            self._say(f"timing passes, round {turn + 1} of {rounds}: {size} sequences on rank {self.rank}")
            process.tell(do="time", size=size, repetitions=_REPETITIONS, seconds=_ROUND_S)
            points.setdefault(size, []).extend(process.answer()["seconds"])
            # The process repeats passes until its next command, so that devices stay busy until all have answered.
            has_time = self.exchange.gather(f"round/{zero}/{turn}", time.monotonic() < end_s)
            if turn and not all(has_time):
                break
        return Curve.of_passes(points)


def _points(largest: int) -> list[int]:
    """Sizes to be timed: powers of two and the largest; with more than seven, the small ones except 1 are left out."""
    sizes = [1 << i for i in range(largest.bit_length()) if 1 << i < largest] + [largest]
    while len(sizes) > _MOST_POINTS:
        sizes.pop(1)
    return sizes


def _summary(plan: Plan) -> str:
    zero = plan.schedule.parameters.get("zero") or int(plan.training.distributed_optimizer)
    sizes = plan.training.sequences
    shown = "; ".join(
        f"rank {r.ranks[0]} ({r.device}): "
        + " ".join(str(sizes(m)) for m in r.microbatches[:8])
        + (f" and {len(r.microbatches) - 8} more" if len(r.microbatches) > 8 else "")
        for r in plan.stages[0].replicas[:8]
    )
    return f"ZeRO-{zero}, passes of {shown}"
