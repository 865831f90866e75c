"""The time of programs of forwards and backwards only, without building their transfers.

The simulator (``megatron_het.schedule.simulate``) gives the same time for any program, with a timeline and memory.  A
search needs only the time of many plans, most of which are such programs.  The loops are compiled (``pipelines.c``);
without a compiler Python makes the same additions in the same order.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_double, c_int32, c_uint8
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain, repeat
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_het.lowering.programs import Inputs, assemble_compute
from megatron_het.plan import Plan, PlanError
from megatron_het.schedule.cost import Costs, Link
from megatron_het.schedule.generators.listing import ORDERS, Part, Speeds, parts_of
from megatron_het.schedule.generators.one_f_one_b import Ways, ways
from megatron_het.schedule.ir import Kind, Op, Shape

from ..errors import PlannerError
from .candidate import Group, StageTimes

# The search's inner loops in C, compiled when they are first needed; without a compiler Python does the same.
#
# ``pipelines.c`` is compiled with the system's ``cc`` into the user's cache folder, under a name with a digest of the
# source and the command.  A search runs a few loops many times; compiled they take a hundredth of the time.
# Results are equal to the last bit, so that a plan does not depend on whether there is a compiler.
#
# Environment:
#     MEGATRON_HET_COMPILER: the compiler in place of ``cc``; empty for none.
#     XDG_CACHE_HOME: where the cache folder is (default ``~/.cache``).


SOURCE = Path(__file__).with_name("pipelines.c")
COMPILER = "MEGATRON_HET_COMPILER"
FLAGS = ("-O2", "-ffp-contract=off", "-std=c99", "-shared", "-fPIC")
"""No fused multiply-add: it rounds once where Python rounds twice."""
MOST_S = 60  # timeout of the compiler


@cache
def loops() -> ctypes.CDLL | None:
    """The compiled loops; None without a compiler, or where the library cannot be written."""
    compiler = shutil.which(os.environ.get(COMPILER, "cc") or "-")
    if compiler is None:
        return None
    try:
        return _declared(ctypes.CDLL(str(_built(compiler))))
    except (OSError, subprocess.SubprocessError, RuntimeError):  # RuntimeError: a user without a home
        return None


def _built(compiler: str) -> Path:
    """The path of the library, compiled if it does not exist.

    Raises:
        OSError: It cannot be written, or another user could have written it.
        subprocess.SubprocessError: It cannot be compiled.
    """
    key = b"\0".join([SOURCE.read_bytes(), repr(FLAGS).encode(), compiler.encode(), platform.machine().encode()])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_het"
    target = folder / f"pipelines-{hashlib.sha256(key).hexdigest()[:20]}.so"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_own(folder)
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / target.name
            command = [compiler, *FLAGS, "-o", str(made), str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=MOST_S, stdin=subprocess.DEVNULL)
            made.replace(target)  # atomic, also if several searches start at once
    _require_own(target)
    return target


def _require_own(path: Path) -> None:
    """Raises an OSError for a path that another user owns or may write."""
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{path} can be written by others")


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions declared, which ctypes cannot know."""
    ints, doubles, octets = (ctypes.POINTER(kind) for kind in (c_int32, c_double, c_uint8))
    shape: list[Any] = [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ints, ints, ints, ints]
    found.het_merge.argtypes = [*shape, ints, doubles, doubles, ctypes.c_int32, octets, ints]
    found.het_merge.restype = ctypes.c_int
    address, count = ctypes.c_void_p, ctypes.c_int64
    found.het_elapsed.argtypes = [ctypes.c_int32, address, count, count, *[address] * 8]
    found.het_elapsed.restype = ctypes.c_double
    row, real = ctypes.c_char_p, ctypes.c_double  # doubles, or ints, as bytes
    found.het_stages.argtypes = [ctypes.c_int32, row, row, ctypes.c_int32, real, address]
    found.het_stages.restype = ctypes.c_int32
    found.het_loops.argtypes = [ctypes.c_int32, row, row, ctypes.c_int32, doubles]
    found.het_pipeline.argtypes = [ctypes.c_int32, *[row] * 5, real, real, real, ctypes.c_int32, doubles]
    found.het_ends.argtypes = [ctypes.c_int32, row, row, real, row, doubles]
    return found


MOST_STAGES = 256  # the same limit as in ``pipelines.c``


def figures_of(stages: Sequence[StageTimes]) -> bytes:
    """Returns the packed figures of all stages."""
    return b"".join([stage.figures for stage in stages])


def row_of(values: Iterable[float]) -> bytes:
    """Returns numbers packed for the compiled closed form."""
    return array("d", values).tobytes()


MOST_PAIRS = 1 << 20
"""Up to this many pairs of devices, each pair is a link; for more, only the links in use are numbered."""
_NOT_YET = -1.0
_NOBODY = -1
_STUCK = -2.0

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]


def compute_orders(plan: Plan, inputs: Inputs) -> tuple[Shape, tuple[tuple[Op, ...], ...]] | None:
    """Returns the compute operations of all devices; None if the program has other operations. Raises PlannerError."""
    try:
        program = assemble_compute(plan, inputs)
    except PlanError as error:
        raise PlannerError("plan", error.where, plan.schedule.parameters, error.problem, error.hint) from None
    return None if program is None else (program.shape, program.ops)


def can_price(shape: Shape, costs: Costs) -> bool:
    """Whether :func:`makespan_s` gives the simulator's time."""
    return isinstance(costs.link, Wiring) and not (
        costs.host_blocks
        or costs.post_s
        or costs.measured_s
        or costs.parts
        or shape.sizes
        or shape.placement != "loop"
        or len({len(chunks) for chunks in shape.layers}) > 1
    )


def makespan_s(shape: Shape, orders: Sequence[Sequence[Op]], costs: Costs) -> float:
    """End of the last operation or message, with the tail of its device.

    Args:
        orders: Forwards and backwards of every device.

    Raises:
        PlannerError: The operations wait for each other.
    """
    rows = [(op[0] is Kind.BACKWARD, op[1], op[2], op[3]) for order in orders for op in order]
    back, microbatch, piece, chunk = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    device = np.repeat(np.arange(len(orders)), [len(order) for order in orders])
    try:
        return _Timing(shape, range(len(orders)), costs).seconds(device, back, microbatch, piece, chunk)
    except ValueError as error:
        raise PlannerError("plan", "schedule", shape.stages, str(error)) from None


class _Steps(NamedTuple):
    """Operations in the order in which devices run them, device after device, and the messages between them."""

    at: NDArray[np.int32]  # the first operation of every device, and the number of all
    messages: int
    pairs: int
    # waits, sends: by operation, the message that it waits for and the one that it makes, -1 for none
    waits: NDArray[np.int32]
    sends: NDArray[np.int32]
    link: NDArray[np.int32]  # by operation, the link that its message takes, -1 where it stays on the device
    # seconds, wire_s, card_s, latency_s: by operation, its time, how long its message occupies the link, and the
    # device's share of a network, and what the message takes besides
    seconds: Doubles
    wire_s: Doubles
    card_s: Doubles  # 0 where it does not use the network
    latency_s: Doubles
    tails_s: Doubles  # by device, what follows its last operation


def elapsed_s(steps: _Steps, compiled: ctypes.CDLL | None) -> float:
    """End of the last operation or message, with the tail of its device.

    A message waits for the messages before it on its link, and takes the time of its bytes; its latency does not
    occupy the link.  All messages of a link are sent by one device, in the order in which it computes them.  All
    messages of a device share its part of a network: none has arrived before that has sent it and those before it.

    Raises:
        ValueError: The operations wait for each other.
    """
    if compiled is None:
        seconds = _elapsed_s(steps)
    else:
        given = [x.ctypes.data if isinstance(x, np.ndarray) else x for x in steps]
        seconds = compiled.het_elapsed(len(steps.tails_s), *given)
    if seconds < 0:
        raise ValueError("its operations wait for each other") if seconds == _STUCK else MemoryError
    return float(seconds)


def _elapsed_s(steps: _Steps) -> float:
    """Python version of the compiled loop."""
    at, waits, sends, link, tails_s = (x.tolist() for x in (steps.at, *steps[3:6], steps.tails_s))
    seconds, wire_s, card_s, latency_s = (x.tolist() for x in steps[6:10])
    arrived, waiting = [_NOT_YET] * steps.messages, [_NOBODY] * steps.messages
    now, last, sent, following = [0.0] * len(tails_s), [0.0] * len(tails_s), [0.0] * len(tails_s), at[:-1]
    busy = dict[int, float]()
    ready = list(range(len(tails_s)))[::-1]
    while ready:
        d = ready.pop()
        time_s, i = now[d], following[d]
        while i < at[d + 1]:
            if waits[i] >= 0:
                came = arrived[waits[i]]
                if came < 0:
                    waiting[waits[i]] = d
                    break
                if came > time_s:
                    time_s = came
            time_s += seconds[i]
            message = sends[i]
            if message >= 0:
                come = time_s
                if link[i] >= 0:
                    until = busy.get(link[i], 0.0)
                    busy[link[i]] = until = (until if until > time_s else time_s) + wire_s[i]
                    if card_s[i] > 0:
                        sent[d] = (sent[d] if sent[d] > time_s else time_s) + card_s[i]
                        until = until if until > sent[d] else sent[d]
                    come = until + latency_s[i]
                    if come > last[d]:
                        last[d] = come
                arrived[message] = come
                if waiting[message] >= 0:
                    ready.append(waiting[message])
            i += 1
        now[d], following[d] = time_s, i
    if following != at[1:]:
        return _STUCK
    ends = zip(now, last, tails_s, at, at[1:])
    return max([max(t, came) + tail for t, came, tail, first, after in ends if after > first], default=0.0)


End = tuple[Group, tuple[Group, ...]]  # of a link: a group, and all groups of its stage


@dataclass(frozen=True)
class Wiring:
    """Links between replicas, which depend on their kinds and on whether they share a node."""

    groups: Sequence[End]  # for each device, its group of equal replicas, and all groups of its stage
    places: Sequence[object]  # for each device, its node
    # the link between two kinds, and whether within a node, with what all messages of its source share
    between: Callable[[End, End, bool], Link]
    # by device, its stage, where what a device sends to several others of a stage goes one after the other; empty where
    # each has one to send to
    stages: Sequence[int] = ()

    def __call__(self, source: int, target: int) -> Link:
        local = self.places[source] == self.places[target]
        link = self.between(self.groups[source], self.groups[target], local)
        shared = [(f"{name} of {source}", rate) for name, rate in link.shared]
        if not local and self.stages:
            shared.append((f"{source} to {self.stages[target]}", link.bytes_per_s))
        return replace(link, shared=tuple(shared)) if shared else link


class _Timing:
    """Times of the passes of a shape's devices, and of the messages between them.

    Args:
        devices: For each device of the shape, its number in the costs.
    """

    def __init__(self, shape: Shape, devices: Sequence[int], costs: Costs) -> None:
        wiring, self._shape = costs.link, shape
        assert isinstance(wiring, Wiring)  # the caller knows
        self._is_shared = bool(wiring.stages)
        self._stage = np.array([d.stage for d in shape.devices])
        self._runner = np.array(shape.route) + np.array(shape.first_device)[:, None]
        self._passes_s = _passes_s(shape, devices, costs)
        tails = costs.tail_s or (0.0,) * len(wiring.groups)
        self._tails_s = np.array([tails[d] for d in devices])
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys(wiring.groups[d] for d in devices))}
        nodes: dict[object, int] = {}
        self._kind = np.array([kinds[wiring.groups[d]] for d in devices])
        self._node = np.array([nodes.setdefault(wiring.places[d], len(nodes)) for d in devices])
        links = [wiring.between(a, b, local) for local in (False, True) for a in kinds for b in kinds]
        size, table = costs.message_bytes / shape.slices, (2, len(kinds), len(kinds))
        self._wire_s = np.array([size / link.bytes_per_s for link in links]).reshape(table)
        self._card_s = np.array([size / min([rate for _, rate in link.shared], default=inf) for link in links])
        self._card_s = self._card_s.reshape(table)
        self._latency_s = np.array([link.latency_s for link in links]).reshape(table)

    def seconds(
        self, device: Ints, back: Ints, microbatch: Ints, piece: Ints | int = 0, chunk: Ints | int = 0
    ) -> float:
        """Returns the end of the last operation.

        Args:
            device, back, microbatch, piece, chunk: Of every operation, in the order of :class:`_Steps`; ``back`` is 1
                for a backward.

        Raises:
            ValueError: The operations wait for each other.
        """
        shape, count = self._shape, len(self._tails_s)
        each, places = shape.microbatches * shape.slices, shape.stages * len(shape.layers[0])
        place, message = chunk * shape.stages + self._stage[device], microbatch * shape.slices + piece
        to = place + 1 - 2 * back
        is_sent = (to >= 0) & (to < places)
        target = self._runner[to % shape.stages, microbatch]
        price = (self._node[device] == self._node[target]).astype(int), self._kind[device], self._kind[target]
        pair, pairs = device * count + target, count * (count + shape.stages)
        if self._is_shared:
            pair = np.where(price[0] == 1, pair, count * count + device * shape.stages + self._stage[target])
        if pairs > MOST_PAIRS:
            used, pair = np.unique(pair, return_inverse=True)
            pairs = len(used)
        steps = _Steps(
            at=np.concatenate(([0], np.cumsum(np.bincount(device, minlength=count)))).astype(np.int32),
            messages=2 * places * each,
            pairs=pairs,
            waits=_where(place != back * (places - 1), (2 * place + back) * each + message),
            sends=_where(is_sent, (2 * to + back) * each + message),
            link=_where(is_sent & (target != device), pair),
            seconds=self._passes_s[device, back, chunk, piece],
            wire_s=self._wire_s[price],
            card_s=self._card_s[price],
            latency_s=self._latency_s[price],
            tails_s=self._tails_s,
        )
        return elapsed_s(steps, loops())


def _where(there: NDArray[np.bool_], values: Ints) -> NDArray[np.int32]:
    return np.where(there, values, _NOBODY).astype(np.int32)


def _passes_s(shape: Shape, devices: Sequence[int], costs: Costs) -> Doubles:
    """Seconds by device, direction, chunk and slice; equal devices share theirs."""
    known: dict[object, Any] = {}
    shares = [(piece + costs.diagonal) / costs.attention_total(shape.slices) for piece in range(shape.slices)]
    tables = (costs.forward_s, costs.attention_forward_s), (costs.backward_s, costs.attention_backward_s)
    out = []
    for d in devices:
        rows = tuple((whole[d], slices[d] if slices else ()) for whole, slices in tables)
        if rows not in known:
            known[rows] = [
                [tuple(s / len(shares) + a * share + costs.operation_s for share in shares) for s, a in both]
                for both in (zip(whole, mine or repeat(0.0)) for whole, mine in rows)
            ]
        out.append(known[rows])
    return np.array(out)


class Pipelines:
    """Plain 1F1B pipelines, prepared for timing in any order and with any number of microbatches in flight."""

    def __init__(self, compiled: ctypes.CDLL, shape: Shape, speeds: Sequence[float], costs: Costs) -> None:
        self._parts = [
            _Part(compiled, part, [speeds[d] for d in part.devices], costs)
            for part in _different(shape, parts_of(shape), speeds, costs)
        ]

    def seconds(self, parameters: Mapping[str, Any]) -> float:
        """Returns the seconds of the iteration; raises PlannerError where the schedule cannot run this shape."""
        try:
            return max([part.seconds(parameters) for part in self._parts])
        except ValueError as error:
            raise PlannerError("plan", "schedule.parameters", parameters, str(error)) from None


def pipelines_of(schedule: str, shape: Shape, speeds: Sequence[float], costs: Costs) -> Pipelines | None:
    """The pipelines; None for other schedules, for costs that the loops do not support, and without a compiler."""
    plain = schedule == "1f1b" and shape.slices == 1 and all(len(chunks) == 1 for chunks in shape.layers)
    compiled = loops() if plain and can_price(shape, costs) else None
    return None if compiled is None else Pipelines(compiled, shape, speeds, costs)


def pipelines_s(
    schedule: str, shape: Shape, speeds: Sequence[float], costs: Costs, parameters: Mapping[str, Any]
) -> float | None:
    """Seconds of the iteration; None where :func:`pipelines_of` returns None. Raises PlannerError."""
    found = pipelines_of(schedule, shape, speeds, costs)
    return None if found is None else found.seconds(parameters)


def _different(shape: Shape, parts: list[Part], speeds: Sequence[float], costs: Costs) -> list[Part]:
    """One part of each set of parts that are equal in shape, speeds, kinds and sharing of nodes."""
    if len(parts) == 1:
        return parts
    wiring = costs.link
    assert isinstance(wiring, Wiring)  # the caller knows
    tails = costs.tail_s or (0.0,) * len(shape.devices)
    known: dict[object, Part] = {}
    for part in parts:
        nodes: dict[object, int] = {}
        kinds = [
            (
                speeds[d],
                wiring.groups[d],
                nodes.setdefault(wiring.places[d], len(nodes)),
                costs.forward_s[d],
                costs.backward_s[d],
                tails[d],
            )
            for d in part.devices
        ]
        known.setdefault((part.shape, tuple(kinds)), part)
    return list(known.values())


class _Part:
    """One part of the pipelines, in the form that the compiled loops need."""

    def __init__(self, compiled: ctypes.CDLL, part: Part, speeds: Sequence[float], costs: Costs) -> None:
        self._shape, self._speeds, self._layout = part.shape, speeds, _Layout(compiled, part.shape)
        self._timing = _Timing(part.shape, part.devices, costs)
        self._mine = np.array(self._layout.mine, dtype=np.int64)
        self._device = np.repeat(np.arange(len(part.devices)), 2 * np.diff(self._layout.at))

    def seconds(self, parameters: Mapping[str, Any]) -> float:
        orders = ways(self._shape, self._speeds, decide=self._layout.merge, **parameters)
        back = np.frombuffer(b"".join(map(bytes, orders)), dtype=np.uint8).astype(np.int64)
        microbatch = np.empty_like(back)
        microbatch[back == 0] = microbatch[back == 1] = self._mine  # both kinds run in ascending order
        return self._timing.seconds(self._device, back, microbatch)


class _Layout:
    """A shape in the form that the compiled loops need."""

    def __init__(self, compiled: ctypes.CDLL, shape: Shape) -> None:
        self._compiled = compiled
        count = len(shape.devices)
        mine = [shape.microbatches_of(d) for d in range(count)]
        self.at = [0, *accumulate(map(len, mine))]
        self.mine = list(chain.from_iterable(mine))
        runner = np.array(shape.route, dtype=np.int32) + np.array(shape.first_device, dtype=np.int32)[:, None]
        self.arguments = (
            count,
            shape.stages,
            shape.microbatches,
            _ints([d.stage for d in shape.devices]),
            _ints(runner.ravel()),
            _ints(self.mine),
            _ints(self.at),
        )

    def merge(self, shape: Shape, limits: Sequence[int], times: Speeds, order: str) -> Ways:
        """Returns the result of ``one_f_one_b.merged``; shorter than a device's work where it would deadlock."""
        out, done = (c_uint8 * (2 * self.at[-1]))(), (c_int32 * len(limits))()
        # Nobody has more in flight than there are microbatches.
        most = [min(n, shape.microbatches) for n in limits]
        passes = [_doubles(list(chain.from_iterable(rows))) for rows in (times.forward_s, times.backward_s)]
        if self._compiled.het_merge(*self.arguments, _ints(most), *passes, ORDERS.index(order), out, done):
            raise MemoryError
        found = bytes(out)
        return [found[2 * at : 2 * at + n] for at, n in zip(self.at, done)]


def _ints(values: Sequence[int] | NDArray[np.int32]) -> ctypes.Array[c_int32]:
    return (c_int32 * len(values)).from_buffer(np.array(values, dtype=np.int32)) if len(values) else (c_int32 * 0)()


def _doubles(values: Sequence[float]) -> ctypes.Array[c_double]:
    return (c_double * len(values)).from_buffer(array("d", values)) if values else (c_double * 0)()
