"""Headless Chromium for tests, spoken to in its DevTools protocol over two pipes: no driver, no port."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from select import select
from types import TracebackType
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PLACES = ("/usr/lib/chromium/chromium-headless-shell", "/usr/lib/chromium/headless_shell")
PATIENCE_S = 60.0


def found() -> str | None:
    """Returns the path of Chromium on this machine, or None."""
    named = (shutil.which(name) for name in NAMES)
    return next((path for path in (*named, *PLACES) if path and os.access(path, os.X_OK)), None)


class BrowserError(Exception):
    """Chromium refused a command, or the page threw."""


class Browser:
    """One page in one Chromium. ``errors``: what the page has thrown, and what its console has called an error."""

    def __init__(self, program: str) -> None:
        self.errors: list[str] = []
        self._home = tempfile.mkdtemp(prefix="chromium-")
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._rest = b""
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def descriptors() -> None:
            os.dup2(to_read, 103)
            os.dup2(to_write, 104)
            os.dup2(103, 3)
            os.dup2(104, 4)

        flags = ["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += ["--no-first-run", "--disable-extensions", "--disable-dev-shm-usage", f"--user-data-dir={self._home}"]
        self._process = subprocess.Popen(
            [program, *flags, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=descriptors,
            close_fds=False,
        )
        os.close(to_read)
        os.close(to_write)
        self._session = ""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = ""
        with suppress(BrowserError, OSError):
            self.call("Browser.close")
        with suppress(OSError):
            os.close(self._write)
            os.close(self._read)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    # --- the protocol -------------------------------------------------------------------------------------------------

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self._events.append(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select([self._read], [], [], PATIENCE_S)[0]:
                raise BrowserError(f"Chromium said nothing for {PATIENCE_S:g} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise BrowserError("Chromium is gone")
            self._rest += data
        whole, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(whole)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, told = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(one.get("value", "")) for one in told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])

    def _await(self, method: str) -> None:
        while True:
            for at, event in enumerate(self._events):
                if event.get("method") == method:
                    del self._events[: at + 1]
                    return
            self._events.append(self._next())

    # --- a page -------------------------------------------------------------------------------------------------------

    def open(self, page: Path) -> None:
        """Opens a file, and waits until it is drawn."""
        self._events.clear()
        self.errors.clear()
        self.call("Page.navigate", url=page.as_uri())
        self._await("Page.loadEventFired")
        self.value("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def size(self, width: int, height: int = 900, *, dense: float = 1.0, mobile: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=dense, mobile=mobile
        )

    def medium(self, *, dark: bool = False, printed: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="print" if printed else "", features=[scheme])

    def value(self, expression: str) -> Any:
        """Returns the value of an expression in the page, awaited, as JSON represents it."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise BrowserError(str(told["exceptionDetails"].get("exception", {}).get("description")))
        return told["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements that fit, as a person sees them."""
        found: list[str] = self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)")
        return found

    def text(self, selector: str) -> str:
        return "\n".join(self.texts(selector))

    def focus(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")

    def press(self, *keys: str) -> None:
        """Keys by name (``Enter``, ``ArrowLeft``), or characters."""
        for key in keys:
            text = {"Enter": "\r", "Space": " "}.get(key, key if len(key) == 1 else "")
            name = " " if key == "Space" else key
            code = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}.get(
                key, 0
            )
            down = {"type": "keyDown" if text else "rawKeyDown", "key": name, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", **down, **({"text": text} if text else {}))
            self.call("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def hover(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def shoot(self, target: Path, *, whole: bool = True) -> None:
        """A picture of the page."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {
                "x": 0,
                "y": 0,
                "width": size["width"],
                "height": min(size["height"], 12_000),
                "scale": 1,
            }
        target.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def metrics(self) -> dict[str, float]:
        """Paint timings in milliseconds since the navigation began, by name; waits for the first contents."""
        found: Sequence[Sequence[Any]] = self.value(
            "new Promise((done) => { new PerformanceObserver((list, observer) => {"
            " const all = performance.getEntriesByType('paint').map(e => [e.name, e.startTime]);"
            " if (all.some(([name]) => name === 'first-contentful-paint')) { observer.disconnect(); done(all); }"
            " }).observe({ type: 'paint', buffered: true }); })"
        )
        return {name: float(at) for name, at in found}
