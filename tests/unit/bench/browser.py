# SPDX-License-Identifier: Apache-2.0
"""A real headless Chromium, driven over its own debugging pipe; nothing but the standard library."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Optional


def find() -> Optional[str]:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page. Network events are recorded, so that a test can say that nothing was fetched."""

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.size = (width, height)
        self.dark = dark
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.dialogs: list[str] = []

    def __enter__(self) -> Browser:
        program = find()
        if program is None:
            raise RuntimeError("no chromium")
        self._home = tempfile.mkdtemp(prefix="browser-")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [
            *(program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
            *(f"--user-data-dir={self._home}", f"--window-size={self.size[0]},{self.size[1]}", "about:blank"),
        ]
        # The browser reads commands on 3 and writes answers on 4.
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "browser", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: Optional[str] = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        width, height = self.size
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        if self.dark:
            self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._home, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 60
        while True:
            answer = self._next(until)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._event(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("the browser ended")
            self._rest += data
        text, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(text))

    def _event(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.as_uri())
        until = time.monotonic() + 60
        while self.value("document.readyState") != "complete" and time.monotonic() < until:
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def key(self, key: str, text: str = "") -> None:
        codes = {"Enter": 13, "Tab": 9, "Space": 32}
        fields: dict[str, Any] = {"key": " " if key == "Space" else key, "code": key}
        if key in codes:
            fields["windowsVirtualKeyCode"] = codes[key]
        text = text or {"Enter": "\r", "Space": " "}.get(key, "")
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def type(self, text: str) -> None:
        for letter in text:
            self.key(letter, letter)

    def screenshot(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


# Every box whose content is cut: wider or higher than itself and not made to scroll.
CLIPPED = """
[...document.querySelectorAll("body *")].filter(e => {
  const s = getComputedStyle(e);
  if (e.closest("svg") || !e.clientWidth || e.matches(".scroll, input, select, option")) return false;
  const cut = s.overflowX === "hidden" || s.overflowX === "clip";
  const out = e.scrollWidth > e.clientWidth + 1 && s.display !== "inline" && !e.querySelector(".scroll");
  const past = e.getBoundingClientRect().right > document.documentElement.clientWidth + 1 && !e.closest(".scroll");
  return (cut && out) || past || (out && s.overflowX === "visible" && !e.closest("table"));
}).map(e => e.tagName + "." + e.className + ": " + e.textContent.slice(0, 60))
"""
