"""Nothing that comes from others is unpickled."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import megatron_het.elastic
from megatron_het import store
from megatron_het.elastic.board import Board, ServedBoard
from megatron_het.elastic.controller import Bounds, Controller
from megatron_het.elastic.pool import GivenPlans
from tests.unit.elastic.test_pool import plan

SOURCES = sorted(
    source for package in (megatron_het.elastic, store) for source in Path(package.__path__[0]).glob("*.py")
)
COLLECTIVES = {"all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list"}
UNPICKLES = {"pickle", "Unpickler", "torch.load", *COLLECTIVES}


class Trap:
    """Says so where it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


def test_a_pickle_in_the_inbox_is_left_out(tmp_path: Path) -> None:
    """From somebody who knows the token; nobody else gets anything into it."""
    token, said = "0123456789abcdef", list[str]()
    board = ServedBoard("127.0.0.1", 0, token)
    controller = Controller(board, GivenPlans([plan([[1]])]), tmp_path / "state.json", 1, Bounds(), said.append)
    member = Board("127.0.0.1", board.port, token)
    member.ask("push", "inbox", pickle.dumps(Trap(), 0).decode())
    member.post({"type": "ready", "process": 1, "node": "n1", "device": "", "signature": "s"})
    controller._step()
    assert sum("makes no sense" in line for line in said) == 1, said
    assert [found["node"] for found in controller.status()["members"]] == ["n1"]
    board.close()


@pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])
def test_no_module_unpickles(source: Path) -> None:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
        elif isinstance(node, ast.Attribute):
            names |= {node.attr, ast.unparse(node)}
    assert not names & UNPICKLES
    assert all(hasattr(dist, name) for name in COLLECTIVES), "names of today's torch"
