"""A page in a window of any size: its picture, and what it answers to questions in JavaScript."""

import asyncio
import base64
import time
from typing import Any

import aiohttp

from tests.tools.browser import PAGE_SECONDS, _call


def look(devtools: str, url: str, words: str, width: int, height: int, *questions: str) -> tuple[bytes, list[Any]]:
    """(the page as PNG once it shows `words`, the answers). `devtools`: the address that `browser.chromium` gives."""
    return asyncio.run(_look(devtools, url, words, width, height, questions))


async def _look(
    devtools: str, url: str, words: str, width: int, height: int, questions: tuple[str, ...]
) -> tuple[bytes, list[Any]]:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    async with aiohttp.ClientSession() as session, session.put(f"{devtools}/json/new") as answer:
        tab = await answer.json(content_type=None)
        async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            await _call(socket, "Emulation.setDeviceMetricsOverride", **size)
            await _call(socket, "Page.enable")
            await _call(socket, "Page.bringToFront")  # a page behind another one is not drawn
            await _call(socket, "Page.navigate", url=url)
            deadline = time.monotonic() + PAGE_SECONDS
            while words not in str(await _answer(socket, "document.body?.innerText ?? ''")):
                assert time.monotonic() < deadline, f"{url} does not show {words!r}"
                await asyncio.sleep(0.2)
            await asyncio.sleep(1)  # what moves comes to rest
            shot = await _call(socket, "Page.captureScreenshot", format="png")
            return base64.b64decode(shot["data"]), [await _answer(socket, question) for question in questions]


async def _answer(socket: aiohttp.ClientWebSocketResponse, question: str) -> Any:
    """The value of an expression; of a promise, what it comes to."""
    said = await _call(socket, "Runtime.evaluate", expression=question, returnByValue=True, awaitPromise=True)
    return said["result"].get("value")
