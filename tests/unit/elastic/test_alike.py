"""Nodes of one job have the same releases and flags."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatron_het.elastic import alike
from megatron_het.elastic.alike import refusal, signature_of
from tests.unit.elastic.test_pool import plan

FLAGS = ("--num-layers", "8", "--mock-data", "--data-path", "a")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--num-layers", "9", *FLAGS[2:]), "the values of '--num-layers' differ: '9' here and '8' on the first node"),
        ((*FLAGS[:4], "b"), "the values of '--data-path' differ: 'b' here and 'a' on the first node"),
        (FLAGS[:4], "the values of '--data-path' differ: none here and 'a' on the first node"),
        ((*FLAGS, "--bf16"), "differ: '--bf16' here and none on the first node"),
    ],
)
def test_the_first_flag_that_differs_is_named(flags: tuple[str, ...], said: str):
    text = refusal(signature_of(flags), signature_of(FLAGS))
    assert said in text and "start all nodes of a job with the same command" in text


@pytest.mark.parametrize("name", ["megatron_het", "megatron-core"])
def test_another_release_is_named(name: str):
    other = json.dumps({**json.loads(signature_of(FLAGS)), name: "9.9"})
    assert f"{name} is '9.9' here and " in refusal(other, signature_of(FLAGS))


@pytest.mark.parametrize("other", ["", "x", "[]", "{}", "3", '{"megatron_het": 1}'])
def test_what_another_release_would_say(other: str):
    assert "another release" in refusal(other, signature_of(FLAGS)) or "megatron_het is" in refusal(
        other, signature_of(FLAGS)
    )


def test_the_same_command_is_no_difference():
    assert refusal(signature_of(FLAGS), signature_of(list(FLAGS))) == ""


def test_a_plan_is_checked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(alike, "_problems", lambda *_: ["--num-layers: 7, the plan has 5"])
    assert alike.problems_under(plan([[1]]), [], tmp_path)() == ["--num-layers: 7, the plan has 5"]

    def fails(*_: object) -> list[str]:
        raise OSError("nobody can say")

    monkeypatch.setattr(alike, "_problems", fails)
    assert alike.problems_under(plan([[1]]), [], tmp_path)() == []
    monkeypatch.setattr(alike, "CHECK_S", 0.05)
    monkeypatch.setattr(alike, "_problems", lambda *_: time.sleep(60.0))
    assert alike.problems_under(plan([[1]]), [], tmp_path)() == [], "it is ended then"
