"""The generated job files on a real Slurm: a heterogeneous job, and a plain one that resumes from it."""

import getpass
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.llama.data import prepare
from examples.llama.doctor import MISSING_FLAG
from examples.llama.job import CPU_ARGUMENTS, model_of
from examples.llama.pinned import SLOWED_VARIABLE
from megatron_het.doctor.check import Expectations, LinkExpectation
from megatron_het.doctor.links import pairs_of
from megatron_het.plan import Plan, plan_hash
from tests.functional.selected import tiers
from tests.unit.planner.emit_plans import TINY, changed, make_plan, nodes_of, program
from tools.planner.emit.command import Emitted, emit
from tools.planner.emit.elastic import ElasticOptions
from tools.planner.emit.flags import model_arguments
from tools.planner.emit.scripts import Container, LaunchOptions

sys.path.insert(0, str(Path(__file__).parent))
import slurm_cluster

Slurm = slurm_cluster.SlurmCluster

REPOSITORY = Path(__file__).resolve().parents[2]
KINDS = {name: nodes_of(name, size, constraint=name) for name, size in (("big", 2), ("small", 1))}
TIMEOUT_S = 480.0

pytestmark = pytest.mark.skipif(bool(slurm_cluster.missing()), reason=f"no Slurm: {slurm_cluster.missing()}")


def uneven_plan() -> Plan:
    """Two ranks on one node, one each on two others; nothing about it is even."""
    first = ((2,), [((0,), (0, 2, 3), "big"), ((1,), (1,), "small")])
    return make_plan(first, ((1,), [((2,), (0, 1), "big"), ((3,), (2, 3), "small")]), model=TINY)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm"), ["big", "small", "small"]) as running:
        yield running


@pytest.fixture(scope="module")
def data_arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    files = prepare(folder, REPOSITORY / "examples" / "llama", validation_fraction=0.2)
    return [*files.arguments, "--data-cache-path", str(folder / "cache")]


def promised(plan: Plan, bytes_per_s: float) -> Expectations:
    links = (LinkExpectation(*pair, 1.0, bytes_per_s) for pair in pairs_of(plan))
    return Expectations(plan_hash(plan), tuple(links))


def write_run(
    out: Path,
    data: list[str],
    iterations: int,
    doctor: bool = False,
    bytes_per_s: float = 1e6,
    platform: Sequence[str] = CPU_ARGUMENTS,
    **launch: Any,
) -> Emitted:
    plan = uneven_plan()
    out.mkdir(exist_ok=True)
    training = f"--train-iters {iterations} --lr 1e-3 --lr-decay-iters 10 --eval-iters 0 --eval-interval 100"
    # The second run is longer than the first one planned to be.
    training += " --log-interval 1 --seed 1234 --distributed-timeout-minutes 5 --override-opt-param-scheduler"
    groups = {
        "MODEL": model_arguments(plan, model_of(plan)),
        "DATA": data,
        "TRAINING": [*training.split(), "--het-report", str(out / f"report-{iterations}")],
        "PLATFORM": list(platform),
    }
    settings = {"time_limit": "00:20:00", "save_interval": iterations, "iterations": iterations, **launch}
    options = LaunchOptions(
        run_dir=str(out),
        job_name="het-test",
        python=sys.executable,
        environment={"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY)},
        doctor=doctor,
        **settings,
    )
    return emit(plan, out, KINDS, groups, options, expected=promised(plan, bytes_per_s))


def reports(folder: Path) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]


def findings(out: Path, status: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads((out / "logs" / "doctor.json").read_text())["findings"]:
        if finding["status"] == status:
            found.setdefault(finding["check"], []).append(finding)
    return found


@pytest.mark.full
def test_heterogeneous_job_then_plain_job_resumes(cluster: Slurm, data_arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = write_run(out, data_arguments, iterations=3, doctor=True)
    assert [n.ranks for n in first.nodes] == [(0, 2), (1,), (3,)]
    assert "to start at" in cluster.test_only(first.files["train.sbatch"])
    # Four ranks share the cores of this machine: how equally is no matter of the job.
    patient = {"HET_DOCTOR_ARGS": "--skip devices --limit-s 400"}
    job = cluster.run(first.files["train.sbatch"], patient, TIMEOUT_S)
    assert job.state == "COMPLETED", job.output[-5000:]
    assert "verdict: fit" in job.output
    assert list(findings(out, "ok")) == ["software", "flags", "disk", "links", "stress", "numerics"]
    found = reports(out / "report-3")
    assert [(r["stage"], r["replica"]) for r in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "3"

    second = write_run(out, data_arguments, iterations=5)
    job = cluster.run(second.files["train-plain.sbatch"], {}, TIMEOUT_S)
    assert job.state == "COMPLETED", job.output[-5000:]
    assert [i["iteration"] for i in reports(out / "report-5")[3]["iterations"]] == [4, 5]
    losses = [loss for _, loss in reports(out / "report-5")[3]["losses"]]
    assert losses[-1] < reports(out / "report-3")[3]["losses"][0][1]


@pytest.mark.full
def test_a_failing_rank_fails_the_job(cluster: Slurm, data_arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    emitted = write_run(out, data_arguments, iterations=3)
    # An interpreter that fails on one rank and sleeps on the others: the job must still end.
    failing = '#!/bin/bash\n[[ "$RANK" == 2 ]] && { echo "rank 2 fails" >&2; exit 7; }\nsleep 600\n'
    job = cluster.run(emitted.files["train.sbatch"], {"PYTHON": program(tmp_path / "python", failing)}, 120.0)
    assert job.state.startswith("FAILED"), job
    assert "rank 2 fails" in job.output


# The doctor's rank 2 is stopped again and again.
SLOWING = f"""#!/bin/bash
[[ "$RANK" == 2 ]] && export {SLOWED_VARIABLE}="$LOCAL_RANK"
exec {sys.executable} -m examples.llama.pinned "${{@:2}}"
"""


@pytest.mark.full
def test_the_doctor_finds_a_slow_rank_a_wrong_bandwidth_and_a_missing_flag(cluster: Slurm, tmp_path: Path) -> None:
    out, python = tmp_path / "run", program(tmp_path / "python", SLOWING)
    platform = [word for word in CPU_ARGUMENTS if word != MISSING_FLAG]
    emitted = write_run(out, [], iterations=3, doctor=True, bytes_per_s=1e13, platform=platform)
    options = "--skip numerics --skip stress --slow-ratio 1.5 --limit-s 300"
    job = cluster.run(emitted.files["train.sbatch"], {"PYTHON": python, "HET_DOCTOR_ARGS": options}, TIMEOUT_S)
    assert job.state.startswith("FAILED"), job.output[-5000:]
    assert "verdict: NOT FIT" in job.output and not (out / "report-3").exists()
    faults = findings(out, "FAULT")
    assert any(f["where"].startswith("rank 2 ") and "of its kind" in f["what"] for f in faults["devices"]), faults
    assert len(faults["links"]) == len(pairs_of(uneven_plan()))
    assert [f["where"] for f in faults["flags"] if MISSING_FLAG in f["what"]] == ["all ranks"]


# An interpreter that notes what every rank was asked to run; the doctor finds a fault on rank 2 where it is told to.
NOTING = """#!/bin/bash
echo "$2" >> "$NOTES/$RANK"
[[ "$2 $RANK $FAULT" != "megatron_het.doctor 2 yes" ]]
"""


@pytest.mark.parametrize("script", tiers(["train.sbatch", "train-plain.sbatch"], ["train-plain.sbatch"]))
@pytest.mark.parametrize(
    ("setting", "state", "ran"),
    [
        ({}, "COMPLETED", ["megatron_het.doctor", "megatron_het.pretrain_gpt"]),
        pytest.param({"FAULT": "yes"}, "FAILED", ["megatron_het.doctor"], marks=pytest.mark.full),
        pytest.param(
            {"FAULT": "yes", "HET_DOCTOR": "0"}, "COMPLETED", ["megatron_het.pretrain_gpt"], marks=pytest.mark.full
        ),
    ],
)
def test_the_doctor_comes_first_and_a_fault_ends_the_job(
    cluster: Slurm, script: str, setting: dict[str, str], state: str, ran: list[str], tmp_path: Path
) -> None:
    emitted = write_run(tmp_path / "run", [], iterations=3, doctor=True)
    python, notes = program(tmp_path / "python", NOTING), tmp_path / "notes"
    notes.mkdir()
    job = cluster.run(emitted.files[script], {"PYTHON": python, "NOTES": str(notes), **setting}, 120.0)
    assert job.state.startswith(state), job
    assert {file.name: file.read_text().split() for file in notes.iterdir()} == dict.fromkeys("0123", ran)


def test_slurm_accepts_what_an_administrator_asks_for(cluster: Slurm, tmp_path: Path) -> None:
    reservation = f"ReservationName=lab StartTime=now Duration=60 Nodes=ALL Users={getpass.getuser()}"
    cluster.control("create", "reservation", *reservation.split())
    asked = {"qos": "normal", "reservation": "lab", "licenses": "tool:2", "mem": "500M"}
    kinds = {name: changed(kind, **asked, cpus=4) for name, kind in KINDS.items()}
    whole = {name: changed(kind, gpus_per_node=1 if name == "small" else 2) for name, kind in KINDS.items()}
    for i, (chosen, launch) in enumerate(
        [(kinds, {"container": Container("/image.sif", "apptainer")}), (whole, {"modules": ("cuda",)}), (whole, {})]
    ):
        out = tmp_path / str(i)
        options = LaunchOptions(run_dir=str(out), time_limit="00:10:00", **launch)
        files = emit(uneven_plan(), out, chosen, {}, options, elastic=ElasticOptions()).files
        for name in ("train.sbatch", "train-plain.sbatch", "elastic.sbatch"):
            assert "to start at" in cluster.test_only(files[name]), name
    wrong = {name: changed(kind, licenses="tool:5") for name, kind in kinds.items()}
    script = emit(uneven_plan(), tmp_path / "wrong", wrong, {}, LaunchOptions(run_dir=str(tmp_path))).files
    with pytest.raises(AssertionError, match="license"):
        cluster.test_only(script["train-plain.sbatch"])
    cluster.control("delete", "ReservationName=lab")


@pytest.mark.full
@pytest.mark.parametrize("script", ["train.sbatch", "train-plain.sbatch"])
def test_a_job_whose_time_is_over_saves_and_goes_on(
    cluster: Slurm, data_arguments: list[str], script: str, tmp_path: Path
) -> None:
    """Slurm tells a job up to a minute early, and its shortest time is a minute."""
    out = tmp_path / "run"
    launch = {"time_limit": "00:02:00", "notice_s": 45, "save_interval": 100_000}
    file = write_run(out, data_arguments, iterations=100_000, **launch).files[script]
    job = cluster.submit(file, {})
    log = out / "logs" / f"het-test-{job}.out"
    deadline_s = time.monotonic() + TIMEOUT_S
    first: list[int] = []
    while True:  # until the second start trains
        assert time.monotonic() < deadline_s, log.read_text()[-5000:]
        parts = log.read_text().split("; the job is queued again") if log.exists() else [""]
        first = [int(n) for n in re.findall(r"iteration +(\d+)/", parts[0])]
        later = [int(n) for n in re.findall(r"iteration +(\d+)/", parts[1])] if len(parts) > 1 else []
        if later:
            break
        time.sleep(0.5)
    cluster.cancel(job)
    assert first and later[0] == first[-1] + 1
    assert f"stopped after iteration {first[-1]} of 100000" in log.read_text()
    saved = (out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()
    assert int(saved) == first[-1]


# An interpreter that saves and trains on for ever when it starts anew, and ends when it resumes.
RESUMING = """#!/bin/bash
if [[ " $* " == *" --load "* ]]; then echo "resumes" >>"$NOTES/$RANK"; exit 0; fi
mkdir -p "$SAVED"; echo 2 >"$SAVED/latest_checkpointed_iteration.txt"
echo "starts" >>"$NOTES/$RANK"; sleep 600
"""


@pytest.mark.full
def test_a_job_that_is_queued_again_resumes(cluster: Slurm, tmp_path: Path) -> None:
    """As Slurm does after a node has failed."""
    script = write_run(tmp_path / "run", [], iterations=3).files["train-plain.sbatch"]
    python, notes = program(tmp_path / "python", RESUMING), tmp_path / "notes"
    notes.mkdir()
    saved = str(tmp_path / "run" / "checkpoints")
    job = cluster.submit(script, {"PYTHON": python, "NOTES": str(notes), "SAVED": saved})
    deadline_s = time.monotonic() + 120.0
    while len(list(notes.iterdir())) < 4 and time.monotonic() < deadline_s:
        time.sleep(0.2)
    cluster.control("requeue", job)
    assert cluster.wait(script, job, 240.0).state == "COMPLETED"
    told = {file.name: file.read_text().split() for file in notes.iterdir()}
    assert told == {rank: ["starts", "resumes"] for rank in "0123"}
