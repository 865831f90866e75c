"""What an administrator asks of a job: shares of nodes, containers, modules, its end; scripts without a fault."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_het.plan import Plan
from testing.planner_cases import write_inputs
from tests.unit.planner.emit_plans import (
    KINDS,
    LAUNCH,
    batch_job,
    changed,
    even_plan,
    make_plan,
    nodes_of,
    program,
    uneven_plan,
)
from tests.unit.planner.emit_plans import PLAIN_KINDS as PLAIN
from tests.unit.planner.emit_plans import POD_KINDS as IN_PODS
from tests.unit.planner.pods import SHELLCHECK, pods_of
from tools.planner.__main__ import main, parser_of
from tools.planner.emit import command as commands
from tools.planner.emit.command import Emitted, emit
from tools.planner.emit.elastic import ElasticOptions
from tools.planner.emit.options import node_kinds
from tools.planner.emit.pods import PodOptions, part_names
from tools.planner.emit.scripts import Container, LaunchOptions, het_sbatch, plain_obstacle, plain_sbatch
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup, SlurmSettings
from tools.planner.inputs.packing import components, place

PYXIS = Container("registry#image:tag", "pyxis", ("/data", "/home/me:/home:ro"))
APPTAINER = Container("/images/het.sif", "apptainer", ("/data:/data:ro",))
ALL: dict[str, Any] = {
    "doctor": True,
    "iterations": 9,
    "modules": ("cuda/12.4",),
    "prologue": "umask 027\n",
    "cpus_per_task": 3,
}


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (make venv brings it)")
def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    uncommon = {name: changed(kind, python="/env/bin/python") for name, kind in KINDS.items()}
    files: list[Path] = []
    for i, (kinds, launch, elastic) in enumerate(
        [
            (KINDS, {}, None),
            (PLAIN, {**ALL, "container": PYXIS}, None),
            (uncommon, {**ALL, "container": PYXIS, "at_time_limit": "chain"}, None),
            (uncommon, {"container": APPTAINER, "at_time_limit": "stop"}, ElasticOptions()),
            (PLAIN, {"iterations": 9, "modules": ("cuda",)}, ElasticOptions()),
        ]
    ):
        out = tmp_path / str(i)
        emit(even_plan(), out, kinds, {}, LaunchOptions(run_dir=str(out), **launch), elastic=elastic)
        files += [path for path in out.iterdir() if path.suffix in (".sh", ".sbatch") and path.name != "prologue.sh"]
    done = subprocess.run([str(SHELLCHECK), *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[:5000]
    assert len(files) > 20


def request(kinds: dict[str, NodeGroup], launch: LaunchOptions = LAUNCH) -> list[str]:
    text = het_sbatch(place(even_plan(), kinds), kinds, launch)
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH --nodes")]


def test_the_ranks_of_a_node_share_its_cores_and_its_memory() -> None:
    big, small = request(KINDS)
    assert big.endswith("--gres=gpu:a100:4 --exclusive --mem=0") and small.endswith(
        "--gres=gpu:l4:2 --exclusive --mem=0"
    )
    known = {"big": changed(KINDS["big"], gpus_per_node=8, cpus=64), "small": changed(KINDS["small"], cpus=12)}
    big, small = request(known)
    # Half of the GPUs of a node get half of its cores, and what memory Slurm gives them.
    assert "--cpus-per-task=8 " in big and "--exclusive" not in big and "--mem" not in big
    assert "--cpus-per-task=6 " in small and "--exclusive" not in small and small.endswith("--mem=0")
    big, _ = request(known, replace(LAUNCH, cpus_per_task=5))
    assert "--cpus-per-task=5 " in big
    text = het_sbatch(place(even_plan(), known), known, replace(LAUNCH, cpus_per_task=5))
    assert "srun --het-group=0,1 --cpus-per-task=5 --kill-on-bad-exit=1" in text


def test_a_plain_job_asks_for_what_its_smallest_node_has() -> None:
    kinds = {"big": changed(PLAIN["big"], cpus=64), "small": changed(PLAIN["small"], cpus=8)}
    text = plain_sbatch(place(even_plan(), kinds), kinds, LAUNCH)
    assert "--ntasks-per-node=4 --cpus-per-task=2 --constraint='[a100*1&l4*2]' --mem=0" in text
    kinds["small"] = changed(kinds["small"], qos="low")
    assert "differ in 'qos'" in plain_obstacle(place(even_plan(), kinds), kinds)


def test_each_component_has_its_own_requests_and_options_fill_in() -> None:
    slurm = SlurmSettings(constraint="a100", qos="high", licenses="tool:2", mem="64G", exclusive=True, cpus=16)
    group = {"count": 1, "gpus_per_node": 2}
    cluster = Cluster(nodes=(NodeGroup(gpu="A100-40", slurm=slurm, **group), NodeGroup(gpu="T4", **group)))
    words = ["plan", "--cluster", "c", "--model", "m", "--qos", "low", "--reservation", "r1", "--mem", "7000"]
    kinds = node_kinds(cluster, parser_of("emit").parse_args([*words, "--no-exclusive"]))
    plan = make_plan(((4,), [((0, 1), (0, 1, 2, 3), "A100-40")]), ((4,), [((2, 3), (0, 1, 2, 3), "T4")]))
    text = het_sbatch(place(plan, kinds), kinds, LAUNCH)
    assert (
        "--cpus-per-task=8 --constraint=a100 --qos=high --reservation=r1 --licenses=tool:2 --gres=gpu:2 --exclusive "
        "--mem=64G\n#SBATCH hetjob\n"
        "#SBATCH --nodes=1 --ntasks-per-node=2 --qos=low --reservation=r1 --gres=gpu:2 --mem=7000\n"
    ) in text


@pytest.mark.parametrize(
    "launch",
    [
        {"modules": ("cuda; touch x",)},
        {"modules": ("-x",)},
        {"notice_s": 0},
        {"time_limit": "00:01"},  # a second
        {"container": Container("a b")},
        {"container": Container("$(x)\n")},
        {"container": Container("image", mounts=("relative",))},
        {"container": Container("image", mounts=("/a,/b",))},
    ],
)
def test_settings_that_are_refused(launch: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="emit: --"):
        emit(even_plan(), tmp_path, KINDS, {}, LaunchOptions(run_dir=str(tmp_path), **launch))
    assert list(tmp_path.iterdir()) == []


def test_an_elastic_job_does_not_go_with_pyxis(tmp_path: Path) -> None:
    launch = LaunchOptions(run_dir=str(tmp_path), container=PYXIS)
    with pytest.raises(PlannerError, match="controller runs in the batch"):
        emit(even_plan(), tmp_path, KINDS, {}, launch, elastic=ElasticOptions())


# Slurm's commands, as far as the script asks them.
COMMANDS = {
    "scontrol": """
case "$1 $2" in
    "show hostnames") echo n1 ;;
    "show node") echo "NodeName=$3 NodeAddr=127.0.0.1 x=1" ;;
    "show job") echo "JobId=$3 JobState=RUNNING" ;;
    "requeue $2") echo "requeue $2" >>"$NOTES"; kill -KILL $PPID ;;
esac""",
    "sbatch": 'echo "sbatch $*" >>"$NOTES"',
    "srun": """
echo "srun $*" >>"$NOTES"
while [[ "$1" == --* ]]; do shift; done
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=$WORLD_SIZE
exec "$@" """,
    "apptainer": """
echo "apptainer $*" >>"$NOTES"
while [[ "$1" != *.sif ]]; do shift; done
exec "${@:2}" """,
}

# A rank that saves and ends on SIGUSR1, or as it is told.  A shell cannot listen to what was ignored before it.
RANK = f"""#!{sys.executable} -S
import os, pathlib, signal, sys

def save(*_):
    tracker = pathlib.Path(os.environ["CHECKPOINTS"], "latest_checkpointed_iteration.txt")
    tracker.write_text("6")
    sys.exit(0)

signal.signal(signal.SIGUSR1, save)
with open(os.environ["NOTES"], "a") as notes:
    print("rank", os.environ["RANK"], os.environ["FROM_PROLOGUE"], *sys.argv[1:], file=notes)
if os.environ["CODE"]:
    sys.exit(int(os.environ["CODE"]))
signal.alarm(60)
signal.pause()
"""


def start(tmp_path: Path, code: str = "", then: str = "", **launch: Any) -> tuple[subprocess.Popen[str], Path]:
    """The batch script of a job on one node, with a line after the start; the file of what its commands were asked."""
    for name, text in {**COMMANDS, "rank": RANK}.items():
        program(tmp_path / "bin" / name, text if name == "rank" else f"#!/bin/bash\n{text}\n")
    plan = make_plan(((8,), [((0,), (0, 1, 2, 3), "big")]))
    out = tmp_path / "a run"
    emitted = emit(plan, out, KINDS, {}, LaunchOptions(run_dir=str(out), **launch))
    notes, script = tmp_path / "notes", emitted.files["train.sbatch"]
    script.write_text(script.read_text().replace(" &\n", f" &\n{then}\n"))
    own = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NOTES": str(notes)}
    own |= {"PYTHON": str(tmp_path / "bin" / "rank"), "SLURM_JOB_NODELIST": "n1", "CODE": code, "FROM_PROLOGUE": "no"}
    return batch_job(script, **own), notes


def told(job: subprocess.Popen[str], notes: Path) -> str:
    """Slurm's notice, once the rank is there; what the job said."""
    deadline_s = time.monotonic() + 30.0
    while not (notes.exists() and "\nrank" in notes.read_text()):
        assert time.monotonic() < deadline_s and job.poll() is None, job.communicate()[0]
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    return job.communicate(timeout=30.0)[0]


@pytest.mark.parametrize(
    ("launch", "asked", "said"),
    [
        ({"iterations": 9}, "requeue 7", "stopped after iteration 6 of 9; the job is queued again"),
        (
            {"at_time_limit": "chain"},
            "sbatch --dependency=afterany:7",
            "stopped after iteration 6; another job goes on",
        ),
        ({"at_time_limit": "stop"}, "", "submit the script again"),
        ({"iterations": 6}, "", ""),
    ],
    ids=["requeue", "chain", "stop", "done"],
)
def test_near_the_end_of_its_time_a_job_saves_and_goes_on(
    launch: dict[str, Any], asked: str, said: str, tmp_path: Path
) -> None:
    job, notes = start(tmp_path, **launch)
    output = told(job, notes)
    lines = notes.read_text().splitlines()
    assert said in output and (not asked or lines[-1].startswith(asked)), (lines, output)
    assert asked or lines[-1].startswith("rank")
    assert "--exit-signal-handler --exit-signal SIGUSR1" in notes.read_text()
    assert job.returncode == (-signal.SIGKILL if asked.startswith("requeue") else 0)


def test_a_notice_right_after_the_start_is_heard(tmp_path: Path) -> None:
    then = 'until grep -q "^rank" "$NOTES"; do sleep 0.05; done; kill -USR1 $$'
    job, _ = start(tmp_path, then=then, at_time_limit="stop")
    assert "stopped after iteration 6" in job.communicate(timeout=30.0)[0]


def test_the_exit_code_is_that_of_the_ranks(tmp_path: Path) -> None:
    job, notes = start(tmp_path, code="3")
    output = job.communicate(timeout=30.0)[0]
    assert job.returncode == 3, output
    assert "requeue" not in notes.read_text()


@pytest.mark.parametrize("container", [PYXIS, APPTAINER])
def test_ranks_run_in_a_container_after_the_prologue(container: Container, tmp_path: Path) -> None:
    # A user's text that reads a variable which is not set, and whose last command fails.
    prologue = 'FROM_PROLOGUE=yes\n[[ -n "$NOT_SET" ]]\n'
    job, notes = start(tmp_path, code="0", container=container, prologue=prologue)
    assert job.communicate(timeout=30.0)[0] == "" and job.returncode == 0
    srun, *more = [line for line in notes.read_text().splitlines() if line.split()[0] in ("srun", "apptainer", "rank")]
    run = tmp_path / "a run"
    if container is PYXIS:
        given = f"--container-image=registry#image:tag --container-mounts={run}:{run},/data:/data,/home/me:/home:ro "
        assert given in srun
    else:
        assert more.pop(0).startswith(f"apptainer exec --nv --bind {run} --bind /data:/data:ro /images/het.sif /")
    assert len(more) == 1 and more[0].startswith("rank 0 yes -m megatron_het.pretrain_gpt")


def test_modules_are_loaded_before_anything_runs(tmp_path: Path) -> None:
    launch = LaunchOptions(run_dir=str(tmp_path), modules=("cuda/12.4", "nccl"))
    text = emit(uneven_plan(), tmp_path, KINDS, {}, launch).files
    for name in ("train.sbatch", "torchrun-node-0.sh"):
        body = text[name].read_text()
        assert body.index("module load cuda/12.4 nccl") < body.index("train() {")
    function = 'module() { echo loads "$@"; }\n'
    settings = text["torchrun-node-0.sh"].read_text().split("if [[ -s")[0]
    done = subprocess.run(["bash", "-c", function + settings], capture_output=True, text=True, check=True)
    assert done.stdout == "loads load cuda/12.4 nccl\n"


# Launches without Slurm: what the files say, and which rank every pod runs.

SCHEMA = json.loads((Path(__file__).parent / "jobset_schema.json").read_text())
# Interpreters that say what they were started as: of torchrun, and of a node of an elastic job.
PYTHON = """#!/bin/bash
echo "$MASTER_ADDR:$MASTER_PORT $MEGATRON_HET_TOKEN_FILE $* $HET_RANKS"
[[ "$*" != *controller-only* ]] || echo 0123456789abcdef >"$ELASTIC/token"
"""


def write(tmp_path: Path, target: Any, plan: Plan | None = None, elastic: bool = False, **more: Any) -> Emitted:
    out, python = tmp_path / "a run", program(tmp_path / "python", PYTHON)
    options = {"image": "registry/image:1", "volumes": {str(tmp_path): "shared"}, **more}
    launch = LaunchOptions(run_dir=str(out), job_name=options.pop("job_name", "het"), python=python)
    return emit(
        plan or even_plan(),
        out,
        options.pop("kinds", IN_PODS),
        {},
        launch,
        elastic=ElasticOptions(inputs=("c", "m")) if elastic else None,
        pods=PodOptions(target, **options),
    )


@pytest.mark.parametrize("elastic", [False, True])
def test_a_jobset_is_one(tmp_path: Path, elastic: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = yaml.safe_load(write(tmp_path, "jobset", elastic=elastic, queue="lab").files["jobset.yaml"].read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert document["metadata"] == {"name": "het", "labels": {"kueue.x-k8s.io/queue-name": "lab"}}
    spec = document["spec"]
    jobs = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
    assert list(jobs) == [*(["controller"] if elastic else []), "big", "small"]
    assert {name: job["completions"] for name, job in jobs.items() if name != "controller"} == {"big": 1, "small": 2}
    pods = {name: job["template"]["spec"] for name, job in jobs.items()}
    assert pods["small"]["nodeSelector"] == {"gpu": "l4"}
    assert pods["small"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    if elastic:
        assert spec["successPolicy"]["targetReplicatedJobs"] == ["controller"]
        assert spec["failurePolicy"]["maxRestarts"] == 0 and jobs["small"]["backoffLimit"] > 100
        assert "resources" not in pods["controller"]["containers"][0]
    else:
        assert spec["failurePolicy"]["maxRestarts"] == 10 and jobs["small"]["backoffLimit"] == 0


def test_a_job_group_has_a_task_for_each_kind(tmp_path: Path) -> None:
    header, big, small = yaml.safe_load_all(write(tmp_path, "skypilot").files["skypilot.yaml"].read_text())
    assert header == {"name": "het", "execution": "parallel"}
    assert big["resources"] == {"accelerators": "A100:4", "infra": "aws", "image_id": "docker:registry/image:1"}
    assert small["resources"]["use_spot"] is True and small["num_nodes"] == 2
    assert big["file_mounts"] == {str(tmp_path): {"source": "shared", "mode": "MOUNT"}}
    assert big["envs"]["MASTER_ADDR"] == small["envs"]["MASTER_ADDR"] == "big-0.het"


def said(tmp_path: Path, emitted: Emitted, target: str) -> dict[str, str]:
    found = {}
    for pod in pods_of(emitted.files[f"{target}.yaml"]):
        log = tmp_path / f"{pod.name}.log"
        pod.start(log, {}).wait(timeout=60.0)
        found[pod.name.removeprefix("het-")] = log.read_text()
    return found


@pytest.mark.parametrize("target", ["jobset", "skypilot"])
def test_every_pod_runs_the_ranks_of_its_node(tmp_path: Path, target: str) -> None:
    # Kinds take turns: the nodes of a kind are not in a row in the plan.
    rows = [((i,), (0, 1, 2, 3), "big" if i % 2 == 0 else "small") for i in range(4)]
    plan = make_plan(*(((2,), [row]) for row in rows))
    kinds = {name: changed(kind, gpus_per_node=1, gres="gpu") for name, kind in IN_PODS.items()}
    found = said(tmp_path, write(tmp_path, target, plan, kinds=kinds), target)
    suffix = "-0" if target == "jobset" else ""
    names = [f"{kind}{suffix}-{index}" for kind in ("big", "small") for index in (0, 1)]
    assert list(found) == names
    for i, name in enumerate(names):
        assert f"--nnodes=4 --node-rank={i} --nproc-per-node=1" in found[name]
        assert found[name].startswith(f"127.0.0.1:29500 {tmp_path}/a run/token ")
        assert found[name].rstrip().endswith("0 2 1 3")


@pytest.mark.parametrize("target", ["jobset", "skypilot"])
def test_an_elastic_job_has_a_controller_and_an_agent_in_every_pod(tmp_path: Path, target: str) -> None:
    emitted = write(tmp_path, target, elastic=True)
    if SHELLCHECK:
        subprocess.run([SHELLCHECK, str(emitted.files["elastic-node.sh"])], check=True)
    assert "torchrun-node-0.sh" not in emitted.files
    found = list(said(tmp_path, emitted, target).values())
    assert "--controller 127.0.0.1:29400" in found[0] and "--controller-only --nodes 3" in found[0]
    assert [line.split("--node ")[1].split(" -- ")[0] for line in found[1:]] == [
        "big-0 --device big --workers 4",
        "small-0 --device small --workers 2",
        "small-1 --device small --workers 2",
    ]
    # Its state belongs to one start: a controller that comes back has it, another start keeps it aside.
    folder = tmp_path / "a run" / "elastic"
    (folder / "state.json").write_text("{}")
    said(tmp_path, emitted, target)
    assert (folder / "state.json").exists()
    (folder / "start").write_text("of another start")
    said(tmp_path, emitted, target)
    assert not (folder / "state.json").exists() and len(list(folder.glob("state-before-*"))) == 1


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"image": ""}, "--container"),
        ({"volumes": {"/elsewhere": "x"}}, "--volume"),
        ({"job_name": "a_b"}, "--job-name"),
        ({"job_name": "a" * 60}, "longer than the 63 letters"),
        ({"kinds": KINDS}, ": kubernetes: .* are asked for by the same words"),
    ],
)
def test_what_kubernetes_would_refuse(tmp_path: Path, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlannerError, match=problem):
        write(tmp_path, "jobset", **more)
    assert not (tmp_path / "a run").exists()


def test_names_of_groups_differ() -> None:
    gpus = ["RTX-3090", "rtx 3090", "controller", "***"]
    kinds = {name: nodes_of(name, 1, gres=f"gpu:{i}") for i, name in enumerate(gpus)}
    plan = make_plan(*(((2,), [((i,), (0, 1, 2, 3), name)]) for i, name in enumerate(gpus)))
    names = part_names(components(place(plan, kinds), kinds), kinds)
    assert names == ["rtx-3090", "rtx-3090-n1", "controller-n0", "nodes"]


def test_the_command_takes_settings_of_the_cluster_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = [("A100-80", "a100"), ("V100-32", "v100")]
    one = {"count": 1, "gpus_per_node": 1}
    nodes = [one | {"gpu": gpu, "kubernetes": {"node_selector": {"gpu": label}}} for gpu, label in groups]
    model = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1000}
    model |= {"seq_length": 256, "global_batch_size": 8, "precision": "fp16"}
    inputs = write_inputs(tmp_path, {"nodes": nodes}, model)
    assert main(["plan", *inputs, "--limit-s", "1", "--schedules", "1f1b", "--out", str(tmp_path / "p.json")]) == 0
    words = ["emit", str(tmp_path / "p.json"), *inputs, "--out", str(tmp_path / "run"), "--container", "image"]
    assert main([*words, "--target", "jobset", "--volume", f"claim:{tmp_path}", "--queue", "lab"]) == 0
    text = (tmp_path / "run" / "jobset.yaml").read_text()
    assert "gpu: a100" in text and "claimName: claim" in text and not (tmp_path / "run" / "train.sbatch").exists()
    (tmp_path / "run" / "expectations.json").touch()
    assert main(words) == 0 and "wrong for this one: expectations.json, jobset.yaml. Remove" in capsys.readouterr().out
    capsys.readouterr()

    def takes_seconds(*_: Any) -> list[str]:
        raise AssertionError("Megatron was imported for what is refused without it")

    monkeypatch.setattr(commands, "check_start", takes_seconds)
    for name, said in (("--job-name", "no job name"), ("--qos", "no quality of service"), ("--mem", "no amount")):
        assert main([*words, name, "a b"]) == 2 and f"{name} = 'a b': is {said}" in capsys.readouterr().err
    assert main([*words, "--target", "skypilot", "--volume", f"s3://b:{tmp_path}"]) == 2
    assert "skypilot.accelerators" in capsys.readouterr().err
    jobset = ["--target", "jobset", "--volume", f"claim:{tmp_path}"]
    assert main([*words, *jobset, "--volume", f"b:{tmp_path}"]) == 2 and "claim is mounted" in capsys.readouterr().err
    for asked in (
        *(["--qos", "high", *jobset], ["--time-limit", "24:00:00", *jobset], ["--notice-s", "99", *jobset]),
        *(["--modules", "cuda", *jobset], ["--restarts", "3"], ["--restarts", "3", "--elastic", *jobset]),
        *(["--no-exclusive", *jobset], ["--notice-s", "99", "--time-limit", "UNLIMITED"]),
    ):
        assert main([*words, *asked]) == 2
        assert asked[0].replace("no-", "") in (error := capsys.readouterr().err) and "does nothing with" in error
    for target, name, said in (("skypilot", "claim", "s3://BUCKET"), ("jobset", "s3://b", "CLAIM"), ("slurm", "c", "")):
        assert main([*words, "--target", target, "--volume", f"{name}:{tmp_path}"]) == 2
        assert "--volume" in (error := capsys.readouterr().err) and said in error
