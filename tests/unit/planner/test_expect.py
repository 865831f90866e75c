"""What cluster file and profile promise of a plan's ranks, and the scripts that have it checked first."""

import subprocess
from pathlib import Path

from megatron_het.doctor.check import load_expectations
from megatron_het.plan import ModelShape, Plan, Replica, Stage, TrainingShape, plan_hash
from tests.unit.planner.emit_plans import program
from tools.planner.emit.command import emit, expectations
from tools.planner.emit.options import node_kinds
from tools.planner.emit.scripts import LaunchOptions
from tools.planner.inputs.cluster import cluster_from_document
from tools.planner.inputs.profile_schema import DeviceProfile, LayerTiming, Profile, ProfiledModel

PLAN = Plan(
    ModelShape(4, 64, 4, 2, 32),
    TrainingShape(2, 8),
    (
        Stage((1,), (Replica((0,), (0, 1, 2, 3), "A100-40"),)),
        Stage((3,), (Replica((1,), (0, 1, 3), "A100-40"), Replica((2,), (2,), "T4"))),
    ),
)
CLUSTER = cluster_from_document(
    {
        "nodes": [
            {"gpu": "A100-40", "count": 1, "gpus_per_node": 2, "network_bytes_per_s": 2e9, "stream_bytes_per_s": 1e9}
            | {"intra_node_bytes_per_s": 5e10},
            {"gpu": "T4", "count": 1, "gpus_per_node": 1, "network_bytes_per_s": 3e9, "network_latency_s": 5e-5},
        ]
    },
    "cluster.yaml",
)


def timing(batch: int, tp: int = 1) -> LayerTiming:
    return LayerTiming("layer", batch, tp, 32, 0.1 * batch, 0.2 * batch, 0.0, 1, 1, 1)


PROFILE = Profile(
    ProfiledModel(64, 128, 4, 2, 256, 32, "fp32"),
    [
        DeviceProfile("A100-40", 1, 2, [timing(1), timing(2), timing(2, tp=2)]),
        DeviceProfile("T4", 1, 1, [timing(4, tp=2)]),
    ],
)


def test_links_and_layers() -> None:
    found = expectations(PLAN, CLUSTER, PROFILE)
    assert found.plan_hash == plan_hash(PLAN)
    inside, outside = found.link(0, 1), found.link(0, 2)
    assert inside is not None and outside is not None and found.link(1, 2) is None
    assert inside.bytes_per_s == 5e10
    assert (outside.bytes_per_s, outside.latency_s) == (1e9, 5e-5)  # what one GPU reaches
    layer = found.layer("A100-40")
    assert layer is not None and (layer.micro_batch_size, layer.forward_s) == (2, 0.2)
    assert found.layer("T4") is None, "with tensor parallelism only"


def test_scripts_check_the_nodes_first(tmp_path: Path) -> None:
    launch = LaunchOptions(run_dir=str(tmp_path), doctor=True)
    found = expectations(PLAN, CLUSTER)
    result = emit(PLAN, tmp_path, node_kinds(CLUSTER), {"EXTRA": ["--bf16"]}, launch, expected=found)
    assert load_expectations(tmp_path / "expectations.json") == found
    for name in ("train.sbatch", "torchrun-node-0.sh"):
        text = result.files[name].read_text()
        assert text.index("diagnose' || exit $?") < text.rindex("as_")
        assert subprocess.run(["bash", "-n", result.files[name]], check=False).returncode == 0
    # Plays torchrun for one rank, and a doctor that finds what it is told to find.
    python = program(
        tmp_path / "python",
        "#!/bin/bash\n"
        'if [[ "$2" == torch.distributed.run ]]; then RANK=0 bash -c "${@: -1}"; exit; fi\n'
        'echo "$2"\n[[ "$2" == megatron_het.doctor ]] || exit 0\n'
        'printf "%s\\n" "$@" >"${PYTHON%/*}/words"\nexit $DOCTOR\n',
    )

    def run(**variables: str) -> tuple[int, list[str]]:
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": python, "MASTER_ADDR": "127.0.0.1", **variables}
        done = subprocess.run(
            ["bash", result.files["torchrun-node-0.sh"]], env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout.split()

    both = ["megatron_het.doctor", "megatron_het.pretrain_gpt"]
    assert run(DOCTOR="0") == (0, both)
    assert run(DOCTOR="1") == (1, both[:1])
    assert run(DOCTOR="1", HET_DOCTOR="0") == (0, both[1:])
    plain = (tmp_path / "words").read_text().splitlines()
    run(DOCTOR="0", HET_DOCTOR_ARGS="--skip disk  --limit-s 60 $(touch pwned)")
    more = ["--skip", "disk", "--limit-s", "60", "$(touch", "pwned)"]
    end = plain.index("--")
    assert (tmp_path / "words").read_text().splitlines() == [*plain[:end], *more, *plain[end:]]


def test_without_the_option_scripts_know_no_doctor(tmp_path: Path) -> None:
    result = emit(PLAN, tmp_path, node_kinds(CLUSTER), {}, LaunchOptions(run_dir=str(tmp_path)))
    assert "expectations.json" not in result.files
    assert not any("doctor" in path.read_text() for path in result.files.values())
