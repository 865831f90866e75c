"""Injects faults into a worker and records its training, by wrapping the functions that the worker calls.

A fault is a JSON object: ``name``; ``act``, what happens; ``node`` and ``slot``, the worker to which it happens;
``point``, where; ``iteration`` (from 1); ``share``, the position in the iteration's operations or the save; ``after``
(optional), a generation before which it does not happen.  It happens once.
"""

import contextlib
import ctypes
import functools
import json
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fault_processes import children
from megatron_het.elastic.links import sockets
from testing.probe import around

_HANGS_S, _SHORT_S, _WARM = 15.0, 2.0, 2
OUTSIDE = ("full folder", "read-only folder", "second controller", "junk")
"""Acts that the benchmark carries out, not the worker, once the worker has reached the point."""
_SAVE_S, _STALL_S = 0.4, 900.0
_SO_ATTACH_FILTER, _BPF_RETURN = 26, 6
Fault = dict[str, Any]


class Worker:
    """The records of this worker, and the faults to inject into it."""

    def __init__(self, folder: Path) -> None:
        from megatron_het.elastic.worker import ENVIRONMENT

        setting = json.loads(os.environ[ENVIRONMENT])
        self._folder = folder
        self._where = setting["node"], int(os.environ["LOCAL_RANK"])
        self._port = int(setting["port"])
        self._records = folder / "records" / f"{setting['process']}.jsonl"
        self._faults = [
            fault
            for fault in json.loads((folder / "faults.json").read_text(encoding="utf-8"))
            if (fault["node"], fault["slot"]) == self._where or fault.get("anybody")
        ]
        self.generation = 0
        self.samples: list[int] = []
        self.iteration = 0
        self.operation = 0

    def at(self, point: str, iteration: int | None = None, share: tuple[int, int] | None = None) -> None:
        """Inject the fault of this point, if there is one."""
        for fault in self._faults:
            if fault["point"] != point or fault.get("after", 0) > self.generation:
                continue
            if iteration is not None and fault["iteration"] != iteration:
                continue
            if share is not None and int(fault["share"] * share[1]) != share[0]:
                continue
            if self._is_first(fault):
                self._happen(fault)

    def _is_first(self, fault: Fault) -> bool:
        try:
            (self._folder / f"happened-{fault['name']}").open("x").write(f"{os.getpid()}\n")
        except FileExistsError:
            return False
        return True

    def _happen(self, fault: Fault) -> None:
        act = fault["act"]
        happen: dict[str, Callable[[], None]] = {
            "truncate": lambda: _truncate_newest(self._folder / "saved"),
            "agent": lambda: _end_node(with_workers=False),
            "node": lambda: _end_node(with_workers=True),
            "vanish": _stop_node,
            "link": lambda: drop_what_comes(but_from=self._port),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "moment": lambda: os.kill(os.getpid(), signal.SIGSTOP),  # ends by the benchmark's signal
            "controller": lambda: os.kill(self._controller(), signal.SIGKILL),
            "controller hangs": self._hang_controller,
            "stall": lambda: time.sleep(_STALL_S),
            "clock": lambda: _write_whole(self._folder / "clock", str(fault["jump_s"])),
            "memory": _be_short_of_memory,
            "lossy": lambda: lose_packets(fault["loss"]),
            **dict.fromkeys(OUTSIDE, lambda: None),  # the benchmark sees the mark
        }
        if act != "kill":
            happen[act]()
        if act in ("truncate", "kill") and fault["point"] == "save":
            threading.Timer(fault["share"] * _SAVE_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif act in ("truncate", "kill"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _controller(self) -> int:
        return int((self._folder / "controller.pid").read_text(encoding="utf-8"))

    def _hang_controller(self) -> None:
        hung = self._controller()
        os.kill(hung, signal.SIGSTOP)
        threading.Timer(_HANGS_S, os.kill, (hung, signal.SIGCONT)).start()

    def note(self, document: dict[str, Any]) -> None:
        """Write one line of the record."""
        with self._records.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"generation": self.generation, "iteration": self.iteration, **document}) + "\n")


def _end_node(*, with_workers: bool) -> None:
    """Kill this worker's agent; the kernel kills workers whose agent has died."""
    agent = os.getppid()
    for other in children(agent) if with_workers else ():
        if other != os.getpid():
            os.kill(other, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    time.sleep(_STALL_S)


def _stop_node() -> None:
    """Stop every process of this node, the agent first: connections stay open, and nothing answers."""
    agent = os.getppid()
    for process in (agent, *(other for other in children(agent) if other != os.getpid()), os.getpid()):
        os.kill(process, signal.SIGSTOP)


def drop_what_comes(but_from: int) -> None:
    """Drop every packet that arrives on this process's connections, which stay open.

    Args:
        but_from: Port of the controller, whose packets still come.
    """
    drops = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))  # keeps no byte of a packet
    program = struct.pack("HP", 1, ctypes.addressof(drops))
    for one in sockets():
        with contextlib.suppress(OSError):
            if one.getpeername()[1] != but_from:
                one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def lose_packets(share: float) -> None:
    """Drop that share of the packets that arrive on this process's connections, which are then sent again."""
    load, jump, give, random_number = 0x20, 0x25, 6, 0xFFFFF038
    rows = [(load, 0, 0, random_number), (jump, 0, 1, int(share * 2**32)), (give, 0, 0, 2**32 - 1), (give, 0, 0, 0)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = struct.pack("HP", len(rows), ctypes.addressof(code))
    for one in sockets():
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _be_short_of_memory() -> None:
    """Limit this process to its present memory for a while, as if another process took the rest."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    end = threading.Timer(_SHORT_S, resource.setrlimit, (resource.RLIMIT_AS, before))
    end.start()  # started first: later there may be no memory for a thread, and the shortage would never end
    resource.setrlimit(resource.RLIMIT_AS, (used, before[1]))


def have_jumping_clock(folder: Path) -> None:
    """Add the offset in a file of the trial to this process's wall clock, once the file exists."""
    real, file = time.time, folder / "clock"

    def jumping() -> float:
        try:
            return real() + float(file.read_text(encoding="utf-8"))
        except OSError:
            return real()

    time.time = jumping


def _write_whole(file: Path, text: str) -> None:
    part = file.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.rename(file)


def _truncate_newest(saved: Path) -> None:
    newest = max(saved.glob("iter_*"))
    largest = max(newest.glob("*.distcp"), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def install(folder: Path) -> None:
    """Wrap the functions that a worker calls, before it begins.

    Args:
        folder: Of the trial; has ``faults.json`` and a folder ``records``.
    """
    have_jumping_clock(folder)
    worker = Worker(folder)
    _wrap_training(worker)
    _wrap_operations(worker)
    _wrap_changes(worker)


def _wrap_training(worker: Worker) -> None:
    """Record samples and loss of every iteration, and count iterations."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    from megatron_het.runtime.session import HetSession

    step = HetSession.forward_backward

    def note(data: Any, index: int | None) -> None:
        if data.index_split.name == "train" and index is not None:
            worker.samples.append(int(index))

    @functools.wraps(step)
    def step_noted(self: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        if keywords.get("forward_only"):
            return step(self, **keywords)
        worker.iteration, worker.samples, worker.operation = get_args().curr_iteration + 1, [], 0
        result = step(self, **keywords)
        where, (last, _) = self.placement.locate(self.groups.rank), self.placement.last
        if worker.samples and where.stage in (0, last) and where.cp_rank == 0:
            # In a V the first stage has both ends of the model, and each of them reads.
            times = 1 + (last == 0 and len(self.plan.stages[0].layers) > 1)
            worker.note({"samples": worker.samples, "stage": where.stage, "times": times})
        if (loss := _loss(result)) is not None:
            worker.note({"loss": loss})
        return result

    around(GPTDataset, "__getitem__", before=note)
    HetSession.forward_backward = step_noted  # type: ignore[method-assign]


def _loss(reports: Any) -> float | None:
    import torch

    entries = [next(iter(report.values())).view(-1) for report in reports or [] if report]
    if not entries:
        return None
    total = torch.stack([entry.double() for entry in entries]).sum(dim=0)
    return float(total[0] / total[1])


def _wrap_operations(worker: Worker) -> None:
    """Inject faults at an operation of the schedule, and in the middle of an update."""
    import torch

    from megatron_het.runtime.executor import Executor

    all_handlers = Executor._all_handlers

    @functools.wraps(all_handlers)
    def watched_handlers(self: Executor) -> Any:
        def watched(handler: Any) -> Any:
            @functools.wraps(handler)
            def handle(op: Any, call: Any, state: Any) -> Any:
                if not call.forward_only:
                    worker.at("operation", worker.iteration, (worker.operation, len(self.programs[False].ops)))
                    worker.operation += 1
                    if worker.iteration > _WARM:
                        worker.at(f"in {op.kind.name}")
                return handler(op, call, state)

            return handle

        return {kind: watched(handler) for kind, handler in all_handlers(self).items()}

    Executor._all_handlers = watched_handlers  # type: ignore[method-assign]
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        around(kind, "step", after=lambda *_, **__: worker.at("update", worker.iteration))


def _wrap_changes(worker: Worker) -> None:
    """Inject faults before a session, while state moves, after a session, and in the middle of a save."""
    from megatron.training import checkpointing

    from megatron_het.elastic import copies, state
    from megatron_het.elastic import worker as workers

    def opening(_: Any, generation: Any, news: Any) -> None:
        worker.generation = generation.number
        worker.at("opening")

    around(workers.Worker, "_train", before=opening)
    around(workers, "run_session", after=lambda *_, **__: worker.at("left"))
    around(state, "_change", before=lambda *_, **__: worker.at("agreeing"))
    around(state, "move", before=lambda *_, **__: worker.at("moving"))
    around(copies.Copies, "_swap", before=lambda *_, **__: worker.at("copy", worker.iteration))
    around(checkpointing.dist_checkpointing, "save", before=lambda *_, **__: worker.at("save", worker.iteration))
