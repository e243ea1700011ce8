"""Drive Chromium through its debugging pipe, for tests and pictures: no driver and no package is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage",
    "--no-first-run", "--mute-audio", "--hide-scrollbars", "--remote-debugging-pipe", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
_SECONDS = 60.0


class Tab:
    """A page of the browser. `requests` has the URLs that it asked for, `problems` what it said on the console."""

    def __init__(self, pipe: Pipe, width: int = 1440, height: int = 900) -> None:
        self._pipe = pipe
        self._target = pipe.call("Target.createTarget", url="about:blank")["targetId"]
        attached = pipe.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol for this page."""
        return self._pipe.call(method, self._session, **parameters)

    def _events(self, method: str) -> Iterator[dict[str, Any]]:
        self.call("Runtime.evaluate", expression="0")  # reads what has come
        for event in self._pipe.events:
            if event.get("sessionId") == self._session and event["method"] == method:
                yield event["params"]

    def forget(self) -> None:
        """Drop what was said and asked for."""
        self._pipe.events.clear()

    def close(self) -> None:
        """Close the tab."""
        self._pipe.call("Target.closeTarget", targetId=self._target)
        self.forget()

    @property
    def requests(self) -> list[str]:
        """URLs that the page asked for."""
        return [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    @property
    def problems(self) -> list[str]:
        """Exceptions, and what the browser refused."""
        thrown = self._events("Runtime.exceptionThrown")
        logged = self._events("Log.entryAdded")
        return [
            *(json.dumps(event["exceptionDetails"]) for event in thrown),
            *(event["entry"]["text"] for event in logged if event["entry"]["level"] == "error"),
        ]

    def resize(self, width: int, height: int, *, mobile: bool = False, scale: float = 1) -> None:
        """Set the size in CSS pixels, each `scale` pixels of a picture wide."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile)  # fmt: skip

    def dark(self, dark: bool) -> None:
        """Prefer dark or light pages."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """Return what an expression gives, as JSON."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _SECONDS
        while not self.run(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                text = self.run("document.body.innerText.slice(0, 2000)")
                raise AssertionError(
                    f"{expression} is never true. Problems: {self.problems}. {text}"
                )
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press a key and let it go."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}.get(key, ord(key[0]))
        for kind, more in (("keyDown", text), ("keyUp", {})):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)  # fmt: skip

    def screenshot(self, quality: int = 90) -> bytes:
        """Return what is visible as WebP."""
        options = {"format": "webp", "quality": quality, "optimizeForSpeed": False}
        return base64.b64decode(self.call("Page.captureScreenshot", **options)["data"])

    def printed(self) -> bytes:
        """Return the page on paper, as PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])


class Pipe:
    """The protocol's messages, each ended by a zero byte."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._buffer = b""
        self._last = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method, and return its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writing, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._reading], [], [], _SECONDS)[0]:
                raise AssertionError("Chromium does not answer")
            if not (data := os.read(self._reading, 1 << 16)):
                raise AssertionError("Chromium has ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


def _moved(descriptor: int) -> int:
    """Return the same file under a number that is not 3 or 4, which are the browser's."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


@contextmanager
def chromium(profile: Path) -> Iterator[Pipe]:
    """Run Chromium with a profile of its own."""
    to_browser, ours = map(_moved, os.pipe())
    mine, from_browser = map(_moved, os.pipe())
    wired = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    argv = ["bash", "-c", wired, str(PROGRAM), *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        argv, pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )  # fmt: skip
    os.close(to_browser)
    os.close(from_browser)
    pipe = Pipe(mine, ours)
    try:
        yield pipe
        pipe.call("Browser.close")
        process.wait(_SECONDS)
    finally:
        process.kill()
        process.wait()
        os.close(mine)
        os.close(ours)
