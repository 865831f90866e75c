"""``make gpu-check`` without a GPU: parts that are stand-ins; what fails, hangs or dies ends no other part."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import check, checkpoint, offload, slice_attention, trainings
from benchmarks.gpu.cases import CaseError, Setting, run_cases
from benchmarks.gpu.check import PARTS, Part, judged_by, read_figures, run_all, share_s
from benchmarks.gpu.offload import VARIANTS, figures
from benchmarks.parity import measure
from megatron_het.arguments.megatron_args import _check_fp8
from megatron_het.attention.kernels import KERNELS
from megatron_het.features.registry import check_plan_alone
from megatron_het.lowering.programs import build
from megatron_het.plan.validate import check_plan
from testing.cases import common_flags
from testing.compare import BOUNDS
from testing.lab import Lab
from testing.runner import JobError
from tests.unit.elastic.notes import runs

WRITE = "import sys, json; json.dump({{'x': {}}}, open(sys.argv[1], 'w'))"


def part(name: str, code: str, limit_s: float = 60.0) -> Part:
    return Part(name, ("-c", code, "{json}"), limit_s, judged_by("x", least=1.0))


def test_parts_fail_alone(tmp_path):
    parts = [
        part("good", WRITE.format(2)),
        part("low", WRITE.format(0.5)),
        part("dies", "import os; print('last words', flush=True); os.kill(os.getpid(), 9)"),
        part("hangs", "import time; time.sleep(600)", limit_s=2.0),
        part("silent", "pass"),
        part("broken", "import sys; open(sys.argv[1], 'w').write('{')"),
        part("late", WRITE.format(3) + "; raise SystemExit(1)"),  # a benchmark below its bar says so like this
        part("last", WRITE.format(1)),
    ]
    report = run_all(parts, tmp_path / "out.json", {"device": "none"}, limit_s=600.0)
    passed = {name: result["passed"] for name, result in report["parts"].items()}
    assert [name for name, good in passed.items() if good] == ["good", "late", "last"]
    assert not report["passed"] and report["device"] == "none"
    assert "ended after 2 s" in report["parts"]["hangs"]["what"]
    assert report["parts"]["dies"]["log"] == ["last words"]
    assert json.loads((tmp_path / "out.json").read_text()) == report


def test_ranks_of_a_part_that_is_ended_end_as_well(tmp_path):
    """They lead sessions of their own, and their parent is not there to end them."""
    code = (
        "import subprocess, sys, pathlib, time; p = subprocess.Popen(['sleep', '600'], start_new_session=True); "
        "pathlib.Path(sys.argv[1]).with_suffix('.pid').write_text(str(p.pid)); time.sleep(600)"
    )
    target = tmp_path / "rank.json"
    one = Part("rank", ("-c", code.replace("sys.argv[1]", repr(str(target)))), 3.0, judged_by("x", least=1.0))
    run_all([one], tmp_path / "out.json", {})
    number = int(target.with_suffix(".pid").read_text())
    assert not runs(number)  # a zombie until whoever adopts it looks


def test_the_next_part_waits_for_ranks_that_still_end(monkeypatch):
    left = [2, 1, 0]
    monkeypatch.setattr(check, "_kill", lambda own: left.pop(0))
    check._end("mark")
    assert not left


def test_a_part_that_hangs_leaves_the_others_their_time(tmp_path):
    """All but the last one hang: it runs none the less, and all of them together keep to the limit."""
    parts = [part(f"hangs {i}", "import time; time.sleep(600)", limit_s=40.0) for i in range(3)]
    report = run_all([*parts, part("last", WRITE.format(1), limit_s=100.0)], tmp_path / "out.json", {}, limit_s=32.0)
    results = report["parts"]
    assert [name for name, result in results.items() if result["passed"]] == ["last"]
    assert all(result["elapsed_s"] < 16 for result in results.values())
    assert share_s(PARTS, check.LIMIT_S) < PARTS[0].limit_s  # limits are for slow parts, not for all to be spent
    assert share_s(PARTS[1:], check.LIMIT_S) >= 0.85 * PARTS[1].limit_s
    assert check.LIMIT_S < 9 * 60


def test_cases_of_a_part_fail_alone(tmp_path, capsys):
    """Each has a row as soon as it has ended, and what has not ended counts as a failure meanwhile."""
    seen = []

    def fails():
        seen.append(json.loads((tmp_path / "out.json").read_text()))
        raise CaseError("wrong")

    def breaks():
        raise KeyError("missing")

    setting = Setting(tmp_path / "out.json", "cpu", tmp_path, 1e9)
    assert run_cases(setting, {"good": lambda: {"x": 1}, "bad": fails, "broken": breaks}) == 1
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["failures"], found["failed"], found["not_run"]) == (2, ["bad", "broken"], [])
    assert found["cases"]["good"]["x"] == 1 and found["cases"]["bad"]["error"] == "wrong"
    assert seen[0]["failures"] == 2 and seen[0]["not_run"] == ["bad", "broken"]
    assert run_cases(setting, {"good": dict}, at_once=2) == 0 and "broken" in capsys.readouterr().out


def test_checkpoints_move_between_plans_that_can_run():
    for precision in ("fp32", "bf16"):
        for one in checkpoint.moves(precision).values():
            for plan in (one.first, one.second):
                check_plan(plan)
                check_plan_alone(plan)
                assert plan.world_size == 2 and plan.training.precision == precision
            assert one.first.model == one.second.model and build(one.first) != build(one.second)


def test_offload_has_figures_before_its_last_run():
    took = {"nothing": 1.0, "parameters": 1.01, "parameters and activations": 1.02}
    runs = {name: [{"iteration_s": took[name]}] if name in took else [] for name in VARIANTS}
    found = figures(runs)
    assert found["passed"] and found["max_slowdown"] == pytest.approx(0.02) and set(found["slowdowns"]) == set(took)
    found = figures(runs | {"parameters and activations": []})
    assert not found["passed"] and found["max_slowdown"] is None and found["not_run"] == ["parameters and activations"]
    assert figures({name: [] for name in VARIANTS})["slowdowns"] == {}


def offload_runs(out: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, dict[str, Any]]:
    """The command without its trainings: one of the variants fails, and each takes 10 s on a clock of its own."""
    now_s = [0.0]

    def run(_runner: object, name: str, *_unused: object) -> dict[str, float]:
        now_s[0] += 10.0
        if name == "parameters":
            raise offload.VariantError("parameters: exit code 1")
        return {"iteration_s": 1.0}

    monkeypatch.setattr(offload, "run", run)
    monkeypatch.setattr(offload, "Runner", lambda *_unused, **_more: contextlib.nullcontext())
    monkeypatch.setattr(offload, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(sys, "argv", ["offload", "--small", "--json", str(out), *words])
    code = offload.main()
    return code, json.loads(out.read_text()) if out.exists() else {}


def test_an_offload_variant_that_fails_ends_no_other(tmp_path, monkeypatch):
    code, found = offload_runs(tmp_path / "found.json", monkeypatch, "--rounds", "2")
    assert code == 1
    assert found["errors"] == {"parameters": "parameters: exit code 1"} and found["not_run"] == ["parameters"]
    assert [len(runs) for runs in found["runs"].values()] == [2, 0, 2, 2]


def test_offload_ends_before_its_limit(tmp_path, monkeypatch):
    """What is judged comes first; a part that is ended from outside has not passed."""
    _, found = offload_runs(tmp_path / "found.json", monkeypatch, "--rounds", "3", "--limit-s", "39")
    assert [len(runs) for runs in found["runs"].values()] == [1, 0, 1, 0]
    offload_part = next(part for part in PARTS if part.name == "offload")
    assert "{limit_s}" in offload_part.command and list(VARIANTS)[1:3] == list(offload.JUDGED)


def test_counts_of_pytest(tmp_path):
    path = tmp_path / "tests.json"
    path.write_text('<testsuites><testsuite tests="5" skipped="2" failures="0" errors="0"/></testsuites>')
    judge = next(part for part in PARTS if part.name == "tests").judge
    assert judge(read_figures(path)) == (True, "3 tests ran, 0 failed")
    assert not judge({"tests": 2, "skipped": 2, "failures": 0, "errors": 0})[0]
    assert not judge({"tests": 2, "skipped": 0, "failures": 1, "errors": 0})[0]


def test_parts_can_be_started():
    assert len({p.name for p in PARTS}) == len(PARTS)
    for one in PARTS:
        assert "{json}" in one.command
        module = one.command[1]
        if module.startswith("benchmarks"):
            __import__(module)


def test_without_a_gpu_nothing_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "hardware", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("something was started"))
    assert check.main(["--json", str(tmp_path / "out.json")]) == check.NO_GPU
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("has_te", [False, True])
def test_trainings_have_every_schedule_and_valid_plans(has_te, capsys):
    chosen = trainings.cases(has_te)
    names = [case.name for case in chosen]
    assert len(set(names)) == len(names) and {c.plan.schedule.name for c in chosen} >= {"slimpipe", "ministage", "zb-v"}
    for case in chosen:  # as a start does, before any process group
        check_plan(case.plan)
        check_plan_alone(case.plan)
        build(case.plan)
        flags = common_flags(*case.reference, device="cuda", has_te=has_te)
        assert ("--spec" in flags) <= (not has_te) and "gloo" not in (*flags, *case.plan_flags("cuda"))
        assert ("--bf16" in flags) == has_te
        # Rounding of slices in bf16 must not decide which expert a token goes to.
        assert ("--moe-router-topk" in case.extra) == (
            has_te and case.name in ("mixtral-slimpipe", "deepseek_v3-slimpipe")
        )
    assert trainings.main(["--dry"]) == 0 and len(capsys.readouterr().out.splitlines()) == len(names)


def test_trainings_in_fp8_have_sizes_for_it():
    chosen = trainings.fp8_cases()
    assert len({case.name for case in chosen}) == len(chosen) <= 10
    assert all(2 <= case.plan.world_size <= 4 for case in chosen)  # several at once share the GPU
    for case in chosen:
        check_plan(case.plan)
        check_plan_alone(case.plan)
        build(case.plan)
        words = [*case.extra, *case.own]
        recipe = words[words.index("--fp8-recipe") + 1]
        _check_fp8(case.plan, SimpleNamespace(fp8="hybrid", fp8_recipe=recipe, transformer_impl="transformer_engine"))
        assert case.chosen["precision"] in BOUNDS["cuda"] and "--bf16" in common_flags(*case.reference, device="cuda")


def test_fp8_that_nobody_computes_is_a_failure(tmp_path, monkeypatch):
    chosen = [case for case in trainings.fp8_cases() if case.name == "fp8-against-bf16"]
    figures = {f"relative_{key}_difference": 1e-3 for key in ("loss", "validation", "gradient", "norm")}

    def measured(cases, *_unused, on_entry, **_more):
        on_entry({"name": cases[0].name, "chosen": cases[0].chosen, **figures})

    monkeypatch.setattr(trainings, "measure", measured)
    monkeypatch.setattr(trainings, "has_gpu", lambda: True)
    assert trainings.train(chosen, tmp_path / "out.json", True, 1e9)["failed"] == ["fp8-against-bf16"]
    figures["relative_gradient_difference"] = 0.05
    assert trainings.train(chosen, tmp_path / "out.json", True, 1e9)["failures"] == 0


def test_trainings_count_what_did_not_run(tmp_path, monkeypatch):
    """What is written after the first case counts all others as failures, and a bad figure is one."""
    chosen = [case for case in trainings.cases(False) if case.plan.schedule.name in ("1f1b", "gpipe", "slimpipe")][:3]
    good = {f"relative_{key}_difference": 0.0 for key in ("loss", "validation", "gradient", "norm")}
    seen = []

    def measured(cases, _folder, _at_once, _device, *, on_entry, **_more):
        for case, entry in zip(cases, (good, good | {"relative_loss_difference": 1.0}), strict=False):
            on_entry({"name": case.name, "chosen": case.chosen, **entry})
            seen.append(json.loads((tmp_path / "out.json").read_text())["failures"])

    monkeypatch.setattr(trainings, "measure", measured)
    found = trainings.train(chosen, tmp_path / "out.json", False, 1e9)
    assert seen == [2, 2] and found["failed"] == [chosen[1].name] and found["not_run"] == [chosen[2].name]


def test_a_case_whose_reference_fails_ends_no_other(tmp_path, monkeypatch):
    def fails(self, case):
        raise JobError("no reference")

    monkeypatch.setattr(Lab, "reference", fails)
    monkeypatch.setattr("benchmarks.parity.Runner", lambda *a, **k: contextlib.nullcontext(FakeRunner()))
    entries = measure(trainings.cases(False)[:2], tmp_path, 1, "cuda")
    assert [entry["error"] for entry in entries] == ["its reference: no reference"] * 2


class FakeRunner:
    device, has_te = "cuda", False

    def run_all(self, jobs, *, at_once):
        return iter(list(jobs))


@pytest.mark.parametrize("works", [True, False])
def test_trainings_share_the_gpu_by_a_service_of_their_own(tmp_path, monkeypatch, works: bool):
    control, said = tmp_path / "bin" / "nvidia-cuda-mps-control", tmp_path / "said"
    control.parent.mkdir()
    control.write_text(
        f'#!/bin/sh\necho "$@ $CUDA_MPS_PIPE_DIRECTORY" >> {said}\ncat >> {said}\nexit {int(not works)}\n'
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{control.parent}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with trainings.shared_gpu(tmp_path):
        assert os.environ.get("CUDA_MPS_PIPE_DIRECTORY") == (str(tmp_path / "mps") if works else None)
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    first, *more = said.read_text().splitlines()
    assert first == f"-d {tmp_path / 'mps'}"
    assert ("quit -t 5" in more) is works


@pytest.mark.parametrize(("slices", "throughput", "margin"), [(8, 0.92, -0.03), (16, 0.86, 0.01), (32, 0.1, None)])
def test_slices_of_more_tokens_have_a_higher_bar(slices: int, throughput: float, margin: float | None):
    entry = {"kernel": KERNELS[0].name, "tokens": 32768, "slices": slices, "relative_throughput": throughput}
    assert slice_attention.report_of([entry], [KERNELS[0]], False)["least_margin"] == pytest.approx(margin)
