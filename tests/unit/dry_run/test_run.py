"""Dry runs: layers of experts, what is refused, and groups of absent ranks."""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.bad_input_cases import PLAN, document_text
from megatron_het.arguments.hooks import exit_with
from megatron_het.dry_run import __main__ as command
from megatron_het.dry_run import run as dry
from megatron_het.dry_run.kernels import check_experts, equal_shares
from megatron_het.dry_run.run import _check_flags
from megatron_het.dry_run.tracker import Tracker
from megatron_het.plan import PlanError


def arguments(**more: object) -> SimpleNamespace:
    plain: dict[str, object] = {"num_experts": 8, "moe_router_topk": 2, "moe_expert_capacity_factor": None}
    plain["moe_token_dispatcher_type"] = "alltoall"
    return SimpleNamespace(**plain | {"moe_pad_expert_input_to_capacity": False} | more)


@pytest.mark.parametrize(("tokens", "parts", "shares"), [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (1, 2, [1, 0])])
def test_no_token_is_lost(tokens: int, parts: int, shares: list[int]) -> None:
    assert equal_shares(tokens, parts) == shares


def test_experts_per_token() -> None:
    assert check_experts(arguments()) == 2
    assert check_experts(arguments(num_experts=None)) == 0


@pytest.mark.parametrize(
    ("flag", "value"), [("moe_expert_capacity_factor", 1.25), ("moe_token_dispatcher_type", "allgather")]
)
def test_what_depends_on_values_is_refused(flag: str, value: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        check_experts(arguments(**{flag: value}))
    assert stop.value.code == 2
    assert f"--{flag.replace('_', '-')} {value}" in capsys.readouterr().err


def test_a_row_per_token_and_chosen_expert() -> None:
    tracker = Tracker(is_fake=True)
    tracker.top_k = 3
    with FakeTensorMode(), tracker.running():
        scores = torch.ones(8, 10, requires_grad=True)  # [experts, tokens]
        found = scores.masked_select(torch.ones(8, 10, dtype=torch.bool))
        before = tracker.live_bytes
        assert found.shape == (30,)
        found.sum().backward()
        assert scores.grad is not None and scores.grad.shape == scores.shape
        del found
    assert before >= 4 * 80 + 80 + 4 * 30  # scores, mask, and what was selected are counted


@pytest.mark.parametrize("name", ["reset_attention_mask", "optimizer_cpu_offload"])
def test_what_cannot_be_told_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _check_flags(SimpleNamespace(reset_position_ids=True))
    with pytest.raises(SystemExit) as stop:
        _check_flags(SimpleNamespace(**{name: True}))
    assert stop.value.code == 2
    assert f"--{name.replace('_', '-')}: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--rank", "0"])
    assert capsys.readouterr().err.startswith("error: ")


# Why a dry run is refused is said whichever rank it is of.


@pytest.mark.parametrize("rank", [0, 2])
def test_the_reason_is_said_once(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "0")

    def refused(setting: dry.Setting, flags: object) -> None:
        exit_with(PlanError("--seed", "x", "is no number"))

    monkeypatch.setattr(dry, "run", refused)
    (tmp_path / "plan.json").write_text(document_text(PLAN), encoding="utf-8")
    words = ["--rank", str(rank), "--out", str(tmp_path / "out.json"), "--", "--het-plan", str(tmp_path / "plan.json")]
    with pytest.raises(SystemExit) as stop:
        command.main(words)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("is no number") == 1


# Groups of absent ranks: what their work says of itself.


# In a process of its own, because nothing of it is undone.
_SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from megatron_het.dry_run.run import join_alone
from megatron_het.runtime.channels import Channels
from megatron_het.distributed import Link
join_alone(0, 2, sys.argv[1])
channels = Channels({(0, 1): Link(None, 0)}, sys.argv[1], 1.0, 0)
held = []
for _ in range(3):
    channels.send(torch.ones(4), 1, "test")
    held.append(len(channels._sends))
print(json.dumps(held))
"""


@pytest.mark.parametrize(("backend", "held"), [("nccl", [1, 1, 1]), ("gloo", [1, 2, 3])])
def test_what_was_sent_is_free_at_the_next_send_over_nccl_only(backend: str, held: list[int]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == held


def test_a_forked_rank_ends_with_the_process_that_forked_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner whose time is over kills the process that forks the ranks; the rank that ran went on for minutes."""
    monkeypatch.setattr("megatron_het.dry_run.run.import_megatron", lambda **_: None)
    monkeypatch.setattr(command, "_one_rank", lambda *_: time.sleep(60))
    reader, writer = os.pipe()
    forking = os.fork()
    if not forking:
        os._exit(command._each_alone(argparse.Namespace(kernels="gpu", cuda=False, limit_s=60.0), [], [0]))
    os.close(writer)
    time.sleep(0.5)
    os.kill(forking, signal.SIGKILL)
    os.waitpid(forking, 0)
    assert select.select([reader], [], [], 20)[0] and not os.read(reader, 1)  # nobody holds the other end
    os.close(reader)
