"""Pictures of web pages by a headless Chromium.

They go through its DevTools (https://chromedevtools.github.io/devtools-protocol).
"""

import asyncio
import base64
import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from certizoo.processes import end_group

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
SIZE = {"width": 1440, "height": 810, "deviceScaleFactor": 1, "mobile": False}
START_SECONDS, PAGE_SECONDS = 120.0, 240.0


@contextmanager
def chromium(profile: Path) -> Iterator[str]:
    """Start a browser with a fresh profile, and yield the address of its DevTools."""
    command = ["chromium", *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        file, deadline = profile / "DevToolsActivePort", time.monotonic() + START_SECONDS
        while not file.is_file() or not file.read_text().count("\n"):
            assert process.poll() is None, "Chromium ended"
            assert time.monotonic() < deadline, "Chromium did not start"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{file.read_text().splitlines()[0]}"
    finally:
        end_group(process)


def picture(
    devtools: str,
    url: str,
    words: str,
    seen: Mapping[str, Any],
    size: Mapping[str, Any] = SIZE,
    script: str = "",
    rest: float = 3,
) -> bytes:
    """Return the page as PNG, once it shows `words` and has come to rest.

    `seen` sets its localStorage, as of earlier visits. `script` runs once when the page is loaded.
    """
    return asyncio.run(_look(devtools, url, words, seen, size, script, rest, (), "light"))[0]


def look(
    devtools: str, url: str, words: str, width: int, height: int, *questions: str, script: str = "", mode: str = "light"
) -> tuple[bytes, list[Any]]:
    """Return (the page as PNG, answers to questions in JavaScript), once the page shows `words` in this window size.

    `script` runs once when the page is loaded. `mode`: the colours that the reader prefers, light or dark.
    """
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    return asyncio.run(_look(devtools, url, words, {}, size, script, 1, questions, mode))


async def _look(
    devtools: str,
    url: str,
    words: str,
    seen: Mapping[str, Any],
    size: Mapping[str, Any],
    script: str,
    rest: float,
    questions: Sequence[str],
    mode: str,
) -> tuple[bytes, list[Any]]:
    async with aiohttp.ClientSession() as session, session.put(f"{devtools}/json/new") as answer:
        tab = await answer.json(content_type=None)
        async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            remember = "".join(
                f"localStorage.setItem({json.dumps(key)}, {json.dumps(json.dumps(value))});"
                for key, value in seen.items()
            )
            await _call(socket, "Page.addScriptToEvaluateOnNewDocument", source=remember)
            await _call(socket, "Emulation.setDeviceMetricsOverride", **size)
            preferred = {"name": "prefers-color-scheme", "value": mode}
            await _call(socket, "Emulation.setEmulatedMedia", features=[preferred])
            await _call(socket, "Page.enable")
            await _call(socket, "Page.bringToFront")  # a hidden page is not drawn
            await _call(socket, "Page.navigate", url=url)
            if script:
                await _ready(socket, url)
                await _call(socket, "Runtime.evaluate", expression=script)
            text, deadline = "", time.monotonic() + PAGE_SECONDS
            while words not in text:
                assert time.monotonic() < deadline, f"{url} does not show {words!r}, but:\n{text[:3000]}"
                await asyncio.sleep(0.5)
                text = str(await _answer(socket, "document.body?.innerText ?? ''"))
            await asyncio.sleep(rest)  # animations come to rest
            shot = await _call(socket, "Page.captureScreenshot", format="png")
            return base64.b64decode(shot["data"]), [await _answer(socket, question) for question in questions]


async def _ready(socket: aiohttp.ClientWebSocketResponse, url: str) -> None:
    """Wait until this page has replaced the one before it."""
    here = f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url.partition('?')[0])})"
    deadline = time.monotonic() + PAGE_SECONDS
    while not await _answer(socket, here):
        assert time.monotonic() < deadline, f"{url} does not come"
        await asyncio.sleep(0.1)


async def _answer(socket: aiohttp.ClientWebSocketResponse, question: str) -> Any:
    """Return the value of an expression; of a promise, its result."""
    said = await _call(socket, "Runtime.evaluate", expression=question, returnByValue=True, awaitPromise=True)
    return said["result"].get("value")


async def _call(socket: aiohttp.ClientWebSocketResponse, method: str, **params: Any) -> dict[str, Any]:
    """Send one command and return its answer, skipping other messages."""
    await socket.send_json({"id": 1, "method": method, "params": params})
    while True:
        said = await socket.receive_json(timeout=PAGE_SECONDS)
        if "id" in said:
            assert "result" in said, said
            return dict(said["result"])
