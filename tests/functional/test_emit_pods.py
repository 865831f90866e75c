"""Launch files for Kubernetes and SkyPilot, run by a stand-in: a plan of three kinds trains."""

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.llama.job import CPU_ARGUMENTS, model_of
from megatron_het.plan import Plan
from megatron_het.store import free_port
from testing.runner import end_session
from tests.unit.planner.emit_plans import TINY, in_pods, make_plan, nodes_of
from tests.unit.planner.pods import pods_of
from tools.planner.emit.command import emit
from tools.planner.emit.elastic import ElasticOptions
from tools.planner.emit.flags import model_arguments
from tools.planner.emit.pods import PodOptions
from tools.planner.emit.scripts import LaunchOptions

REPOSITORY = Path(__file__).resolve().parents[2]
GPUS = ("fast", "middle", "slow")
ITERATIONS, TIMEOUT_S = 4, 300.0
LINE = re.compile(r"iteration +(\d+)/ +\d+ \|.*?lm loss: ([0-9.E+-]+)")

pytestmark = pytest.mark.full


def three_kinds() -> Plan:
    """A stage on the first kind, and a replica of the second stage on each of the others."""
    replicas = [((1,), (0, 2, 3), "middle"), ((2,), (1,), "slow")]
    return make_plan(((2,), [((0,), (0, 1, 2, 3), "fast")]), ((1,), replicas), model=TINY)


def write(out: Path, target: Any, elastic: bool) -> Path:
    """The rendered file, with ports that are free on this one machine."""
    plan = three_kinds()
    training = f"--train-iters {ITERATIONS} --lr 1e-3 --eval-iters 0 --eval-interval 1000 --log-interval 1 --seed 1234"
    training += " --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --lr-decay-iters 4"
    groups = {"MODEL": model_arguments(plan, model_of(plan)), "TRAINING": training.split(), "PLATFORM": CPU_ARGUMENTS}
    found = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY)}
    launch = LaunchOptions(run_dir=str(out), python=sys.executable, save_interval=ITERATIONS, environment=found)
    pods = PodOptions(target, image="image", volumes={str(out.parent): "shared"})
    kinds = {gpu: in_pods(nodes_of(gpu, 1), gpu, resource="", accelerators=gpu) for gpu in GPUS}
    options = ElasticOptions() if elastic else None
    file = emit(plan, out, kinds, groups, launch, elastic=options, pods=pods).files[f"{target}.yaml"]
    port = str(free_port())
    file.write_text(file.read_text().replace("'29500'", f"'{port}'").replace("'29400'", f"'{port}'"))
    return file


@contextlib.contextmanager
def started(file: Path, logs: Path) -> Iterator[dict[str, Any]]:
    processes = {pod.name: pod.start(logs / f"{pod.name}.log", {}) for pod in pods_of(file)}
    try:
        yield processes
    finally:
        for process in processes.values():
            end_session(process)


@pytest.mark.parametrize(("target", "elastic"), [("jobset", False), ("skypilot", False), ("jobset", True)])
def test_a_plan_of_three_kinds_trains(tmp_path: Path, target: str, elastic: bool) -> None:
    file = write(tmp_path / "run", target, elastic)
    (tmp_path / "logs").mkdir()
    deadline_s = time.monotonic() + TIMEOUT_S
    with started(file, tmp_path / "logs") as processes:
        codes = {name: process.wait(deadline_s - time.monotonic()) for name, process in processes.items()}
    said = "\n".join(log.read_text(errors="replace")[-4000:] for log in (tmp_path / "logs").iterdir())
    assert set(codes.values()) == {0} and len(codes) == 3 + elastic, said
    logs = [
        *(tmp_path / "run").rglob("log.txt"),
        *(tmp_path / "run" / "logs").rglob("*.log"),
        *(tmp_path / "logs").iterdir(),
    ]
    found = {int(n) for log in logs for n, _ in LINE.findall(log.read_text(errors="replace"))}
    assert found == set(range(1, ITERATIONS + 1)), said
    tracker = tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text().strip() == str(ITERATIONS)
    assert len(list(yaml.safe_load_all(file.read_text()))) == (1 if target == "jobset" else 4)
