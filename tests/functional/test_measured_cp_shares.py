"""Context-parallel ranks of several speeds: parts by measurement or by plan; the losses are those of one process."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_het.plan import save_plan
from testing.compare import plan_losses, reference_losses, reported_losses
from testing.lab import OBSERVE, Lab
from testing.planner_cases import write_inputs
from testing.runner import Finished, Job, Runner
from tests.functional.selected import new_case
from tests.functional.test_auto_batch import FLAGS
from tests.unit.planner.emit_plans import answer
from tools.planner.__main__ import main as het_plan

_STEPS = ("--micro-batch-size", "1", "--calculate-per-token-loss", "--het-schedule", "1f1b", "--global-batch-size", "2")
_SLOW = 2


def run(runner: Runner, folder: Path, name: str, world_size: int, *more: str) -> Finished:
    setup = ("tests.functional.slowed_rank:slow_one", {"slow": _SLOW}) if world_size > 1 else None
    argv = (*FLAGS, *_STEPS, "--het-report", str(folder / name), *more)
    return runner.run(Job(name, world_size, argv, folder / f"log-{name}", setup=setup, timeout_s=900.0))


def test_parts_follow_the_speed_and_losses_stay(runner: Runner, tmp_path: Path) -> None:
    run(runner, tmp_path, "alone", 1)
    parallel = ("--pipeline-model-parallel-size", "2", "--context-parallel-size", "2", "--het-measured-cp-shares")
    done = run(runner, tmp_path, "parts", 4, *parallel)
    (said,) = (line for line in done.log(0).splitlines() if "context-parallel parts by measured speed" in line)
    slow, fast = map(int, said.rpartition("stage 1, ranks 2 to 3: ")[2].split())
    assert slow < fast, said
    alone, parts = (reported_losses(tmp_path / name) for name in ("alone", "parts"))
    assert len(alone) == 3
    assert parts == pytest.approx(alone, rel=1e-5)
    hashes = {json.loads((tmp_path / "parts" / f"rank-{rank}.json").read_text())["plan_hash"] for rank in range(4)}
    assert len(hashes) == 1


_CORE = "memory_bytes: 4000000000, memory_bytes_per_s: 2.0e+10, intra_node_bytes_per_s: 5.0e+9, source: a core"
CLUSTER = f"""
nodes:
- {{gpu: fast, count: 1, gpus_per_node: 1, network_bytes_per_s: 1.0e+9}}
- {{gpu: slow, count: 1, gpus_per_node: 2, network_bytes_per_s: 1.0e+9}}
gpus:
  fast: {{flops: {{fp32: 9.0e+10}}, is_processor: true, {_CORE}}}
  slow: {{flops: {{fp32: 3.0e+10}}, is_processor: true, {_CORE}}}
"""
MODEL = """
{name: small, num_layers: 5, hidden_size: 64, ffn_hidden_size: 96, num_attention_heads: 8, num_query_groups: 4,
 vocab_size: 256, seq_length: 32, global_batch_size: 6, precision: fp32}
"""


def test_an_emitted_plan_of_two_kinds_trains(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two kinds share every sequence in a stage, three to one; another stage is on the slower kind."""
    case = new_case("two-kinds", [[1], [1]], [3, 2], cp=[[2], [1]], shares=(3, 1))
    shared, other = (stage.replicas[0] for stage in case.plan.stages)
    placed = replace(shared, device="fast + slow", cp_devices=("fast", "slow")), replace(other, device="slow")
    stages = tuple(replace(s, replicas=(r,)) for s, r in zip(case.plan.stages, placed, strict=True))
    case = replace(case, plan=replace(case.plan, stages=stages))
    save_plan(case.plan, tmp_path / "plan.json")
    given = [str(tmp_path / "plan.json"), *write_inputs(tmp_path, CLUSTER, MODEL)]
    assert answer(capsys, ["simulate", *given])["iteration_s"] > 0
    assert het_plan(["emit", *given, "--out", str(tmp_path / "run")]) == 0
    script = f'source "{tmp_path}/run/args.sh" && printf "%s\\n" "${{MEGATRON_ARGS[@]}}"'
    emitted = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    job = lab.job(case)
    at = job.argv.index("--het-plan")  # that of the emitted flags counts, and of the case what they leave to the user
    done = lab.runner.run(replace(job, argv=(*emitted, *job.argv[:at], *job.argv[at + 2 :])))
    stock, alone = emitted.index("--het-plan"), tmp_path / "alone"
    argv = (*emitted[:stock], *emitted[stock + 2 :], *job.argv[:at])
    lab.runner.run(Job("alone", 1, argv, alone, setup=(OBSERVE, {"out": str(alone), "gradients": False})))
    expected = reference_losses(alone)["losses"]
    assert len(expected) == lab.steps
    assert plan_losses(done.job.log_dir, case.plan)["losses"] == pytest.approx(expected, rel=1e-6)
