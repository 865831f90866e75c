"""Dry runs of ranks: ``python -m megatron_het.dry_run --rank R --out FILE -- <Megatron's flags> --het-plan plan.json``.

``het-plan dry-run`` starts this for its ranks.  With ``--measured`` the run is not dry: the rank
takes part in a real run of two iterations, which the same tracker counts.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from megatron_het.safe_io import LineParser, add_options, amount, count, ends_with_its_reader, split_words, write_json

_POLL_S = 0.05


@ends_with_its_reader
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    own, given = split_words(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options, flags = parser.parse_args(own), given or []
    if options.cuda and (options.measured or options.kernels == "cpu"):
        parser.error("--cuda is a dry run with --kernels gpu: a run on CPUs has no CUDA device")
    if options.measured:
        return _one_rank(options, flags, int(os.environ.get("RANK", "0")))
    ranks = options.rank or [0]
    _stand_for(ranks, flags)
    if len(ranks) == 1 and options.limit_s is None:
        return _one_rank(options, flags, ranks[0])
    return _each_alone(options, flags, ranks)


def _parser() -> argparse.ArgumentParser:
    parser = LineParser(prog="python -m megatron_het.dry_run", description=__doc__)
    # fmt: off
    add_options(parser, {
        "--rank": (
            None, "R", "which rank of the plan; may be repeated", {"type": count(0, 1 << 20), "action": "append"}),
        "--out": (
            None, "FILE", "where to write what was counted, as JSON; {rank} is replaced", {"required": True}),
        "--kernels": (
            "gpu", "", "gpu (default): layers as fused kernels run them; local: on GPUs without Transformer Engine, "
            "where attention keeps its matrices; cpu: exactly what a run on CPUs over gloo does",
            {"choices": ("gpu", "local", "cpu")}),
        "--measured": (False, "", "count a real run on CPUs, started by torchrun, instead of a dry one"),
        "--cuda": (
            False, "", "fake tensors on a CUDA device: mixed devices are an error, and waits of the host for it are "
            "counted"),
        "--limit-s": (None, "S", "end a rank that takes longer", {"type": amount(0.0, 1e6)}),
    })
    # fmt: on
    return parser


def _stand_for(ranks: Sequence[int], flags: Sequence[str]) -> None:
    """Set the environment variables that a launcher would set for a rank, before torch is imported.

    Raises:
        SystemExit: The flags have no plan, or the plan does not have the rank.
    """
    from megatron_het.arguments.flags import split_arguments
    from megatron_het.plan import PlanError

    try:
        config, _ = split_arguments(list(flags))
    except PlanError as error:
        _end(str(error))
    if config.plan is None:
        _end("--het-plan is missing: a dry run is of a plan")
    size = config.plan.world_size
    for rank in ranks:
        if rank >= size:
            _end(f"--rank {rank}: the plan has ranks 0 to {size - 1}")
    os.environ.update(RANK=str(ranks[0]), LOCAL_RANK="0", WORLD_SIZE=str(size), CUDA_VISIBLE_DEVICES="")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # there is nothing to compute, and threads do not survive a fork


def _end(message: str) -> NoReturn:
    sys.stderr.write(f"megatron_het.dry_run: {message}\n")
    raise SystemExit(2)


def _one_rank(options: argparse.Namespace, flags: Sequence[str], rank: int) -> int:
    """Run one rank in this process."""
    from megatron_het.dry_run.run import Setting, run

    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    gpu = options.kernels != "cpu" and not options.measured
    fused = options.kernels == "gpu"
    try:
        found = run(Setting(rank, measured=options.measured, gpu=gpu, fused=fused, cuda=options.cuda), flags)
    except SystemExit as stop:
        # In a real run other ranks may print the reason of a refusal; here only this rank runs.
        if rank and stop.__cause__ is not None and not options.measured:
            _end(str(stop.__cause__))
        raise
    found["seconds"] = round(time.perf_counter() - start_s, 3)
    found["cpu_seconds"] = round(time.process_time() - start_cpu_s, 3)
    write_json(options.out.replace("{rank}", str(rank)), found)
    return 0


def _each_alone(options: argparse.Namespace, flags: Sequence[str], ranks: Sequence[int]) -> int:
    """Run ranks one after the other, each in a process forked from this one, which has imported Megatron."""
    from megatron_het.dry_run.run import import_megatron

    import_megatron(gpu=options.kernels != "cpu", cuda=options.cuda)
    worst, own = 0, os.getpid()
    for rank in ranks:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            # It ends within a second of its parent, which may be killed before it can end this one.
            signal.signal(signal.SIGALRM, lambda *_: os._exit(1) if os.getppid() != own else None)
            signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
            os.environ["RANK"] = str(rank)
            _leave(options, flags, rank)
        worst = max(worst, _wait(child, rank, options.limit_s))
    return worst


def _leave(options: argparse.Namespace, flags: Sequence[str], rank: int) -> NoReturn:
    """Runs a forked process to its end."""
    code = 1
    try:
        code = _one_rank(options, flags, rank)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(child: int, rank: int, limit_s: float | None) -> int:
    """Wait for a forked process, at most ``limit_s`` seconds; returns its exit code."""
    deadline_s = time.monotonic() + (limit_s or 1e9)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return abs(os.waitstatus_to_exitcode(status))
        if time.monotonic() > deadline_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            sys.stderr.write(f"megatron_het.dry_run: rank {rank} took more than {limit_s:g} s and was ended\n")
            return 124
        time.sleep(_POLL_S)


if __name__ == "__main__":
    raise SystemExit(main())
