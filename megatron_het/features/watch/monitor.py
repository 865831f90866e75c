"""Comparison on the last rank: from the samples of all ranks to findings, reports and input for ``het-plan replan``."""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatron_het.features.watch.drift import DriftWatch, Finding, Subject
from megatron_het.features.watch.samples import PLACES, Arrived, Board, Hello, Sample
from megatron_het.lowering.programs import costs_of
from megatron_het.plan import Placement, Plan, plan_hash
from megatron_het.safe_io import write_text
from megatron_het.schedule import Costs, Kind, Op, Program
from megatron_het.schedule.kinds import STREAM_IDS, Stream
from megatron_het.schedule.memory import trace_event, trace_name
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.transfers import post_receives_early

# Seconds of transfers, from the times at both ends.
#
# A transfer begins when both ends are posted.  It has ended when a waiting receiver continues.  If the receiver did not
# have to wait, the end is unknown, and the transfer caused no delay.  So the seconds of a transfer are
#
#     end of the wait - max(send posted, receive posted)
#
# which includes no compute of either end.  Ranks of one machine read one clock.  Between machines the clock difference
# is estimated from the transfers, as in NTP: the minimum of (end - send posted) is the link's time plus the difference
# in one direction, and the link's time minus the difference in the other.  This needs no messages, and clocks may
# drift apart.  It gives only the sum of the link's times in both directions, so both directions get the mean.

BLOCKED_S = 50e-6  # shorter waits do not count as waits for the transfer

Edge = tuple[int, int]  # (source, destination), world ranks


class Moved(NamedTuple):
    """The transfers of an edge in one iteration."""

    seconds: float  # median of those for which the receiver waited
    waited_for: float  # their number in the whole iteration, extrapolated from the transfers in the sample


def moved(samples: Mapping[int, Sample], clocks: Mapping[int, str]) -> dict[Edge, Moved]:
    """Transfers of one iteration, by edge; edges without a transfer of known end are left out.

    Args:
        samples: Samples of the same iteration, by rank.
        clocks: Clocks by rank; see :class:`~megatron_het.features.watch.samples.Hello`.
    """
    edges = ((peer, rank) for rank, sample in samples.items() for peer in sample.received if peer in samples)
    pairs: dict[Edge, _Ends] = {}
    for source, target in edges:
        sent, received = samples[source].sent.get(target, ()), samples[target].received[source]
        if received and len(sent) == len(received):  # both samples have the same transfers
            pairs[source, target] = list(zip(sent, received))
    out: dict[Edge, Moved] = {}
    for (source, target), found in pairs.items():
        back = pairs.get((target, source))
        if clocks[source] == clocks[target]:
            times = _times(found, 0.0)
        elif back:
            # Difference of the clocks, receiver minus sender.
            forth_s, back_s = (min(marks[2] - sent for sent, marks in ends) for ends in (found, back))
            ahead_s = (forth_s - back_s) / 2
            both = [_times(found, ahead_s), _times(back, -ahead_s)]
            times = sorted(both[0] + both[1]) if all(both) else []
        else:
            continue
        if times:
            total = samples[target].counts.get(source, len(found))
            out[source, target] = Moved(median(times), min(len(times), len(found)) * total / len(found))
    return out


_Ends = list[tuple[float, Arrived]]  # time at which the send was posted, and the times of the receive


def _times(ends: _Ends, ahead_s: float) -> list[float]:
    """Seconds of the transfers with a known end; ``ahead_s`` is the receiver's clock minus the sender's."""
    return [
        max(0.0, ended - max(sent + ahead_s, posted))
        for sent, (posted, waited, ended) in ends
        if ended - waited >= BLOCKED_S
    ]


FORMAT, VERSION = "megatron_het.watch", 1
WARM_UP = 2  # first iterations that are ignored: caches are cold, and the memory meter may run in the second


def identity(plan: Plan) -> str:
    """The hash of a plan without its options of the watch."""
    kept = {name: value for name, value in plan.schedule.parameters.items() if not name.startswith("watch")}
    return plan_hash(replace(plan, schedule=replace(plan.schedule, parameters=kept)))


@dataclass(frozen=True, slots=True)
class Settings:
    """Window and threshold; see :class:`~megatron_het.features.watch.drift.DriftWatch`."""

    smoothing: int = 5
    threshold: float = 0.15


class Monitor:
    """Compares the ranks' measurements with their plan's prediction.

    Args:
        plan: A plan with the costs of its prediction.
        settings: Window and threshold.
        slices: Number of slices of a sequence, which are sent one by one.
    """

    def __init__(self, plan: Plan, hellos: Sequence[Hello], settings: Settings, slices: int = 1) -> None:
        costs = costs_of(plan)
        assert costs is not None, "without costs there is nothing to compare with"
        self._plan, self._costs, self._settings = plan, costs, settings
        self._placement = Placement(plan)
        self._hellos = {hello.rank: hello for hello in hellos}
        self._clocks = {hello.rank: hello.clock for hello in hellos}
        self._slices = slices
        self._replicas = [(s, q) for s, stage in enumerate(plan.stages) for q in range(len(stage.replicas))]
        self._links: dict[tuple[int, int], Subject] = {}
        devices = [self._device_subject(number) for number in range(len(self._replicas))]
        self._devices = dict(enumerate(devices))
        self.watch = DriftWatch(
            [*devices, *self._link_subjects(costs)], smoothing=settings.smoothing, threshold=settings.threshold
        )
        self.last: dict[str, Any] = {}
        """Figures of the latest iteration: its seconds, and measured over predicted times of devices and links."""
        self._seen = 0
        self._iteration = 0
        self._transfers: dict[tuple[int, int], Moved] = {}

    # -- subjects --------------------------------------------------------------------------------

    def _device_subject(self, number: int) -> Subject:
        stage, q = self._replicas[number]
        replica = self._placement.replica(stage, q)
        first = self._hellos[replica.ranks[0]]
        place = f"stage {stage}, replica {q}, {replica.device or 'device'} on {first.host}"
        return Subject(self._name(number), "device", self._kind(number), first.predicted_s, place)

    def _name(self, number: int) -> str:
        """Text with the ranks of a replica, ``rank 2`` or ``ranks 2 to 3``."""
        ranks = self._placement.replica(*self._replicas[number]).ranks
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"

    def _kind(self, number: int) -> str:
        return self._placement.replica(*self._replicas[number]).device or "device"

    def _link_subjects(self, costs: Costs) -> list[Subject]:
        """One subject per directed pair of devices with a link in the plan's costs."""
        assert self._plan.predicted is not None and self._plan.predicted.costs is not None
        size = costs.message_bytes / self._slices
        for link in self._plan.predicted.costs.links:
            for a, b in link.pairs:
                hosts = [self._hellos[self._placement.replica(*self._replicas[n]).ranks[0]].host for n in (a, b)]
                group = f"{self._kind(a)} -> {self._kind(b)}{' in one machine' if hosts[0] == hosts[1] else ''}"
                predicted = {"transfer": link.latency_s + size / link.bytes_per_s}
                name = f"{self._name(a)} -> {self._name(b)}"
                place = f"{hosts[0]} -> {hosts[1]}"
                self._links[a, b] = Subject(name, "link", group, predicted, place, (self._name(a), self._name(b)))
        return list(self._links.values())

    # -- iterations ------------------------------------------------------------------------------

    def add(self, samples: Mapping[int, Sample]) -> list[Finding]:
        """Add an iteration's samples of all ranks; returns findings that are new or have ended."""
        self._seen += 1
        first = next(iter(samples.values()))
        self._iteration = first.iteration
        iteration_s = max(sample.elapsed_s for sample in samples.values())
        if self._seen <= WARM_UP:
            return []
        devices = {self._name(n): self._replica_seconds(n, samples) for n in self._devices}
        self._transfers = self._link_transfers(moved(samples, self._clocks))
        links = {self._links[edge].name: (one.seconds, one.waited_for) for edge, one in self._transfers.items()}
        findings = self.watch.add(first.iteration, iteration_s, devices, links)
        self.last = self._figures(iteration_s, devices)
        return findings

    def _replica_seconds(self, number: int, samples: Mapping[int, Sample]) -> dict[str, float]:
        """Seconds by operation, of each the slowest rank's of a replica."""
        ranks = self._placement.replica(*self._replicas[number]).ranks
        rows = [samples[rank].measured_s for rank in ranks]
        return {operation: max(row.get(operation, 0.0) for row in rows) for row in rows for operation in row}

    def _link_transfers(self, found: Mapping[Edge, Moved]) -> dict[tuple[int, int], Moved]:
        """Transfers by pair of devices, of each its slowest pair of ranks."""
        out: dict[tuple[int, int], Moved] = {}
        for (source, target), one in found.items():
            edge = self._hellos[source].device, self._hellos[target].device
            if edge in self._links and (edge not in out or one.seconds > out[edge].seconds):
                out[edge] = one
        return out

    def _figures(self, iteration_s: float, devices: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        assert self._plan.predicted is not None
        factors = {}
        for number, subject in self._devices.items():
            expected = sum(subject.predicted_s.values())
            if expected:
                factors[number] = sum(devices[subject.name].values()) / expected
        links = {edge: one.seconds / self._links[edge].predicted_s["transfer"] for edge, one in self._transfers.items()}
        return {
            "iteration_s": iteration_s,
            "predicted_iteration_s": self._plan.predicted.iteration_s,
            "devices": factors,
            "links": links,
        }

    # -- for a better plan -----------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """All measurements and findings as JSON values, for ``het-plan replan``."""
        assert self._plan.predicted is not None
        active = list(self.watch.active.values())
        return {
            "format": FORMAT,
            "version": VERSION,
            "plan_hash": identity(self._plan),
            "iteration": self._iteration,
            "predicted_iteration_s": self._plan.predicted.iteration_s,
            "iteration_s": self.watch.iteration_s,
            "findings": [finding.to_json() for finding in [*self.watch.ended, *active]],
            "devices": [self._device_json(n, subject) for n, subject in self._devices.items()],
            "links": [self._link_json(edge, subject) for edge, subject in self._links.items()],
        }

    def _device_json(self, number: int, subject: Subject) -> dict[str, Any]:
        stage, q = self._replicas[number]
        replica = self._placement.replica(stage, q)
        return {
            "device": number,
            "stage": stage,
            "replica": q,
            "ranks": list(replica.ranks),
            "kind": replica.device,
            "host": self._hellos[replica.ranks[0]].host,
            "operations": _operations_json(subject),
        }

    def _link_json(self, edge: tuple[int, int], subject: Subject) -> dict[str, Any]:
        return {
            "source": edge[0],
            "target": edge[1],
            "message_bytes": self._costs.message_bytes / self._slices,
            **_operations_json(subject).get("transfer", {"predicted_s": subject.predicted_s["transfer"]}),
        }


def _operations_json(subject: Subject) -> dict[str, dict[str, float]]:
    return {
        operation: {
            "predicted_s": subject.predicted_s[operation],
            "measured_s": subject.now_s(operation),
            "reference_s": subject.reference_s.get(operation, subject.now_s(operation)),
        }
        for operation in subject.recent
    }


# One trace (Chrome, Perfetto) with the predicted and the measured iteration in adjacent rows.

MOST_OPERATIONS = 50_000  # largest program that is simulated for a trace, because the rank also trains
_WAITING = 6


def overlay(
    program: Program, costs: Costs, measured: Mapping[int, Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Any]:
    """Returns a Chrome trace.

    Args:
        program: Program of all devices; those without operations are left out.
        costs: Costs of the plan's prediction.
        measured: By device: ``origin_s`` (clock at the start of its iteration), ``clock``, and ``events`` from
            ``samples.events_of``.
        names: Names of the devices.
    """
    events: list[dict[str, Any]] = []
    shown = [d for d, ops in enumerate(program.ops) if ops and d in measured]
    for device in shown:
        for side, title in enumerate(("predicted", "measured")):
            pid = 2 * device + side
            events.append(trace_name("process_name", pid, 0, name=f"{names[device]}, {title}"))
            events.append(trace_name("process_sort_index", pid, 0, sort_index=pid))
    events += _predicted(program, costs, set(shown))
    starts: dict[str, float] = {}
    for device in shown:
        one = measured[device]
        starts[one["clock"]] = min(starts.get(one["clock"], one["origin_s"]), one["origin_s"])
    for device in shown:
        one = measured[device]
        events += _measured(2 * device + 1, one["origin_s"] - starts[one["clock"]], one["events"])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _predicted(program: Program, costs: Costs, shown: set[int]) -> Iterator[dict[str, Any]]:
    if sum(map(len, program.ops)) > MOST_OPERATIONS:
        return
    result = simulate(post_receives_early(program) if costs.host_blocks else program, costs)
    for one in result.events():
        if one.device in shown and one.end_s > one.start_s:
            yield trace_event(str(one.op), 2 * one.device, STREAM_IDS[one.stream], one.start_s, one.end_s)


def _measured(pid: int, shift_s: float, rows: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    yield trace_name("thread_name", pid, _WAITING, name="waiting")
    for name, microbatch, part, chunk, _, start, stop, waited in rows:
        kind = Kind.rows[name]
        begin = shift_s + start + waited
        label = str(Op(kind, microbatch, part, chunk))
        if waited > 0:
            yield trace_event(f"wait for {label}", pid, _WAITING, shift_s + start, begin)
        if kind.stream is Stream.COMPUTE:
            yield trace_event(label, pid, STREAM_IDS[kind.stream], begin, shift_s + stop)


REPORT, TRACE = "watch.json", "watch-trace.json"
WRITTEN_EVERY = 50  # iterations between two reports when nothing changes
MOST_COST = 0.004  # largest share of an iteration's time for reading; if it takes more, iterations are left out
MOST_STRIDE = 4
MOST_SCALARS = 32  # most devices, and most links, with a curve in TensorBoard


@dataclass(eq=False)
class Reader:
    """Reads the samples of a run, and reports findings."""

    plan: Plan  # with predicted costs
    program: Program  # program of this rank's part of the plan, for the trace
    board: Board  # access to the samples
    settings: Settings
    folder: Path | None  # folder of ``watch.json`` and ``watch-trace.json``; None to write neither
    args: Any  # Megatron's arguments

    def __post_init__(self) -> None:
        self._ranks = list(range(self.plan.world_size))
        self._monitor: Monitor | None = None
        self._next: int | None = None
        self._written = 0
        self._stride = 1
        self._wants_trace = True
        self._has_news = False

    def news(self) -> dict[str, Any] | None:
        """Returns :meth:`Monitor.summary` once after a drift has begun; None at other times."""
        if not self._has_news or self._monitor is None or not self._monitor.watch.active:
            return None
        self._has_news = False
        return self._monitor.summary()

    def read(self, newest: int) -> None:
        """Read up to two iterations of samples, none later than ``newest``; does not wait for other ranks."""
        hellos = self.board.read("hello", self._ranks) if self._monitor is None else None
        if hellos is not None:
            slices = self.program.shape.slices
            self._monitor = Monitor(self.plan, [Hello.decode(text) for text in hellos], self.settings, slices)
        if self._monitor is None or newest < 1:
            return
        if self._next is None or newest - self._next >= PLACES - 1:
            self._next = newest  # earlier samples are overwritten, or were not written
        began = time.thread_time()
        for _ in range(2):
            if self._next > newest:
                return
            texts = self.board.read("sample", self._ranks, self._next % PLACES)
            if texts is None:
                return
            samples = [Sample.decode(text) for text in texts]
            if any(sample.iteration < self._next for sample in samples):
                return
            if all(sample.iteration == self._next for sample in samples):
                self._take(dict(zip(self._ranks, samples, strict=True)))
                # Leave out iterations if reading takes too large a share of the time.
                cpu_s, allowed_s = time.thread_time() - began, MOST_COST * samples[0].elapsed_s
                self._stride = min(MOST_STRIDE, max(1, math.ceil(cpu_s / allowed_s))) if allowed_s > 0 else MOST_STRIDE
            self._next += self._stride
            began = time.thread_time()

    def _take(self, samples: dict[int, Sample]) -> None:
        assert self._monitor is not None
        iteration = samples[0].iteration
        changes = self._monitor.add(samples)
        for finding in changes:
            self._say(finding)
        self._to_tensorboard(iteration)
        begun = any(finding.ended is None for finding in changes)
        self._wants_trace, self._has_news = self._wants_trace or begun, self._has_news or begun
        if changes or iteration - self._written >= WRITTEN_EVERY:
            self._write(iteration)
        if self._wants_trace and self.folder is not None:
            self._wants_trace = not self._write_trace(iteration)

    # -- what is found ---------------------------------------------------------------------------

    def _say(self, finding: Finding) -> None:
        assert self._monitor is not None
        if finding.ended is not None:
            text = f"iteration {finding.ended}: over: {finding.text()}"
        else:
            planned = self.plan.predicted.iteration_s if self.plan.predicted is not None else 0.0
            text = (
                f"iteration {finding.found}: {finding.text()}; "
                f"an iteration takes {self._monitor.watch.iteration_s:.3f} s, planned {planned:.3f} s"
            )
            if self.folder is not None:
                text += f"; 'het-plan replan {self.folder}' looks for a better plan"
        print(f"het: watch: {text}", flush=True)  # noqa: T201 - beside Megatron's lines

    def _to_tensorboard(self, iteration: int) -> None:
        from megatron.training.global_vars import get_tensorboard_writer

        writer = get_tensorboard_writer()
        assert self._monitor is not None
        last = self._monitor.last
        if writer is None or not last or iteration % max(1, getattr(self.args, "tensorboard_log_interval", 1)):
            return
        writer.add_scalar("het/iteration-s", last["iteration_s"], iteration)
        writer.add_scalar("het/predicted-iteration-s", last["predicted_iteration_s"], iteration)
        writer.add_scalar("het/findings", len(self._monitor.watch.active), iteration)
        for title, factors in (("device", last["devices"]), ("link", last["links"])):
            if factors:
                writer.add_scalar(f"het/slowest-{title}", max(factors.values()), iteration)
            for key in sorted(factors)[:MOST_SCALARS]:
                name = key if isinstance(key, int) else "-".join(map(str, key))
                writer.add_scalar(f"het/{title}-{name}", factors[key], iteration)

    # -- files -----------------------------------------------------------------------------------

    def _write(self, iteration: int) -> None:
        self._written = iteration
        if self.folder is not None and self._monitor is not None:
            write_text(self.folder / REPORT, json.dumps(self._monitor.summary(), indent=1))

    def _write_trace(self, iteration: int) -> bool:
        """Write the trace of the latest timelines; False if a rank's is missing, of another iteration, or too old."""
        placement = Placement(self.plan)
        shape = self.program.shape
        firsts = {
            shape.device(s, q): replica.ranks[0]
            for s, stage in enumerate(self.plan.stages)
            for q, replica in enumerate(stage.replicas)
            if self.program.ops[shape.device(s, q)]
        }
        texts = self.board.read("timeline", list(firsts.values()))
        if texts is None:
            return False
        told = [json.loads(text) for text in texts]
        if len({one["iteration"] for one in told}) != 1:
            return False
        if self._monitor is not None and self._monitor.watch.active:
            newest = max(finding.since for finding in self._monitor.watch.active.values())
            if told[0]["iteration"] < newest:  # wait for one with the drift in it
                return False
        names = []
        for device in shape.devices:
            replica = placement.replica(device.stage, device.replica)
            names.append(f"stage {device.stage} replica {device.replica} {replica.device}".strip())
        costs = costs_of(self.plan)
        assert costs is not None and self.folder is not None
        trace = overlay(self.program, costs, dict(zip(firsts, told, strict=True)), names)
        write_text(self.folder / TRACE, json.dumps(trace))
        return True

    def close(self) -> None:
        """Write the report at the end of the run."""
        if self._monitor is not None and self._monitor.last:
            self._write(0)
