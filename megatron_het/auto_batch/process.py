"""The measuring process of this rank, seen from the process that will train."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_het.store.job import IDENTITY

_MODULE = "megatron_het.auto_batch.measure"
_TAIL = 30
_POLL_S = 0.1


class MeasuringError(RuntimeError):
    """The measuring process failed or did not answer; the message ends with its log."""


class MeasuringProcess:
    """One process for one ZeRO stage; use as a context manager.

    Args:
        request: See ``measure.py``; written beside the log.
        folder: For the request and the log.
        watch: Called while waiting; raises if there is no use in waiting longer.
        timeout_s: Bound on every answer.
    """

    def __init__(self, request: dict[str, Any], folder: Path, watch: Callable[[], None], timeout_s: float) -> None:
        self._watch, self._timeout_s = watch, timeout_s
        name = f"measure-rank-{request['rank']}-zero-{request['zero']}"
        self._log = folder / f"{name}.log"
        request_file = folder / f"{name}.json"
        request_file.write_text(json.dumps(request), encoding="utf-8")
        commands, self._sink = os.pipe()
        self._source, answers = os.pipe()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_") or k in IDENTITY}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(request_file), str(commands), str(answers)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(commands, answers),
                env=environment,
            )
        os.close(commands)
        os.close(answers)
        self._pending = b""

    def __enter__(self) -> MeasuringProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the process, whatever it does."""
        os.close(self._sink)  # which it takes for the end
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._source)

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for the answer."""
        self.tell(**command)
        return self.answer()

    def tell(self, **command: Any) -> None:
        """Send a command.

        Raises:
            MeasuringError: The process has ended.
        """
        try:
            os.write(self._sink, json.dumps(command).encode() + b"\n")
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            MeasuringError: None came in time, or the process has ended.
        """
        end_s = time.monotonic() + self._timeout_s
        while b"\n" not in self._pending:
            if time.monotonic() > end_s:
                raise MeasuringError(f"no answer after {self._timeout_s:.0f} s\n{self._tail()}")
            self._watch()
            if not select.select([self._source], [], [], _POLL_S)[0]:
                continue
            data = os.read(self._source, 1 << 16)
            if not data:
                raise self._ended()
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def _ended(self) -> MeasuringError:
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return MeasuringError(f"closed its answers but runs on\n{self._tail()}")
        return MeasuringError(f"ended with exit code {code}\n{self._tail()}")

    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
        return "\n".join([f"--- end of {self._log} ---", *lines])
