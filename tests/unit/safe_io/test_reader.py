"""``| head``: a command whose reader has left ends without an error, its help too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMANDS = ["tools.planner", "megatron_het.elastic", "megatron_het.doctor", "megatron_het.schedule"]
COMMANDS += ["megatron_het.dry_run", "megatron_het.megatron_patches"]
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
"""Output is written at the end, as by default; argparse itself ignores that nobody reads what is written at once."""


@pytest.mark.parametrize("module", COMMANDS)
def test_help_that_nobody_reads(module: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, env=BUFFERED, timeout=120, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_without_an_output() -> None:
    command = ["sh", "-c", f"exec {sys.executable} -m megatron_het.elastic --help >&-"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=BUFFERED, timeout=120, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr
