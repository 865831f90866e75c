"""A headless Chromium, driven over a pipe by the Chrome DevTools protocol; the standard library is enough."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testing.runner import end_session

LIMIT_S = 240.0  # no answer of the browser is waited for any longer


def chromium() -> str | None:
    return next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


class Tab:
    """One page."""

    def __init__(self, process: subprocess.Popen[bytes], commands: int, answers: int) -> None:
        self.process, self.commands, self.answers = process, commands, answers
        self.number, self.buffer, self.session = 0, b"", ""
        self.requests: list[str] = []  # addresses that the page has asked for, the page itself included
        self.said: list[str] = []  # what was written to the console, and errors of scripts
        self.loaded: set[str] = set()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer.

        Raises:
            RuntimeError: The browser refuses the command.
            TimeoutError: No answer.
        """
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(time.monotonic() + LIMIT_S)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self.answers, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError(f"no answer of the browser in {LIMIT_S:.0f} s, exit code {self.process.poll()}")
            self.buffer += data
        text, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, body = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(body["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(body["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.said.append(body["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.said.append(json.dumps(body["args"]))
        elif method == "Page.lifecycleEvent" and body["name"] == "load":
            self.loaded.add(body["loaderId"])

    def open(self, file: Path, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setScrollbarsHidden", hidden=True)  # pictures are as wide as the window
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        # The load of the page that was shown before may be reported late: only this one's counts.
        load = self.call("Page.navigate", url=file.resolve().as_uri())["loaderId"]
        until = time.monotonic() + LIMIT_S
        while load not in self.loaded:
            self._next(until)
        self.frames()

    def frames(self) -> None:
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def value(self, script: str) -> Any:
        """What a script evaluates to.

        Raises:
            AssertionError: The script fails.
        """
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """``mouseMoved``, ``mousePressed``, ``mouseReleased`` or ``mouseWheel`` at a place in the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.frames()

    def click(self, selector: str) -> None:
        find = f"const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
        middle = "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]"
        x, y = self.value(f"(() => {{ {find} {middle} }})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def picture(self) -> bytes:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000), "scale": 1}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(answer["data"])

    def printed(self) -> bytes:
        """The page as PDF, as it goes onto A4 paper."""
        answer = self.call(
            "Page.printToPDF", printBackground=True, preferCSSPageSize=True, paperWidth=8.27, paperHeight=11.69
        )
        return base64.b64decode(answer["data"])


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    program = chromium()
    assert program is not None
    ours_read, theirs_write = os.pipe()
    theirs_read, ours_write = os.pipe()
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder}",
        "--remote-debugging-pipe",
        "about:blank",
    ]
    # The browser reads commands from descriptor 3 and answers on 4.
    script = f'exec "$0" "$@" 3<&{theirs_read} 4>&{theirs_write}'
    process = subprocess.Popen(
        ["bash", "-c", script, program, *flags],
        pass_fds=(theirs_read, theirs_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs_read)
    os.close(theirs_write)
    tab = Tab(process, ours_write, ours_read)
    try:
        target = tab.call("Target.createTarget", url="about:blank")["targetId"]
        tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        tab.call("Page.setLifecycleEventsEnabled", enabled=True)
        yield tab
    finally:
        end_session(process)
        os.close(ours_write)
        os.close(ours_read)
