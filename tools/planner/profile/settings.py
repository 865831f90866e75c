"""The command ``profile`` and its settings: the operating points to measure, and those already in the file."""

import argparse
import dataclasses
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_het.safe_io import add_options, amount, count
from megatron_het.store import free_port

from ..errors import PlannerError, validated
from ..inputs.catalog import catalog
from ..inputs.files import check_target, text_problem
from ..inputs.profile_schema import MEASURED_AS, LayerKind, LayerTiming, Profile, ProfiledModel, load_profile

ENDS: tuple[LayerKind, ...] = ("embedding", "head")
RECOMPUTE = ("none", "selective", "full")


class Point(NamedTuple):
    """One operating point of one layer kind; the key under which a timing is stored."""

    layer: LayerKind
    micro_batch_size: int
    tp: int
    slice_tokens: int
    recompute: Literal["none", "selective", "full"]
    ep: int = 1
    windowed: bool = False


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """A profiling run."""

    model: ProfiledModel  # the model's dimensions and precision
    out: str  # the profile file; measured points found in it are not measured again
    kinds: tuple[str, ...]  # device kind of every rank of this run, or one name for all of them
    devices_per_node: int = 0  # ranks that form one node; 0 = the launcher's local world size
    micro_batch_sizes: tuple[int, ...] = (1,)  # sequences per microbatch to measure
    tp: tuple[int, ...] = (1,)  # tensor-parallel sizes; each must divide ``devices_per_node``
    ep: tuple[int, ...] = (1,)  # expert-parallel sizes, for the layers of experts and the TP sizes that they divide
    slice_tokens: tuple[int, ...] = ()  # tokens per pass; empty = the sequence length only
    recompute: tuple[str, ...] = ("none",)  # recompute granularities; only the transformer layer depends on it
    # Seconds during which one figure is measured.  All ranks measure during the same window, so devices that share
    # a resource (a core, a PCIe switch, power) slow each other down as in training.
    window_s: float = 1.0
    windows: int = 3  # the median over this many windows is kept
    normalization: str = "RMSNorm"  # ``RMSNorm`` or ``LayerNorm``
    activation: str = "swiglu"  # ``swiglu`` or ``gelu``
    links: bool = True  # measure links too
    largest_batch_layers: int = 0  # Transformer layers held while searching for the largest micro batch; 0 = no search
    timeout_s: float = 300.0  # bound of every collective wait
    notes: str = ""
    link_bytes: tuple[int, ...] = field(default=(1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 23))

    def fitting_slices(self) -> tuple[int, ...]:
        """Tokens per pass that divide the sequence length."""
        return tuple(tokens for tokens in self.slice_tokens if self.model.seq_length % tokens == 0)

    def left_out(self) -> str:
        """A warning about tokens per pass that do not; empty if all do."""
        length, fitting = self.model.seq_length, self.fitting_slices()
        others = [tokens for tokens in self.slice_tokens if tokens not in fitting]
        if not others:
            return ""
        return (
            f"--slice-tokens {','.join(map(str, others))}: left out, because slices of equal length must divide the "
            f"sequence length {length}; these do: {shown_divisors(length)}"
        )

    def points(self) -> list[Point]:
        """Every point to measure, cheap ones first within a TP size."""
        slices = self.fitting_slices() or (self.model.seq_length,)
        kinds: tuple[LayerKind, ...] = ("embedding", "layer", "head")
        if self.model.experts is not None and self.model.experts.dense:
            kinds = ("embedding", "layer", "dense", "head")
        if self.model.kinds:
            layers = dict.fromkeys(MEASURED_AS[symbol] for symbol in self.model.kinds)
            kinds = ("embedding", *layers, "head")
        found = [
            Point(layer, batch, tp, tokens, "none" if layer in ENDS else recompute, *variant)  # type: ignore[arg-type]
            for tp, tokens, batch, recompute, layer in itertools.product(
                self.tp, slices, self.micro_batch_sizes, self.recompute, kinds
            )
            for variant in self._variants(layer, tp)
        ]
        return list(dict.fromkeys(found))

    def _variants(self, layer: LayerKind, tp: int) -> Iterator[tuple[int, bool]]:
        """Expert-parallel sizes, and attention with the window and without."""
        model = self.model
        has_experts = layer in ("layer", "experts") and model.experts is not None
        parts = [n for n in self.ep if tp % n == 0] if has_experts else [1]
        windows = [True] if model.windowed else [False, True]
        yield from itertools.product(parts, windows if model.window and layer not in ENDS else [False])

    def kind_of(self, rank: int) -> str:
        """Device kind of a rank."""
        return self.kinds[0] if len(self.kinds) == 1 else self.kinds[rank]

    def to_json(self) -> str:
        """For the worker processes."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "ProfileSettings":
        """Inverse of ``to_json``."""
        settings: ProfileSettings = validated(ProfileSettings, json.loads(text), "settings")
        return settings


def shown_divisors(length: int) -> str:
    """The numbers of tokens that divide a sequence into 2 to 64 slices, for messages."""
    found = [length // slices for slices in range(2, 65) if length % slices == 0]
    return ", ".join(map(str, found)) or "none into 2 to 64 slices"


def check_settings(settings: ProfileSettings, world_size: int) -> None:
    """Raise a PlannerError for settings that cannot be measured with ``world_size`` ranks."""
    model, where = settings.model, "profile"
    for value in settings.recompute:
        if value not in RECOMPUTE:
            raise PlannerError(where, "--recompute", value, f"must be one of {', '.join(RECOMPUTE)}")
    per_node = settings.devices_per_node or world_size
    if world_size % per_node:
        raise PlannerError(where, "--devices-per-node", per_node, f"does not divide the {world_size} ranks")
    for tp in settings.tp:
        if per_node % tp:
            problem = f"does not divide the {per_node} devices of a node"
            raise PlannerError(where, "--tp", tp, problem, "TP stays inside a node; start one process per device")
        for name in ("num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size"):
            if getattr(model, name) % tp:
                raise PlannerError(where, "--tp", tp, f"does not divide the model's {name} = {getattr(model, name)}")
    experts = model.experts
    for ep in settings.ep:
        if ep > 1 and (experts is None or experts.count % ep):
            problem = "the model has no experts" if experts is None else f"does not divide the {experts.count} experts"
            raise PlannerError(where, "--ep", ep, problem)
        if all(tp % ep for tp in settings.tp):
            raise PlannerError(where, "--ep", ep, f"divides none of the TP sizes {list(settings.tp)}")
    if settings.slice_tokens and not settings.fitting_slices():
        problem = f"none of them divides the sequence length {model.seq_length}"
        hint = f"These do: {shown_divisors(model.seq_length)}"
        raise PlannerError(where, "--slice-tokens", list(settings.slice_tokens), problem, hint)
    if len(settings.kinds) not in (1, world_size):
        problem = f"give one kind, or one per rank ({world_size} of them)"
        raise PlannerError(where, "--kind", list(settings.kinds), problem)


def point_of(timing: LayerTiming) -> Point:
    """The key of a stored timing (context lengths are not measured here)."""
    return Point(*(getattr(timing, name) for name in Point._fields))


def missing_points(settings: ProfileSettings, profile: Profile | None, kinds: Iterable[str]) -> list[Point]:
    """Points that at least one of the kinds still lacks: all ranks measure together."""
    devices = [profile.device(kind) if profile else None for kind in sorted(set(kinds))]
    stored = [{point_of(t) for t in device.timings} if device else set() for device in devices]
    return [p for p in settings.points() if any(p not in s for s in stored)]


def check_same_model(profile: Profile, settings: ProfileSettings) -> None:
    """Refuse to add to a profile of another model or precision."""
    for item in dataclasses.fields(ProfiledModel):
        if item.name == "name":
            continue
        old, new = getattr(profile.model, item.name), getattr(settings.model, item.name)
        if old != new:
            problem = f"this run measures {item.name} = {new!r}"
            hint = "Choose another --out or remove the file"
            raise PlannerError(settings.out, f"model.{item.name}", old, problem, hint)


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """``1,2,4`` as numbers; a PlannerError names the option."""
    try:
        return tuple(int(part[:30]) for part in text.split(",") if part.strip())
    except ValueError:
        raise PlannerError("profile", option, text, "expected whole numbers separated by commas") from None


def largest(fits: Any, limit: int = 1 << 16) -> int:
    """Poplar's search (Algorithm 1): double until it fails, then halve the interval; 0 when nothing fits.

    Args:
        fits: Function of the micro batch size; False when it ran out of memory.
    """
    size = 1
    while size <= limit and fits(size):
        size *= 2
    good, between = size // 2, range(size // 2 + 1, size if size <= limit else 0)
    return good + bisect_left(between, True, key=lambda middle: not fits(middle))


def fit_line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Latency, never negative, and bytes/s of t(n) = latency + n / bandwidth, by least relative error.

    Relative weights keep the small messages, which determine the latency, in the fit.

    Raises:
        ValueError: Fewer than two different sizes.
    """
    if len({n for n, _ in samples}) < 2:
        raise ValueError("a latency and a bandwidth need at least two message sizes")
    import numpy as np  # not for --help

    sizes, times = np.array(samples, dtype=float).T
    latency_s, slope = np.polynomial.polynomial.polyfit(sizes, times, 1, w=1 / times)
    if slope <= 0:
        biggest = max(samples)
        return 0.0, biggest[0] / biggest[1]
    if latency_s < 0:  # through the origin, still by relative error
        latency_s, slope = 0.0, np.sum(sizes / times) / np.sum((sizes / times) ** 2)
    return float(latency_s), float(1 / slope)


# The command: measures layers and links on real devices and writes ``profile.json``.
#
# On one node: ``python -m tools.planner profile --model m.yaml --kind A100-40 --out profile.json``
# starts one process per device with torchrun.  Inside a job that already has ranks (``torchrun`` or
# ``srun`` with ``RANK`` and ``WORLD_SIZE`` set, e.g. over two nodes to measure the network between
# them), the same command becomes one rank of the run; every node names its own ``--kind``.
#
# Runs of other kinds add to the same file.  What the file already holds is not measured again, so an
# interrupted run continues where it stopped.


#: The module to run after ``torchrun ... -m``.
WORKER = (f"{__package__}.worker",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options (``--model`` and ``--json`` belong to the command line)."""
    # fmt: off
    add_options(parser, {
        "--kind": ("", "", "name of this node's device kind (default: what the driver says)"),
        "--out": (Path("profile.json"), "", "file to write or to add to (default %(default)s)"),
        "--processes": (0, "", "processes to start (default: one per GPU; 1 on CPU)", {"type": count(0, 1024)}),
        "--micro-batch-sizes": ("1,2,4", "", "sequences per microbatch; several with commas (default %(default)s)"),
        "--tp": ("1", "", "tensor-parallel sizes; several with commas (default %(default)s)"),
        "--ep": ("1", "", "expert-parallel sizes inside TP groups; several with commas (default %(default)s)"),
        "--slice-tokens": ("", "", "tokens per pass besides the sequence length"),
        "--recompute": ("none", "", "none, selective, full; several with commas (default %(default)s)"),
        "--window-s": (1.0, "", "seconds per figure and window (default %(default)s)", {"type": amount(1e-3, 3600)}),
        "--windows": (
            3, "", "the median over this many windows is kept (default %(default)s)", {"type": count(1, 1000)}),
        "--largest-batch-layers": (
            0, "LAYERS", "search the largest micro batch with this many layers held (0: no search)",
            {"type": count(0, 10_000)}),
        "--normalization": ("RMSNorm", "", "kind of norm (default %(default)s)", {"choices": ("RMSNorm", "LayerNorm")}),
        "--activation": ("swiglu", "", "of the MLP (default %(default)s)", {"choices": ("swiglu", "gelu")}),
        "--no-links": (False, "", "do not measure links"),
    })
    # fmt: on


def check_options(options: argparse.Namespace) -> None:
    """Check numbers and names before anything is imported or started; raises PlannerError."""
    for option, most in {"micro_batch_sizes": 1 << 17, "tp": 1024, "ep": 1024, "slice_tokens": 1 << 27}.items():
        flag = "--" + option.replace("_", "-")
        for number in parse_numbers(getattr(options, option), flag):
            if not 1 <= number <= most:
                raise PlannerError("profile", flag, number, f"must be 1 to {most}")
    if problem := text_problem(options.kind):
        raise PlannerError("profile", "--kind", options.kind, problem)
    check_target(options.out, "--out")


def settings_of(options: argparse.Namespace, model: ProfiledModel) -> ProfileSettings:
    """Settings from parsed options and the model's dimensions; raises PlannerError."""
    found, known = device_kind(), catalog().get(options.kind)
    if known and not known.is_processor and found == "CPU":
        problem = "PyTorch sees no GPU here, so this machine's processor would be measured"
        raise PlannerError("profile", "--kind", options.kind, problem, "Run it on a node with such GPUs")
    slices = parse_numbers(options.slice_tokens, "--slice-tokens")
    if slices and model.seq_length not in slices:
        slices = (model.seq_length, *slices)
    return ProfileSettings(
        model=model,
        out=str(options.out),
        kinds=(options.kind or found,),
        micro_batch_sizes=parse_numbers(options.micro_batch_sizes, "--micro-batch-sizes"),
        tp=parse_numbers(options.tp, "--tp"),
        ep=parse_numbers(options.ep, "--ep"),
        slice_tokens=slices,
        recompute=tuple(p.strip() for p in options.recompute.split(",") if p.strip()),
        window_s=options.window_s,
        windows=options.windows,
        normalization=options.normalization,
        activation=options.activation,
        links=not options.no_links,
        largest_batch_layers=options.largest_batch_layers,
    )


def device_kind() -> str:
    """Returns the driver's name of this node's device, ``CPU`` without a GPU."""
    import torch

    return torch.cuda.get_device_name(0).replace(" ", "-") if torch.cuda.is_available() else "CPU"


def device_count() -> int:
    """GPUs of this node, 1 without a GPU."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 1


def show_progress(line: str) -> None:
    """Print the workers' progress lines, and drop the output of libraries."""
    if re.match(r"\[\d+/\d+\] |link |largest |    out of memory", line):
        sys.stderr.write(line + "\n")


_TAIL = 80  # lines of the workers' output in an error: torchrun's own come last, and are about thirty


def run_profile(
    settings: ProfileSettings,
    processes: int,
    environment: Mapping[str, str] | None = None,
    module: Sequence[str] = WORKER,
    on_line: Callable[[str], None] | None = None,
) -> Profile:
    """Start ``processes`` ranks on this machine and wait for the finished profile.

    Args:
        environment: Variables besides this process's own.
        module: Module and leading arguments after ``torchrun -m``.

    Raises:
        PlannerError: Settings that cannot be measured, or workers that failed; the file then
            holds what was measured so far.
    """
    check_settings(settings, processes)
    out = Path(settings.out)
    if out.exists():
        check_same_model(load_profile(out), settings)
    elif not out.parent.is_dir():
        raise PlannerError("profile", "--out", str(out), "its folder does not exist")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.json"
        path.write_text(settings.to_json(), encoding="utf-8")
        check_loopback()
        where = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), *where]
        command += ["-m", *module, str(path)]
        code, tail = _stream(command, {**default_environment(), **(environment or {})}, on_line)
    if code:
        hint = f"Run it again: {out} keeps what was measured" if out.exists() else ""
        raise PlannerError("profile", "exit code", code, "the measuring processes failed:\n" + tail, hint)
    return load_profile(out)


def check_loopback() -> None:
    """Check that processes of this machine can connect to each other; otherwise they would wait for ever."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), 10.0).close()
    except OSError as error:
        problem, hint = f"processes cannot reach each other there: {error.strerror}", "Try 'ip link set lo up'"
        raise PlannerError("profile", "this machine", "127.0.0.1", problem, hint) from None


def default_environment() -> dict[str, str]:
    """This process's environment with one thread per rank, unless set otherwise."""
    return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", **os.environ}


def _stream(
    command: Sequence[str], environment: Mapping[str, str], on_line: Callable[[str], None] | None
) -> tuple[int, str]:
    """Run a command; returns its exit code and the end of its output.  Ctrl-C ends it first."""
    lines: list[str] = []
    process: Any = subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        for line in process.stdout:
            lines.append(line.rstrip())
            if on_line is not None:
                on_line(lines[-1])
        return process.wait(), "\n".join(lines[-_TAIL:])
    except BaseException:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
