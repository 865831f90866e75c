"""``python -m megatron_het.doctor``: one rank of the doctor."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_het.doctor.check import Names, Seat, from_json, kind_of
from megatron_het.doctor.options import Inputs, checks_of, parse, patience, read_inputs
from megatron_het.doctor.participant import (
    Coordinator,
    Heart,
    Keys,
    MeetingError,
    Participant,
    connect,
    exit_code,
    hear,
    is_ending,
    table,
    to_json,
)
from megatron_het.plan import Placement, Plan, PlanError
from megatron_het.plan.validate import check_plan
from megatron_het.safe_io import ends_with_its_reader, shown, write_json
from megatron_het.store import Documents

_ARRIVE_S = 45.0  # for processes to start, of the usual two minutes


@ends_with_its_reader
def main(words: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code (0 fit, 1 not fit, 2 bad input), the same on all ranks."""
    options = parse(sys.argv[1:] if words is None else words)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        sys.stderr.write("error: RANK and WORLD_SIZE are not set: start the doctor with torchrun or srun\n")
        return 2
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        given = os.environ.get(name, "0")
        if not (given.isascii() and given.isdigit() and len(given) <= 9):
            sys.stderr.write(f"error: {name} = {shown(given, 80)} is no whole number: torchrun and srun set it\n")
            return 2
    # Launchers end all ranks when one has died; rank 0 then says who it was before it leaves.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        return _Rank(options, rank, world_size).run()
    except MeetingError as error:
        sys.stderr.write(f"het-doctor: rank {rank} ({socket.gethostname()}): {error}\n")
        return 1


class _Rank:
    """This process."""

    def __init__(self, options: Any, rank: int, world_size: int) -> None:
        self._options, self._rank, self._world_size = options, rank, world_size
        self._started_s = time.monotonic()
        self._arrive_s = _ARRIVE_S * patience(options.limit_s)

    def run(self) -> int:
        inputs = self._read() if self._rank == 0 else None
        store = connect(self._rank, self._arrive_s)
        if isinstance(inputs, str):
            store.put(Keys.BRIEF, {"error": inputs})
            time.sleep(1.0)  # the store goes with this process
            return 2
        heart = Heart(store, self._rank)
        store.put(Keys.here(self._rank), {"host": socket.gethostname()})
        try:
            if inputs is not None:
                return self._lead(store, inputs)
            return self._follow(store)
        finally:
            heart.stop()

    def _read(self) -> Inputs | str:
        """Rank 0 reads for all; what is wrong as text."""
        try:
            return read_inputs(self._options, self._world_size)
        except (PlanError, ValueError, OSError, ImportError) as error:
            sys.stderr.write(f"error: {error}\n")
            return str(error)

    def _follow(self, store: Documents) -> int:
        brief = hear(store, Keys.BRIEF, self._arrive_s + self._options.limit_s)
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

            return Participant(store, seat, checks, self._rank).run(self._options.limit_s)

    def _lead(self, store: Documents, inputs: Inputs) -> int:
        """Rank 0: the coordinator on a thread, this rank's own part on the main thread."""
        checks = checks_of(self._options, inputs.plan, inputs.expectations)
        coordinator = Coordinator(store, checks, self._world_size, self._options.limit_s, is_ending)
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
        store.put(Keys.BRIEF, brief)
        thread = threading.Thread(target=self._coordinate, args=(coordinator, names), name="coordinator", daemon=True)
        thread.start()
        code = self._take_part(store, inputs, hosts)
        thread.join(timeout=10.0)
        return code

    def _coordinate(self, coordinator: Coordinator, names: Names) -> None:
        """On a thread of rank 0: all checks, the table, the verdict."""
        findings = coordinator.run(names)
        code, elapsed_s = exit_code(findings), time.monotonic() - self._started_s
        try:
            if self._options.json is not None:
                with contextlib.suppress(OSError):
                    write_json(self._options.json, to_json(findings, code, elapsed_s, coordinator.figures))
            with contextlib.suppress(OSError):  # nobody reads any more, as after ``| head``
                sys.stdout.write(table(findings, elapsed_s) + "\n")
                sys.stdout.flush()
        finally:
            coordinator.close(code)  # the other ranks wait for it


@contextlib.contextmanager
def _folder(given: Path | None, rank: int) -> Iterator[Path]:
    """A folder of this rank."""
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
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    start()
