"""Files that may be anything: read within limits, shown within limits, written to regular files only.

The records of refusals (``tests/golden``) have what is refused: JSON, YAML, aliases that multiply, special places.
"""

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bad_input_cases import SPECIAL
from megatron_het import safe_io


def test_json_that_is_read() -> None:
    document = {"a": [1, -2.5, True, None, '[{\\"}]', "😀"], "b": {"c": 2**63 - 1}}
    assert safe_io.parse_json(json.dumps(document), "f") == document


def test_depth_is_found_in_linear_time() -> None:
    started = time.process_time()
    with pytest.raises(safe_io.FileError):
        safe_io.parse_json('"' + '\\"' * 4_000_000, "f")
    assert time.process_time() - started < 5


def test_yaml_that_is_read() -> None:
    text = "a: &x {b: 12.5e9, c: null, d: True}\ne:\n  <<: *x\n  b: 1_000\nf: 2024-01-01\ng: 'no'\nh: [~, -3]\n"
    assert safe_io.parse_yaml(text, "f") == {
        "a": {"b": 12.5e9, "c": None, "d": True},
        "e": {"b": 1000, "c": None, "d": True},
        "f": "2024-01-01",
        "g": "no",
        "h": [None, -3],
    }


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_special_files_are_neither_read_nor_written(make: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "special"
    make(path)
    before = os.lstat(path)
    for use in (safe_io.read_text, safe_io.check_target, lambda p: safe_io.write_text(p, "x")):
        with pytest.raises(safe_io.FileError):
            use(path)
    assert stat.S_IFMT(os.lstat(path).st_mode) == stat.S_IFMT(before.st_mode)
    assert os.lstat(path).st_ino == before.st_ino and list(tmp_path.iterdir()) == [path]


def test_too_large_and_not_text(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 2000)
    with pytest.raises(safe_io.FileError, match="larger than 1 KiB"):
        safe_io.read_text(path, 1024)
    path.write_bytes(b"\xef\xbb\xbfa")  # as editors of Windows begin a file
    assert safe_io.read_text(path) == "a"
    path.write_bytes(b"a\xff")
    with pytest.raises(safe_io.FileError, match="byte 1: not UTF-8"):
        safe_io.read_text(path)


def test_a_file_is_replaced_as_a_whole_and_a_link_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "folder" / "a.json", tmp_path / "link.json"
    safe_io.write_json(target, {"a": 1})
    link.symlink_to(target)
    safe_io.write_json(link, {"a": 2})
    assert link.is_symlink() and safe_io.read_json(target) == {"a": 2}
    with pytest.raises(ValueError):
        safe_io.write_json(target, {"a": float("nan")})
    assert safe_io.read_json(target) == {"a": 2} and list(target.parent.iterdir()) == [target]
    safe_io.write_text(target, "x", executable=True)
    assert os.access(target, os.X_OK)
    monkeypatch.setattr(os, "fsync", lambda _: os.close(-1))  # an error without a name, as of a full disk
    with pytest.raises(OSError, match=str(target)):
        safe_io.write_json(target, {"a": 1})
    assert target.read_text() == "x" and list(target.parent.iterdir()) == [target]


def test_shown_is_repr_within_a_bound() -> None:
    for value in ("a\nb", [1, "x", (2,)], {"a": {"b": None}}, 1.5, True):
        assert safe_io.shown(value) == repr(value)
    bomb: Any = "x" * 100
    for _ in range(60):
        bomb = [bomb] * 10
    for value in (bomb, "y" * 10**7, {"k": ["z"] * 10**6}, 10**9999):
        assert len(safe_io.shown(value, 100)) <= 100
    assert safe_io.one_line("a\x1b[2J\x00b") == "a\\x1b[2J\\x00b"


# ``| head``: a command whose reader has left ends without an error, its help too.

COMMANDS = ["tools.planner", "megatron_het.elastic", "megatron_het.doctor", "megatron_het.schedule"]
COMMANDS += ["megatron_het.dry_run", "megatron_het.megatron_patches"]
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
"""Output is written at the end, as by default; argparse itself ignores that nobody reads what is written at once."""


TABLE = "megatron_het.schedule compare --pp 4 --microbatches 4 --slices 8 --chunks 2"


@pytest.mark.parametrize("words", [*(f"{name} --help" for name in COMMANDS), TABLE])
def test_an_output_that_nobody_reads(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", *words.split()]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, env=BUFFERED, timeout=120, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("completion bash >&-", 0, ""),
        ("check a --cluster b --model c 2>&-", 2, ""),
        ("completion bash >/dev/full", 2, "error: output: No space left on device\n"),
    ],
)
def test_a_stream_that_is_closed_or_full_at_the_start(words: str, code: int, said: str) -> None:
    command = ["sh", "-c", f"exec {sys.executable} -m tools.planner {words}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (code, said)
