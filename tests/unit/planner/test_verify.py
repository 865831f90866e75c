"""``plan --verify``: finalists that do not fit are left, the plan is searched again, and people are told."""

import json
import os
import random
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.lowering.programs import build
from megatron_het.plan import Plan, ScheduleSpec, save_plan
from testing.cases import FFN, GROUPS, HEADS, HIDDEN, MICROBATCHES, SEQUENCE, build_plan
from testing.planner_cases import write_inputs
from tests.unit.planner.eight_layers import estimator, model
from tests.unit.planner.emit_plans import answer
from tools.planner.__main__ import main
from tools.planner.cli import commands, dry_run
from tools.planner.cli import dry_run as verify
from tools.planner.costs.build import build_plan as planned
from tools.planner.costs.candidate import Candidate, Group, Stage

GIB = 2**30
CLUSTER = """
name: two nodes
nodes:
  - {gpu: A100-40, count: 1, gpus_per_node: 4, zone: here, network_bytes_per_s: 12.5e9}
"""
MODEL = """
num_layers: 6
hidden_size: 4096
ffn_hidden_size: 11008
num_attention_heads: 32
vocab_size: 32000
seq_length: 4096
global_batch_size: 8
distributed_optimizer: true
"""
Peaks = Callable[[int, int], float]
Dry, Said, Patch = Callable[[Peaks], list[dict[str, Any]]], pytest.CaptureFixture[str], pytest.MonkeyPatch


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    files = write_inputs(tmp_path, CLUSTER, MODEL)
    return ["plan", *files, "--out", str(tmp_path / "plan.json"), "--schedules", "1f1b", "--verify"]


@pytest.fixture
def dry(monkeypatch: Patch) -> Dry:
    """Stands in for the subprocess: gives every rank a peak, by the number of the call and the rank."""

    def stand_in(peak: Peaks) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def run_ranks(
            ranks: Sequence[int],
            flags: Sequence[str],
            limit_s: float,
            kernels: str,
            bound_s: float | None = None,
            folder: Path | None = None,
        ) -> dict[int, dict[str, Any]]:
            calls.append({"ranks": list(ranks), "flags": list(flags), "limit_s": limit_s, "bound_s": bound_s})
            return {r: {"memory": {"total_bytes": peak(len(calls), r)}} for r in ranks}

        monkeypatch.setattr(verify, "run_ranks", run_ranks)
        return calls

    return stand_in


def test_a_plan_that_fits_is_written(words: list[str], dry: Dry, capsys: Said) -> None:
    calls = dry(lambda call, rank: 20.0 * GIB)
    found = answer(capsys, [*words, "--verify-limit-s", "50"])["verify"]
    assert len(calls) == 1 and calls[0]["limit_s"] == verify.RANK_S and calls[0]["bound_s"] == 50.0
    assert found["complete"] and found["searches"] == 1 and not found["left"]
    assert [check["rank"] for check in found["ranks"]] == sorted(calls[0]["ranks"])
    by_rank = {check["rank"]: check["predicted_bytes"] for check in found["ranks"]}
    assert calls[0]["ranks"] == sorted(by_rank, key=lambda rank: -by_rank[rank])  # the fullest first
    assert all(20 * GIB < check["needed_bytes"] < check["capacity_bytes"] for check in found["ranks"])


def test_the_next_finalist_is_taken(words: list[str], dry: Dry, capsys: Said) -> None:
    plain = answer(capsys, words[:-1])
    calls = dry(lambda call, rank: (40.0 if call == 1 else 20.0) * GIB)
    body = answer(capsys, words)
    assert len(calls) == 2 and body["verify"]["searches"] == 1
    assert len(body["verify"]["left"]) == 1 and "needs 4" in body["verify"]["left"][0]
    assert body["iteration_s"] >= plain["iteration_s"]
    assert Path(body["plan_file"]).exists()


def test_the_plan_is_searched_again_with_a_smaller_share_of_memory(words: list[str], dry: Dry, capsys: Said) -> None:
    dry(lambda call, rank: (40.0 if call <= verify.FINALISTS else 20.0) * GIB)
    found = answer(capsys, words)["verify"]
    assert found["searches"] == 2 and len(found["left"]) == verify.FINALISTS
    assert found["memory_margin"] <= 0.95 - verify.LEAST_STEP


def test_no_plan_is_written_where_none_fits(words: list[str], dry: Dry, capsys: Said, tmp_path: Path) -> None:
    calls = dry(lambda call, rank: 41.0 * GIB)
    error = answer(capsys, words, code=2)["error"]
    assert error["key"] == "--verify" and "needs 4" in error["problem"]
    assert len(calls) <= verify.SEARCHES * verify.FINALISTS
    assert not (tmp_path / "plan.json").exists()


def test_ranks_without_figures_are_named(words: list[str], monkeypatch: Patch, capsys: Said) -> None:
    monkeypatch.setattr(verify, "run_ranks", lambda ranks, *rest, **more: {r: {"error": "too slow"} for r in ranks})
    found = answer(capsys, words)["verify"]
    assert not found["complete"] and {check["error"] for check in found["ranks"]} == {"too slow"}
    assert main(words) == 0
    ranks = ", ".join(str(check["rank"]) for check in found["ranks"])
    assert f"\nnot verified: rank{'s' * (len(found['ranks']) > 1)} {ranks}: too slow\n" in capsys.readouterr().out


def test_progress_counts_the_ranks_that_are_done(words: list[str], monkeypatch: Patch, capsys: Said) -> None:
    seen = []

    def run_ranks(ranks: Sequence[int], *_: Any, folder: Path, **__: Any) -> dict[int, Any]:
        (folder / verify.RANK_FILE.format(rank=ranks[0])).write_text("{}", encoding="utf-8")
        seen.append(made[0].progress)
        return {r: {"memory": {"total_bytes": GIB}} for r in ranks}

    made: list[verify.Verifier] = []
    init = verify.Verifier.__init__
    monkeypatch.setattr(verify.Verifier, "__init__", lambda own, *rest: (made.append(own), init(own, *rest))[1])
    monkeypatch.setattr(verify, "run_ranks", run_ranks)
    found = answer(capsys, words)["verify"]
    assert seen == [f"dry runs of ranks: 1 of {len(found['ranks'])} kinds done, 900 s at most"]


def test_the_reason_is_said_where_nobody_left_dry_runs_out(words: list[str], monkeypatch: Patch, capsys: Said) -> None:
    plain = words[:-1]
    said = "not checked by dry runs of ranks: with more than 3 GPUs"
    monkeypatch.setattr(verify, "MOST_GPUS", 3)
    assert main(plain) == 0 and said not in capsys.readouterr().out  # the tests' own environment leaves them out
    monkeypatch.delenv("HET_PLAN_VERIFY")
    assert main([*plain, "--no-verify"]) == 0 and said not in capsys.readouterr().out
    assert main(plain) == 0 and said in capsys.readouterr().out


def test_a_dry_run_that_is_not_done_in_time_is_one_line(monkeypatch: Patch, tmp_path: Path) -> None:
    def too_slow(words: Sequence[str], stdout: Any, **more: Any) -> None:
        stdout.write("a library warns\n[Rank 0] memory\n")
        raise dry_run.subprocess.TimeoutExpired(list(words), more["timeout"])

    monkeypatch.setattr(dry_run.subprocess, "run", too_slow)
    found = dry_run._run_in_turn([0, 4], [], 1.0, 120.2, tmp_path)
    assert found == {rank: {"error": "not done after 120 s"} for rank in (0, 4)}


def test_a_plan_of_many_microbatches_runs_the_first_ones_dry() -> None:
    """As many as are in flight at once, and all where all are in flight or differ in size."""
    priced = estimator(model(seq_length=4096, global_batch_size=256, distributed_optimizer=True))

    def made(schedule: str, *stages: Stage, **more: Any) -> Plan:
        candidate = Candidate(stages, 1, schedule=schedule, **more)
        return planned(priced, candidate, priced.estimate(candidate))

    uneven = Stage(4, (Group(0, 1, 4), Group(0, 2, 2))), Stage(4, (Group(0, 1, 8),))
    for plan in (
        made("1f1b", *uneven),
        made("zb-v", Stage(4, (Group(0, 2, 4),)), Stage(4, (Group(0, 2, 4),)), chunks=2),
    ):
        short = dry_run.shortened(plan)
        assert short.num_microbatches <= 64 and build(short)
        assert all(len(r.microbatches) > 1 for s in short.stages for r in s.replicas)
        assert dry_run._in_flight(build(short)[False]) == dry_run._in_flight(build(plan)[False])
        sizes = replace(plan, training=replace(plan.training, micro_batch_sizes=(1,) * plan.num_microbatches))
        assert dry_run.shortened(sizes) is sizes
    whole = made("ministage", *uneven, chunks=2, recompute="full", zero_stage=2)
    assert dry_run.shortened(whole) is whole


def test_a_model_that_cannot_run_is_refused_before_the_search(words: list[str], capsys: Said, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(MODEL + "attention_window: 64\nwindowed_layers: 0.3\n", encoding="utf-8")
    error = answer(capsys, words, code=2)["error"]
    assert error["key"] == "attention_window" and error["hint"] == "Give --no-verify"


def test_it_is_on_where_dry_runs_are_possible(words: list[str], dry: Dry, capsys: Said, monkeypatch: Patch) -> None:
    pytest.importorskip("megatron.core")
    calls = dry(lambda call, rank: 20.0 * GIB)
    plain = words[:-1]
    assert "verify" not in answer(capsys, plain)  # the tests' own environment says so
    monkeypatch.delenv("HET_PLAN_VERIFY")
    assert answer(capsys, plain)["verify"]["limit_s"] == verify.UNASKED_S and len(calls) == 1
    assert "verify" not in answer(capsys, [*plain, "--no-verify"]) and len(calls) == 1
    search = commands.search
    monkeypatch.setattr(commands, "search", lambda *given: replace(search(*given), interrupted=True))
    assert "verify" not in answer(capsys, plain) and len(calls) == 1  # whoever presses Ctrl-C waits for nothing
    assert answer(capsys, words)["verify"] and len(calls) == 2


def test_ranks_without_transformer_engine_keep_their_attention_matrices(
    words: list[str], capsys: Said, monkeypatch: Patch, tmp_path: Path
) -> None:
    kernels = []

    def run_ranks(ranks: Sequence[int], flags: Sequence[str], limit_s: float, which: str, **_: Any) -> dict[int, Any]:
        kernels.append(which)
        return {r: {"memory": {"total_bytes": GIB}} for r in ranks}

    monkeypatch.setattr(verify, "run_ranks", run_ranks)
    (tmp_path / "c.yaml").write_text(CLUSTER.replace("A100-40", "V100-32"), encoding="utf-8")
    answer(capsys, [*words, "--precision", "fp16"])
    assert kernels == ["local"]


def test_ranks_run_side_by_side(monkeypatch: Patch) -> None:
    parts: list[list[int]] = []
    monkeypatch.setattr(dry_run.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(
        dry_run, "_run_in_turn", lambda ranks, **_: parts.append(list(ranks)) or {r: {"rank": r} for r in ranks}
    )
    assert list(dry_run.run_ranks([4, 0, 9], [], 1.0, "gpu")) == [4, 0, 9]
    assert sorted(parts) == [[0], [4, 9]]


# The command ``dry-run``: which ranks it runs, with which flags, and what it refuses before anything is started.

MODEL_OF_RUN = f"""
num_layers: 5
hidden_size: {HIDDEN}
ffn_hidden_size: {FFN}
num_attention_heads: {HEADS}
num_query_groups: {GROUPS}
vocab_size: 250
seq_length: {SEQUENCE}
global_batch_size: {MICROBATCHES}
precision: fp32
"""


def plan() -> Plan:
    return build_plan([[1, 1], [2]], [2, 3], random.Random(0))


@pytest.fixture
def words_of_run(tmp_path: Path) -> list[str]:
    save_plan(plan(), tmp_path / "plan.json")
    (tmp_path / "model.yaml").write_text(MODEL_OF_RUN, encoding="utf-8")
    return ["dry-run", str(tmp_path / "plan.json"), "--model", str(tmp_path / "model.yaml"), "--json"]


def test_ranks_that_run_alike_are_one_kind() -> None:
    assert dry_run.rank_kinds(plan()) == [(0, 1), (2, 3)]
    (first, second), last = plan().stages[0].replicas, plan().stages[1]
    uneven = (replace(first, microbatches=(0,)), replace(second, microbatches=(1, 2, 3, 4, 5)))
    stages = (replace(plan().stages[0], replicas=uneven), last)
    assert dry_run.rank_kinds(replace(plan(), stages=stages)) == [(0,), (1,), (2, 3)]
    like = replace(plan().stages[0], layers=(1, 1))
    rows = [
        [replace(first, ranks=(at + i,), microbatches=tuple(range(i, 16, n))) for i in range(n)]
        for at, n in ((0, 8), (8, 2))
    ]
    training = replace(plan().training, global_batch_size=16, distributed_optimizer=True)
    stages = tuple(replace(like, replicas=tuple(row)) for row in rows)
    spec = ScheduleSpec("ministage", {"window": True})  # gathers come earlier or later beside the passes
    found = dry_run.rank_kinds(replace(plan(), stages=stages, training=training, schedule=spec))
    assert found == [tuple(range(8)), (8, 9)]


@pytest.mark.parametrize(
    ("more", "ranks"), [([], [0, 2]), (["--all"], [0, 1, 2, 3]), (["--rank", "3", "--rank", "1"], [3, 1])]
)
def test_the_asked_for_ranks_run_with_the_users_flags_last(
    words_of_run: list[str], more: list[str], ranks: list[int], monkeypatch: Patch, capsys: Said
) -> None:
    seen: dict[str, Any] = {}

    def run_ranks(
        asked: list[int], flags: list[str], limit_s: float, kernels: str, *, cuda: bool
    ) -> dict[int, dict[str, Any]]:
        seen.update(ranks=asked, flags=flags)
        return {rank: {"error": "no figures"} for rank in asked}

    monkeypatch.setattr(dry_run, "run_ranks", run_ranks)
    assert main([*words_of_run, *more, "--", "--lr", "1", "--vocab-size", "9"]) == 1 and seen["ranks"] == ranks
    assert seen["flags"][-4:] == ["--lr", "1", "--vocab-size", "9"] and "--het-plan" in seen["flags"]
    assert [row["error"] for row in json.loads(capsys.readouterr().out)["ranks"]] == ["no figures"] * len(ranks)


@pytest.mark.parametrize(
    ("change", "more", "key"),
    [
        ("", ["--rank", "4"], "--rank"),
        ("hidden_size: 128", [], "model.hidden_size"),
        ("fp8: true\nprecision: bf16", [], "fp8"),
        ("", ["--cuda", "--kernels", "cpu"], "--cuda"),
    ],
)
def test_refuses_what_cannot_run(words_of_run: list[str], change: str, more: list[str], key: str, capsys: Said) -> None:
    path = Path(words_of_run[words_of_run.index("--model") + 1])
    kept = [line for line in MODEL_OF_RUN.splitlines() if line.split(":")[0] not in change]
    path.write_text("\n".join([*kept, change]), encoding="utf-8")
    assert main([*words_of_run, *more]) == 2 and json.loads(capsys.readouterr().out)["error"]["key"] == key


def test_flags_of_megatron_are_refused_elsewhere(capsys: Said) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["check", "plan.json", "--cluster", "c.yaml", "--model", "m.yaml", "--", "--lr", "1"])
    assert stop.value.code == 2 and "--lr" in capsys.readouterr().err


def test_a_plan_without_such_a_rank_ends_before_torch_is_imported(words_of_run: list[str], capsys: Said) -> None:
    from megatron_het.dry_run.__main__ import main as run

    for flags, text in (([], "--het-plan is missing"), (["--het-plan", words_of_run[1]], "ranks 0 to 3")):
        with pytest.raises(SystemExit) as stop:
            run(["--rank", "9", "--out", "x.json", "--", *flags])
        assert stop.value.code == 2 and text in capsys.readouterr().err


def test_waits_of_the_host_are_shown(words_of_run: list[str], monkeypatch: Patch, capsys: Said) -> None:
    """Those inside operations come first, and their sum is in a line of its own."""
    waits = [
        {"what": "value read", "where": "training.py:7", "during": "", "calls": 9},
        {"what": "copy to pageable memory", "where": "channels.py:3", "during": "send_forward", "calls": 2},
    ]
    names = ("parameters", "gradients", "optimizer", "activations", "cache", "temporaries", "other")
    memory = {"by_category": dict.fromkeys(names, 0), "total_bytes": 0, "label": "F1"}
    row = {"stage": 0, "flops": {}, "traffic": [], "memory": memory, "seconds": 1.0, "host_waits": waits}

    def run_ranks(asked: list[int], *_: object, cuda: bool) -> dict[int, dict[str, Any]]:
        return {rank: row | ({"stream_waits": []} if cuda else {}) for rank in asked}

    monkeypatch.setattr(dry_run, "run_ranks", run_ranks)
    words_of_run.remove("--json")
    assert main([*words_of_run, "--rank", "0", "--cuda"]) == 0
    text = capsys.readouterr().out
    assert text.index("send_forward") < text.index("training.py:7") and "waits inside operations: 2" in text
    assert main([*words_of_run, "--rank", "0"]) == 0 and "Waits of the host" not in capsys.readouterr().out


def test_versions_plan_and_logs_are_packed_without_data(tmp_path: Path, capsys: Said) -> None:
    run, out = tmp_path / "run", tmp_path / "support.zip"
    (run / "iter_0000001").mkdir(parents=True)
    for name in ("plan.json", "args.sh", "token", "text.bin", "weights.distcp", "iter_0000001/metadata.json"):
        (run / name).write_text("x", encoding="utf-8")
    (run / "rank-0.log").write_bytes(b"a" * (1 << 20) + b"the end")
    os.mkfifo(run / "pipe.log")
    assert main(["support", str(run), "--out", str(out)]) == 0
    with zipfile.ZipFile(out) as archive:
        assert [name.split("-", 1)[-1] for name in archive.namelist()] == [
            "versions.json", "args.sh", "plan.json", "rank-0.log"]  # fmt: skip
        assert "torch" in json.loads(archive.read("versions.json"))
        log = archive.read("002-rank-0.log")
    assert len(log) == 1 << 20 and log.endswith(b"the end")
    assert main(["support", str(run), "--out", str(out)]) == main(["support", str(run / "text.bin")]) == 2
    said = capsys.readouterr().err
    assert "the file is there" in said and "text.bin: is not packed" in said
    (run / os.fsdecode(b"\xff.log")).touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: os.close(-1))
        assert main(["support", str(run), "--out", f"{out}2"]) == 2 and not Path(f"{out}2").exists()
    assert main(["support", str(run), "--out", f"{out}2"]) == 0
