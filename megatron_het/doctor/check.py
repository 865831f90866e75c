"""Interface of the doctor's checks: a measurement on every rank, a judgement on rank 0, and expected figures."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatron_het.plan import Placement, Plan, PlanError
from megatron_het.plan.placement import joined
from megatron_het.plan.schema import read_record
from megatron_het.safe_io import FileError, read_json
from megatron_het.store import Documents

# Figures in words.

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def amount(number: float, unit: str = "B") -> str:
    """``12.5 GB``."""
    for size, prefix in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def rate(bytes_per_s: float) -> str:
    """``12.5 GB/s``."""
    return amount(bytes_per_s) + "/s"


def duration(seconds: float) -> str:
    """``35 us``, ``2.1 ms``, ``3.4 s``."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


Answers = Mapping[int, dict[str, Any]]  # a check's measurements by rank, without ranks that failed


class Status(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "FAULT"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table."""

    check: str  # name of the check
    status: Status  # ``FAULT`` and ``not run`` make the verdict bad
    where: str  # ranks, with their hosts
    what: str  # what was found, with figures
    hint: str = ""

    def to_json(self) -> dict[str, str]:
        """For the JSON report."""
        return {name: str(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Seat:
    """Inputs of a check on a rank."""

    # rank, local_rank: this rank, in the job and on its host
    rank: int
    local_rank: int
    hosts: tuple[str, ...]  # host name of every rank
    plan: Plan
    flags: tuple[str, ...] | None  # the training's flags, with ``--het-*``; None when they were not given
    expectations: "Expectations"  # expected figures from cluster file and profile
    store: Documents  # part of the job's store for this check alone
    folder: Path  # this rank's folder for logs
    transport: str = "auto"  # ``--het-transport``

    @property
    def kind(self) -> str:
        """The kind of device that the plan gives this rank."""
        return kind_of(Placement(self.plan), self.rank)

    def platform(self) -> Any:
        """The platform of this rank's process, which computes on the rank's device from here on."""
        import torch

        from megatron_het.device import activate

        platform = activate()
        if platform.is_cuda:
            torch.cuda.set_device(self.local_rank % torch.cuda.device_count())
        return platform


def meet(seat: Seat, place: str, value: Any, bound_s: float) -> Any:
    """Wait for all ranks of the check; returns the value of the last one, or None if not all arrive in time.

    Args:
        place: Name of the meeting, used once.
        value: This rank's JSON value.
        bound_s: Bound on the wait.
    """
    if seat.store.count(place) >= len(seat.hosts):
        seat.store.put(f"{place}/open", value)
    is_open = seat.store.wait([f"{place}/open"], [], bound_s) == "there"
    return seat.store.get(f"{place}/open") if is_open else None


def dtype_of(plan: Plan) -> Any:
    """torch's data type of the training's activations."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.training.precision, torch.float32)


def kind_of(placement: Placement, rank: int) -> str:
    """The plan's name of a rank's device; empty when the plan names none."""
    where = placement.locate(rank)
    return placement.replica(where.stage, where.replica).device_of(rank)


@dataclass
class Check:
    """One check; the same object is made on every rank."""

    name: str = field(default="", init=False)  # one word
    limit_s: float = field(default=20.0, init=False)  # bound of the measurement on a rank
    # whether ranks wait for each other, so that it cannot run without some of them
    needs_all: bool = field(default=False, init=False)

    def measure(self, seat: Seat) -> dict[str, Any]:
        """Measures on every rank; returns figures as JSON values."""
        raise NotImplementedError

    def judge(self, answers: Answers, names: "Names") -> list[Finding]:
        """Judges the answers on rank 0; a pure function."""
        raise NotImplementedError

    def ok(self, where: str, what: str) -> Finding:
        """Returns a finding without a problem."""
        return Finding(self.name, Status.OK, where, what)

    def warning(self, where: str, what: str, hint: str = "") -> Finding:
        """A finding that does not stop a job."""
        return Finding(self.name, Status.WARNING, where, what, hint)

    def fault(self, where: str, what: str, hint: str = "") -> Finding:
        """A finding with which a job should not start."""
        return Finding(self.name, Status.FAULT, where, what, hint)


@dataclass(frozen=True, slots=True)
class Names:
    """Descriptions of ranks: ``ranks 0-3 (node1), rank 8 (node2)``."""

    hosts: tuple[str, ...]
    kinds: tuple[str, ...] = ()

    def of(self, ranks: Iterable[int]) -> str:
        """Some ranks with their hosts; all of them in two words."""
        found = sorted(set(ranks))
        if len(found) == len(self.hosts) and len(found) > 1:
            return "all ranks"
        by_host: dict[str, list[int]] = {}
        for rank in found:
            by_host.setdefault(self.host(rank), []).append(rank)
        parts = [f"{_ranks(members)} ({host})" for host, members in by_host.items()]
        more = f" and {len(parts) - 4} more hosts" if len(parts) > 4 else ""
        return ", ".join(parts[:4]) + more

    def host(self, rank: int) -> str:
        """The host of a rank."""
        return self.hosts[rank] if rank < len(self.hosts) and self.hosts[rank] else "unknown host"

    def kind(self, rank: int) -> str:
        """The device kind of a rank as the plan names it."""
        return self.kinds[rank] if rank < len(self.kinds) else ""


def _ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0-3``, ``ranks 0, 2``."""
    runs = joined((rank, rank + 1) for rank in ranks)
    text = ", ".join(f"{a}" if end == a + 1 else f"{a}-{end - 1}" for a, end in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def ranks_by(said: Mapping[int, Iterable[str]]) -> dict[str, list[int]]:
    """Returns the ranks by each text that they reported, in the order of the texts."""
    found: dict[str, list[int]] = {}
    for rank, texts in said.items():
        for text in texts:
            found.setdefault(text, []).append(rank)
    return found


def grouped(answers: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Ranks by equal value, the most frequent value first."""
    found: dict[Any, list[int]] = {}
    for rank, value in sorted(answers.items()):
        found.setdefault(value, []).append(rank)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


# Expected figures for the ranks of a plan, from cluster file and profile, with which the doctor compares.
#
# The planner writes them (``emit --doctor``), or computes them if the doctor gets the files themselves, because
# reading a cluster file needs packages that ranks lack.

FORMAT, VERSION = "megatron_het.expectations", 1


@dataclass(frozen=True, slots=True)
class LinkExpectation:
    """The link between two ranks in either direction; ``source`` names the origin of the figures."""

    first: int
    second: int
    latency_s: float
    bytes_per_s: float
    source: str = "cluster file"


@dataclass(frozen=True, slots=True)
class LayerExpectation:
    """One transformer layer on one kind of device, without tensor parallelism.

    ``forward_s`` and ``backward_s`` are of ``micro_batch_size`` sequences of ``tokens`` tokens.
    """

    kind: str
    micro_batch_size: int
    tokens: int
    recompute: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class LayerModel:
    """Dimensions of the layer that the profile measured."""

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    seq_length: int
    precision: str


@dataclass(frozen=True, slots=True)
class Expectations:
    """All expected figures; empty if there are none."""

    plan_hash: str = ""
    links: tuple[LinkExpectation, ...] = ()
    layers: tuple[LayerExpectation, ...] = ()
    model: LayerModel | None = None

    def link(self, first: int, second: int) -> LinkExpectation | None:
        """Returns the expected figures of a pair of ranks, in either order."""
        return next((k for k in self.links if {k.first, k.second} == {first, second}), None)

    def layer(self, kind: str) -> LayerExpectation | None:
        """Returns the expected figures of a kind of device."""
        return next((k for k in self.layers if k.kind == kind), None)

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values, with format and version first."""
        body = asdict(self)
        lists = {name: list(body[name]) for name in ("links", "layers")}
        return {"format": FORMAT, "version": VERSION, **body, **lists}


def load_expectations(path: str | os.PathLike[str]) -> Expectations:
    """Read the file.

    Raises:
        PlanError: Missing, not such a file, an unknown or missing key, a wrong type, a number that cannot be.
    """
    try:
        document = read_json(path)
    except FileError as error:
        raise PlanError("--expect", error.path, error.problem, error.hint) from None
    return from_json(document)


def from_json(document: Any) -> Expectations:
    """Expectations of parsed JSON; see ``load_expectations`` for the errors."""
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("version") != VERSION:
        said = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise PlanError("--expect", said, f"no {FORMAT} of version {VERSION}", "Write it with emit --doctor")
    body = {key: value for key, value in document.items() if key not in ("format", "version")}
    found: Expectations = read_record(Expectations, body, "--expect")
    models = () if found.model is None else (found.model,)
    parts: dict[str, tuple[Any, ...]] = {"links": found.links, "layers": found.layers, "model": models}
    for part, entries in parts.items():
        for i, entry in enumerate(entries):
            for name, value in asdict(entry).items():
                where = f"--expect.{part}[{i}].{name}"
                if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
                    raise PlanError(where, value, "must be a finite number that is not negative")
                if name == "bytes_per_s" and value == 0:
                    raise PlanError(where, value, "must be positive")
    return found
