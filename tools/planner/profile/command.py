"""``profile``: measure layers and links on real devices and write ``profile.json``.

On one node: ``python -m tools.planner profile --model m.yaml --kind A100-40 --out profile.json``
starts one process per device with torchrun.  Inside a job that already has ranks (``torchrun`` or
``srun`` with ``RANK`` and ``WORLD_SIZE`` set, e.g. over two nodes to measure the network between
them), the same command becomes one rank of the run; every node names its own ``--kind``.

Runs of other kinds add to the same file.  What the file already holds is not measured again, so an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_het.safe_io import amount, count
from megatron_het.store import free_port

from ..errors import PlannerError
from ..inputs.files import check_target
from ..inputs.names import text_problem
from ..inputs.profile_schema import Profile, ProfiledModel, load_profile
from .settings import ProfileSettings, check_same_model, check_settings, parse_numbers

#: The module to run after ``torchrun ... -m``.
WORKER = (f"{__package__}.worker",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options (``--model`` and ``--json`` belong to the command line)."""
    parser.add_argument("--kind", default="", help="name of this node's device kind (default: what the driver says)")
    parser.add_argument("--out", type=Path, default=Path("profile.json"), help="file to write or to add to")
    parser.add_argument(
        "--processes", type=count(0, 1024), default=0, help="processes to start (default: one per GPU; 1 on CPU)"
    )
    parser.add_argument("--micro-batch-sizes", default="1,2,4", help="sequences per microbatch, e.g. 1,2,4")
    parser.add_argument("--tp", default="1", help="tensor-parallel sizes, e.g. 1,2,4")
    parser.add_argument("--ep", default="1", help="expert-parallel sizes inside TP groups, e.g. 1,2,4")
    parser.add_argument("--slice-tokens", default="", help="tokens per pass besides the sequence length")
    parser.add_argument("--recompute", default="none", help="none, selective, full; several with commas")
    parser.add_argument("--window-s", type=amount(1e-3, 3600), default=1.0, help="seconds per figure and window")
    parser.add_argument("--windows", type=count(1, 1000), default=3, help="the median over this many windows is kept")
    parser.add_argument(
        "--largest-batch-layers",
        type=count(0, 10_000),
        default=0,
        metavar="LAYERS",
        help="search the largest micro batch with this many layers held (0: no search)",
    )
    parser.add_argument("--normalization", default="RMSNorm", choices=("RMSNorm", "LayerNorm"))
    parser.add_argument("--activation", default="swiglu", choices=("swiglu", "gelu"))
    parser.add_argument("--no-links", action="store_true", help="do not measure links")


def check_options(options: argparse.Namespace) -> None:
    """Numbers and names, before anything is imported or started.

    Raises:
        PlannerError: naming the option.
    """
    for option, least, most in (
        ("micro_batch_sizes", 1, 1 << 17),
        ("tp", 1, 1024),
        ("ep", 1, 1024),
        ("slice_tokens", 1, 1 << 27),
    ):
        flag = "--" + option.replace("_", "-")
        for number in parse_numbers(getattr(options, option), flag):
            if not least <= number <= most:
                raise PlannerError("profile", flag, number, f"must be {least} to {most}")
    if problem := text_problem(options.kind):
        raise PlannerError("profile", "--kind", options.kind, problem)
    check_target(options.out, "--out")


def settings_of(options: argparse.Namespace, model: ProfiledModel) -> ProfileSettings:
    """Settings from parsed options and the model's dimensions."""
    slices = parse_numbers(options.slice_tokens, "--slice-tokens")
    if slices and model.seq_length not in slices:
        slices = (model.seq_length, *slices)
    return ProfileSettings(
        model=model,
        out=str(options.out),
        kinds=(options.kind or device_kind(),),
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
    """Returns what the driver calls this node's device, ``CPU`` without a GPU."""
    import torch

    return torch.cuda.get_device_name(0).replace(" ", "-") if torch.cuda.is_available() else "CPU"


def device_count() -> int:
    """GPUs of this node, 1 without a GPU."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 1


def run(options: argparse.Namespace, model: ProfiledModel) -> Profile | None:
    """Carry out the command.

    Returns:
        The profile; None on the ranks of a running job other than rank 0.

    Raises:
        PlannerError: Bad options, a file of another model, or a worker that failed.
    """
    check_options(options)
    settings = settings_of(options, model)
    if (text := settings.left_out()) and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"warning: {text}\n")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _as_rank(settings)
    return run_profile(settings, options.processes or device_count(), on_line=_show_progress)


def _show_progress(line: str) -> None:
    """Pass the workers' progress on; what libraries print stays out."""
    if re.match(r"\[\d+/\d+\] |link |largest |    out of memory", line):
        sys.stderr.write(line + "\n")


def _as_rank(settings: ProfileSettings) -> Profile | None:
    """Be one rank of a job that a launcher started."""
    from . import worker as profile_worker

    os.environ["HET_DEVICE_KIND"] = settings.kinds[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.json"
        path.write_text(settings.to_json(), encoding="utf-8")
        code = profile_worker.main([str(path)])
    if code:
        raise PlannerError("profile", "rank", int(os.environ["RANK"]), "this rank failed; see its messages")
    return load_profile(settings.out) if os.environ["RANK"] == "0" else None


_TAIL = 80
"""Lines of the workers' output in an error: torchrun's own come last, and are about thirty."""


def run_profile(
    settings: ProfileSettings,
    processes: int,
    environment: Mapping[str, str] | None = None,
    module: Sequence[str] = WORKER,
    on_line: Callable[[str], None] | None = None,
) -> Profile:
    """Start ``processes`` ranks on this machine and wait for the finished profile.

    Args:
        settings: What to measure.
        processes: Number of ranks.
        environment: Variables besides this process's own.
        module: Module and leading arguments after ``torchrun -m``.
        on_line: Called with every progress line.

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
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(processes),
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(free_port()),
            "-m",
            *module,
            str(path),
        ]
        code, tail = _stream(command, {**default_environment(), **(environment or {})}, on_line)
    if code:
        raise PlannerError(
            "profile",
            "exit code",
            code,
            "the measuring processes failed:\n" + tail,
            f"Run it again: {out} keeps what was measured" if out.exists() else "",
        )
    return load_profile(out)


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
