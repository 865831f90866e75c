"""``python -m megatron_het.doctor``: one rank of the doctor."""

import argparse
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_het import safe_io
from megatron_het.arguments.flags import TRANSPORTS, split_arguments
from megatron_het.doctor import participant
from megatron_het.doctor.check import Check, Expectations, Names, Seat, from_json, kind_of, load_expectations
from megatron_het.features.registry import check_plan_alone
from megatron_het.plan import Placement, Plan, PlanError, check_plan, load_plan, plan_hash
from megatron_het.store import Documents

# The doctor's command line, and the selection of checks.

USUAL_LIMIT_S = 120.0
CHECKS = ("software", "flags", "disk", "devices", "links", "stress", "numerics")


def parser_of() -> argparse.ArgumentParser:
    """Returns the parser of the doctor's own options."""
    parser = safe_io.LineParser(
        prog="python -m megatron_het.doctor",
        description="Checks the allocated nodes before a long job. Start it once per rank, as the training: "
        "with torchrun or srun.",
        epilog="The training's flags follow after '--'; they hold --het-plan. Exit code: 0 fit, 1 not fit, "
        "2 bad input.",
    )
    # fmt: off
    safe_io.add_options(parser, {
        "--plan": (None, "FILE", "plan.json; not needed where the training's flags name one"),
        "--expect": (None, "FILE", "expectations.json with expected times and bandwidths (emit --doctor)"),
        "--cluster": (None, "FILE", "cluster file, in place of --expect; needs the planner"),
        "--profile": (None, "FILE", "profile.json, with --cluster"),
        "--checkpoints": ("", "DIR", "folder of the checkpoints, to be written to"),
        "--json": (None, "FILE", "also write the report to FILE", {"type": Path}),
        "--force": (False, "", "let --json replace a file that is no report of the doctor"),
        "--log-dir": (None, "DIR", "logs of the tiny training (default: a temporary folder)", {"type": Path}),
        "--transport": ("auto", "", "as --het-transport (default: auto)", {"choices": TRANSPORTS}),
        "--limit-s": (
            USUAL_LIMIT_S, "", "bound on all checks (default: %(default)s)", {"type": safe_io.amount(10, 3600)}),
        "--slow-ratio": (
            1.25, "", "a device is slow when it takes this many times as long as its kind (default: %(default)s)",
            {"type": safe_io.amount(1.01, 100)}),
        "--link-ratio": (
            1.5, "", "a link is slow when it has less than 1/RATIO of its bandwidth (default: %(default)s)",
            {"type": safe_io.amount(1.01, 100)}),
        "--skip": ([], "", "leave a check out; may be repeated", {"action": "append", "choices": CHECKS}),
    })
    # fmt: on
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Options, with the training's flags (those after ``--``) as ``flags``; None when there are none."""
    own, flags = safe_io.split_words(words)
    parser = parser_of()
    options = parser.parse_args(own)
    options.flags = None if flags is None else tuple(flags)
    if options.profile and not options.cluster:
        parser.error("--profile needs --cluster")
    if options.expect and options.cluster:
        parser.error("--expect and --cluster: give one of them")
    return options


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs that rank 0 has read."""

    plan: Plan
    expectations: Expectations
    transport: str


def read_inputs(options: argparse.Namespace, world_size: int) -> Inputs:
    """Reads plan and expectations.

    Raises:
        PlanError: A bad file, no plan, a plan for another world size, expectations of another plan.
        ValueError: A bad cluster file or profile, or a bad target of the report.
    """
    if options.json is not None:
        safe_io.check_target(options.json)
        if not options.force:
            inputs = [p for p in (options.plan, options.expect, options.cluster, options.profile) if p]
            safe_io.check_replaces(options.json, inputs, (b'"verdict"',))
    plan, transport = _plan(options)
    check_plan_alone(plan)
    if plan.world_size != world_size:
        raise PlanError("WORLD_SIZE", world_size, f"the plan has {plan.world_size} ranks", "Start one process per rank")
    expectations = _expectations(options, plan)
    if expectations.plan_hash != plan_hash(plan):
        raise PlanError("--expect", options.expect, "was written for another plan", "Run emit --doctor again")
    return Inputs(plan, expectations, transport)


def _plan(options: argparse.Namespace) -> tuple[Plan, str]:
    """The plan, and the transport of the training's flags."""
    if options.plan:
        return load_plan(options.plan), options.transport
    words = list(options.flags or ())
    given = (word.partition("=")[::2] if "=" in word else (word, after) for word, after in zip(words, [*words[1:], ""]))
    if not any(value for name, value in given if name in ("--het-plan", "--het-schedule")):
        raise PlanError("--plan", None, "no plan was given", "Name one, or give the training's flags after '--'")
    config, _ = split_arguments(words)
    assert config.plan is not None
    return config.plan, config.transport if options.transport == "auto" else options.transport


def _expectations(options: argparse.Namespace, plan: Plan) -> Expectations:
    if options.expect:
        return load_expectations(options.expect)
    if not options.cluster:
        return Expectations(plan_hash(plan))
    from megatron_het import planner

    found: Expectations = planner("emit.command").expectations_of_files(plan, options.cluster, options.profile)
    return found


def checks_of(options: argparse.Namespace, plan: Plan, expectations: Expectations) -> list[Check]:
    """The checks in order: those that a rank can run alone are first, so that most are done before a rank is lost."""
    from megatron_het.doctor.devices import Devices
    from megatron_het.doctor.flags import Flags
    from megatron_het.doctor.links import Links
    from megatron_het.doctor.numerics import Numerics
    from megatron_het.doctor.software import Disk, Software
    from megatron_het.doctor.stress import Stress

    checks: list[Check] = [
        Software(),
        Flags(),
        Disk(options.checkpoints, checkpoint_bytes(plan)),
        Devices(options.slow_ratio),
        Links(options.link_ratio, expectations),
        Stress(),
        Numerics(),
    ]
    for check in checks:
        check.limit_s *= patience(options.limit_s)
    return [check for check in checks if check.name not in options.skip]


def patience(limit_s: float) -> float:
    """Factor of the time limits of single checks, if there is more time than usual for all of them."""
    return max(1.0, limit_s / USUAL_LIMIT_S)


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of weights and optimizer state, from the plan's prediction; 0 without one.

    Replicas hold copies of each other's state, of which one is saved.
    """
    if plan.predicted is None:
        return 0
    saved = {rank for stage in plan.stages for rank in stage.replicas[0].ranks}
    sharded = plan.training.distributed_optimizer
    return sum(
        (p.parameter_bytes if p.rank in saved else 0) + (p.optimizer_bytes if sharded or p.rank in saved else 0)
        for p in plan.predicted.per_rank
    )


_ARRIVE_S = 45.0  # share of the usual two minutes for processes to start


@safe_io.ends_with_its_reader
def main(words: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code (0 fit, 1 not fit, 2 bad input), the same on all ranks."""
    options = parse(sys.argv[1:] if words is None else words)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        sys.stderr.write("error: RANK and WORLD_SIZE are not set: start the doctor with torchrun or srun\n")
        return 2
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        given = os.environ.get(name, "0")
        if not (given.isascii() and given.isdigit() and len(given) <= 9):
            sys.stderr.write(
                f"error: {name} = {safe_io.shown(given, 80)} is no whole number: torchrun and srun set it\n"
            )
            return 2
    # Launchers end all ranks when one has died; rank 0 then names that rank before it exits.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        return _Rank(options, rank, world_size).run()
    except participant.MeetingError as error:
        sys.stderr.write(f"het-doctor: rank {rank} ({socket.gethostname()}): {error}\n")
        return 1


class _Rank:
    """The doctor on the rank of this process."""

    def __init__(self, options: Any, rank: int, world_size: int) -> None:
        self._options, self._rank, self._world_size = options, rank, world_size
        self._started_s = time.monotonic()
        self._arrive_s = _ARRIVE_S * patience(options.limit_s)

    def run(self) -> int:
        inputs = self._read() if self._rank == 0 else None
        store = participant.connect(self._rank, self._arrive_s)
        if isinstance(inputs, str):
            store.put(participant.Keys.BRIEF, {"error": inputs})
            time.sleep(1.0)  # the store ends with this process
            return 2
        heart = participant.Heart(store, self._rank)
        store.put(participant.Keys.here(self._rank), {"host": socket.gethostname()})
        try:
            if inputs is not None:
                return self._lead(store, inputs)
            return self._follow(store)
        finally:
            heart.stop()

    def _read(self) -> Inputs | str:
        """Read the inputs on rank 0 for all ranks; returns the text of an error if there is one."""
        try:
            return read_inputs(self._options, self._world_size)
        except (PlanError, ValueError, OSError, ImportError) as error:
            sys.stderr.write(f"error: {error}\n")
            return str(error)

    def _follow(self, store: Documents) -> int:
        brief = participant.hear(store, participant.Keys.BRIEF, self._arrive_s + self._options.limit_s)
        if "error" in brief:
            return 2
        plan = Plan.from_json(brief["plan"])
        check_plan(plan)
        inputs = Inputs(plan, from_json(brief["expectations"]), brief["transport"])
        return self._take_part(store, inputs, tuple(brief["hosts"]))

    def _take_part(self, store: Documents, inputs: Inputs, hosts: tuple[str, ...]) -> int:
        checks = checks_of(self._options, inputs.plan, inputs.expectations)
        with _folder(self._options.log_dir, self._rank) as folder:

            def seat(index: int) -> Seat:
                return Seat(
                    rank=self._rank,
                    local_rank=int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))),
                    hosts=hosts,
                    plan=inputs.plan,
                    flags=self._options.flags,
                    expectations=inputs.expectations,
                    store=store.under(f"check/{index}"),
                    folder=folder,
                    transport=inputs.transport,
                )

            return participant.Participant(store, seat, checks, self._rank).run(self._options.limit_s)

    def _lead(self, store: Documents, inputs: Inputs) -> int:
        """Run rank 0: the coordinator on a thread, this rank's own checks on the main thread."""
        checks = checks_of(self._options, inputs.plan, inputs.expectations)
        coordinator = participant.Coordinator(
            store, checks, self._world_size, self._options.limit_s, participant.is_ending
        )
        here = coordinator.meet(self._arrive_s)
        hosts = tuple(here.get(rank, {}).get("host", "") for rank in range(self._world_size))
        placement = Placement(inputs.plan)
        names = Names(hosts, tuple(kind_of(placement, rank) for rank in range(self._world_size)))
        brief = {
            "plan": inputs.plan.to_json(),
            "expectations": inputs.expectations.to_json(),
            "transport": inputs.transport,
            "hosts": hosts,
        }
        store.put(participant.Keys.BRIEF, brief)
        thread = threading.Thread(target=self._coordinate, args=(coordinator, names), name="coordinator", daemon=True)
        thread.start()
        code = self._take_part(store, inputs, hosts)
        thread.join(timeout=10.0)
        return code

    def _coordinate(self, coordinator: participant.Coordinator, names: Names) -> None:
        """Runs on a thread of rank 0: all checks, the table, the verdict."""
        findings = coordinator.run(names)
        code, elapsed_s = participant.exit_code(findings), time.monotonic() - self._started_s
        try:
            if self._options.json is not None:
                with contextlib.suppress(OSError):
                    safe_io.write_json(
                        self._options.json, participant.to_json(findings, code, elapsed_s, coordinator.figures)
                    )
            with contextlib.suppress(OSError):  # the output is closed, as after ``| head``
                sys.stdout.write(participant.table(findings, elapsed_s) + "\n")
                sys.stdout.flush()
        finally:
            coordinator.close(code)  # the other ranks wait for it


@contextlib.contextmanager
def _folder(given: Path | None, rank: int) -> Iterator[Path]:
    if given is not None:
        own = given / f"rank-{rank}"
        own.mkdir(parents=True, exist_ok=True)
        yield own
        return
    with tempfile.TemporaryDirectory(prefix="het-doctor-") as folder:
        yield Path(folder)


def start() -> None:
    """The console script; leaves without waiting for threads, because those of a failed transfer may not end."""
    code = main()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    start()
