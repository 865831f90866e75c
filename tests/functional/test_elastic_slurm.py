"""``emit --elastic`` on a real Slurm: a node goes down and the job goes on; queued again, it resumes."""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.llama.job import CPU_ARGUMENTS, model_of
from megatron_het.plan import Plan
from tests.functional import slurm_cluster
from tests.unit.planner.emit_plans import TINY, make_plan, nodes_of
from tools.planner.emit.command import emit
from tools.planner.emit.elastic import ElasticOptions
from tools.planner.emit.flags import model_arguments
from tools.planner.emit.scripts import LaunchOptions

REPOSITORY = Path(__file__).resolve().parents[2]
KINDS = {name: nodes_of(name, 1, constraint=name) for name in ("big", "small")}
ITERATIONS, SAVE_INTERVAL, TIMEOUT_S = 60, 1000, 240.0
LINE = re.compile(r"iteration +(\d+)/ +\d+ \|.*?lm loss: ([0-9.E+-]+)")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=f"no Slurm: {slurm_cluster.missing()}"),
]


def plan(*second: str, first: str = "big") -> Plan:
    routes = [tuple(range(q, 4, len(second))) for q in range(len(second))]
    replicas = [((1 + q,), route, kind) for q, (route, kind) in enumerate(zip(routes, second, strict=True))]
    return make_plan(((2,), [((0,), (0, 1, 2, 3), first)]), ((1,), replicas), model=TINY)


PLANS = (plan("small", "small"), plan("small"))


def write_run(out: Path) -> Path:
    """The batch script of an elastic job with a plan for three nodes and one for two."""
    training = f"--train-iters {ITERATIONS} --lr 1e-3 --lr-decay-iters {ITERATIONS} --eval-iters 0 --eval-interval 1000"
    training += " --log-interval 1 --seed 1234 --mock-data --tokenizer-type NullTokenizer --vocab-size 128"
    groups = {
        "MODEL": model_arguments(PLANS[0], model_of(PLANS[0])),
        "TRAINING": training.split(),
        "PLATFORM": CPU_ARGUMENTS,
    }
    launch = LaunchOptions(
        run_dir=str(out),
        job_name="het-elastic",
        time_limit="00:20:00",
        python=sys.executable,
        save_interval=SAVE_INTERVAL,
        iterations=ITERATIONS,
        environment={"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY)},
    )
    more = ElasticOptions((("plan of two", PLANS[1]),))
    return emit(PLANS[0], out, KINDS, groups, launch, elastic=more).files["elastic.sbatch"]


def losses(out: Path) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for log in sorted((out / "elastic").glob("node-*/worker-*/log.txt")):
        for iteration, loss in LINE.findall(log.read_text(errors="replace")):
            found.setdefault(int(iteration), []).append(float(loss))
    return found


def until(condition: Callable[[], object], what: str, out: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        said = "\n".join(file.read_text(errors="replace")[-4000:] for file in (out / "logs").glob("*.out"))
        assert time.monotonic() < deadline_s, f"{what} did not come:\n{said}"
        time.sleep(0.1)


def history(out: Path) -> list[str]:
    file = out / "elastic" / "state.json"
    return [entry["why"] for entry in json.loads(file.read_text())["history"]] if file.exists() else []


def test_a_node_goes_down(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with slurm_cluster.SlurmCluster(tmp_path / "slurm", ["big", "small", "small"], kill_wait_s=90) as slurm:
        script = write_run(out)
        job = slurm.submit(script, {"LOST_S": "8"})
        until(lambda: len(losses(out)) >= 3, "training", out)
        slurm.take_down(2)
        until(lambda: len(history(out)) == 2, "the next generation", out)
        seen = max(losses(out))
        until(lambda: max(losses(out)) >= seen + 3, "training on two nodes", out)
        assert "JobState=RUNNING" in slurm.control("show", "job", job)
        assert (out / "elastic" / "token").stat().st_mode & 0o077 == 0
        slurm.bring_back(2)
        slurm.control("requeue", job)
        until(lambda: list((out / "elastic").glob("state-before-*.json")), "the second start", out)
        (before,) = (out / "elastic").glob("state-before-*.json")
        finished = slurm.wait(script, job, TIMEOUT_S)
    assert finished.state == "COMPLETED", finished.output[-5000:]
    assert [entry["why"] for entry in json.loads(before.read_text())["history"]] == ["start", "1 rank was lost"]
    assert history(out) == ["start"]
    found = losses(out)
    assert sorted(found) == list(range(1, ITERATIONS + 1))
    # Slurm's notice is time enough to save, far from a regular checkpoint; the failure costs one iteration at most.
    assert sum(map(len, found.values())) - ITERATIONS <= 1
    assert all(loss == pytest.approx(seen[0], rel=1e-3) for seen in found.values() for loss in seen)
    assert found[ITERATIONS][0] < found[1][0]
