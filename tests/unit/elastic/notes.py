"""A job whose controller has a board in this process, and plans for its processes."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_het.elastic.controller import Controller
from megatron_het.elastic.members import Bounds
from megatron_het.elastic.pool import GivenPlans
from megatron_het.plan import Plan
from testing.cases import build_plan
from tests.unit.store.memory import MemoryStore

WAIT_S = 60.0


def about(number: int, **more: Any) -> dict[str, Any]:
    return {"process": number, "node": f"n{number}", "device": "", "signature": "s"} | more


def runs(process: int) -> bool:
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


def until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def plan(sizes: list[list[int]], **more: Any) -> Plan:
    layers = [5 // len(sizes)] * len(sizes)
    layers[-1] += 5 - sum(layers)
    return build_plan(sizes, layers, random.Random(0), even_routing=False, **more)


class Job:
    """A controller on a board in this process, and what its workers post.

    Args:
        folder: For the controller's file.
        plans: The plans, or their sizes; the best one first.
        nodes: To wait for.
        board: Another one than that in memory.
        planner: Another one than a list of the plans.
        bounds: Of the controller.
        more: Of the controller.
    """

    def __init__(
        self,
        folder: Path,
        *plans: Any,
        nodes: int = 2,
        board: Any = None,
        planner: Any = None,
        bounds: Bounds | None = None,
        **more: Any,
    ) -> None:
        self.board: Any = board or MemoryStore()
        self.said: list[str] = []
        self.planner = planner or GivenPlans([one if isinstance(one, Plan) else plan(one) for one in plans])
        self.state = folder / "state.json"
        self._nodes, self._bounds, self._more = nodes, bounds or Bounds(), more
        self.start()

    def start(self) -> Controller:
        """A controller, or another one that reads the file of the one before."""
        self.controller = Controller(
            self.board, self.planner, self.state, self._nodes, self._bounds, self.said.append, **self._more
        )
        return self.controller

    def step(self, rounds: int = 1) -> bool:
        return sum(self.controller._step() for _ in range(rounds)) > 0

    def until(self, condition: Callable[[], Any]) -> None:
        until(lambda: self.step() or condition())

    def get(self, key: str) -> Any:
        return self.board.get(key)

    def has(self, key: str) -> bool:
        return bool(self.board.has(key))

    def come(self, *numbers: int, **more: Any) -> None:
        for number in numbers:
            self.board.post({"type": "ready", **about(number, **more)})

    def opened(self, generation: int = 0, process: int = 1, **more: Any) -> None:
        message = {"type": "opened", "process": process, "generation": generation, "padded_vocab_size": None}
        self.board.post({**message, "iteration": 0, "times": {}, **more})

    def ended(self, *processes: int, generation: int = 0, how: str = "failed", **more: Any) -> None:
        for process in processes:
            message = {"type": "ended", "process": process, "generation": generation, "how": how}
            self.board.post({**message, "error": "e", "iteration": 3, **more})

    def beat(self, number: int, iteration: int, **more: Any) -> None:
        sign = {"beats": iteration, "iteration": iteration, "ended": None, **about(number)}
        self.board.put(f"beat/{number}", sign | more)


def trained(folder: Path, *plans: Any, **more: Any) -> Job:
    job = Job(folder, *plans, **more)
    job.come(1, 2)
    job.step()
    assert job.get("latest") == 0
    return job
