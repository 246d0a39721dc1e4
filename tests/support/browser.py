"""A real Chromium that tests drive: over its debugging pipe, with nothing in between."""

import base64
import importlib
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.waiting import HANG, wait_until

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")


class Tab:
    """One page of a browser of its own; `errors` are what it complained about."""

    def __init__(self, profile):
        down, self._up = os.pipe()
        self._down, up = os.pipe()
        words = [BROWSER, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {shlex.join(words)} 3<&{down} 4>&{up}"],
            pass_fds=[down, up],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(down)
        os.close(up)
        self.errors, self._arrived, self._number, self._session = [], b"", 0, None
        (page,) = wait_until(
            lambda: [t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page"], self.process
        )
        self._session = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Performance"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **parameters):
        """One command of Chrome's DevTools protocol."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        request = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._up, json.dumps(request).encode() + b"\0")
        while True:
            message, end, rest = self._arrived.partition(b"\0")
            if not end:
                assert select.select([self._down], [], [], HANG)[0], f"{method}: no answer in {HANG} s"
                chunk = os.read(self._down, 1 << 20)
                assert chunk, "the browser has ended"
                self._arrived += chunk
                continue
            self._arrived, told = rest, json.loads(message)
            if told.get("id") == self._number:
                assert "error" not in told, told["error"]
                return told["result"]
            if told.get("method") == "Runtime.exceptionThrown":
                self.errors.append(told["params"]["exceptionDetails"].get("exception", {}).get("description"))
            elif told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.errors.append(told["params"]["entry"]["text"])

    def open(self, address, width=1280, height=900, dark=False, scripts=True):
        """Go to a page, in a window of a size."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.ask("Page.navigate", url=str(address))
        self.until("document.readyState === 'complete'")

    def value(self, expression):
        """Of an expression of JavaScript; promises are waited for."""
        told = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, expression):
        """Wait until an expression is true, and return its value."""
        return wait_until(lambda: self.value(expression), self.process)

    def text(self, selector):
        """What an element shows."""
        return self.value(f"(e => e.innerText ?? e.textContent)(document.querySelector({json.dumps(selector)}))")

    def press(self, key, **more):
        """A key."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}
        key_code = {"windowsVirtualKeyCode": codes[key], "key": key, "code": "Space" if key == " " else key}
        text = {"Enter": {"text": "\r"}, " ": {"text": " "}}.get(key, {})
        self.ask("Input.dispatchKeyEvent", type="keyDown", **key_code, **text, **more)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **key_code, **more)

    def picture(self, path, whole=False):
        """What it looks like, as a PNG file."""
        told = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(told["data"]))

    def violations(self):
        """What axe finds that is serious or critical."""
        axe = importlib.import_module("axe_core_python")
        self.value((Path(axe.__file__).parent / "axe.min.js").read_text() + "; 0")
        found = self.value("axe.run().then(r => r.violations.map(v => [v.impact, v.id, v.nodes.map(n => n.html)]))")
        return [each for each in found if each[0] in ("serious", "critical")]

    def close(self):
        """End the browser and all its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._up)
        os.close(self._down)
