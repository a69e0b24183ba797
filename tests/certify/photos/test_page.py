"""The page in a real browser: what is dropped is answered, on a desktop and on a phone."""

import base64
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from certify.photos.predict import Predictor
from certify.photos.server import Place
from tests.certify.photos.test_server import serving
from tests.tools import browser

SIZES = {"desktop": (1280, 1000), "phone": (390, 1500)}
# The drop of a file, and, once the page has answered, whether anything is wider than the page.
DROP = """
const bytes = Uint8Array.from(atob("DATA"), letter => letter.charCodeAt(0)), carried = new DataTransfer();
carried.items.add(new File([bytes], "digit.png"));
dispatchEvent(new DragEvent("drop", {dataTransfer: carried}));
new MutationObserver(() => { if (document.body.innerText.includes("Done.")) {
  const wide = document.documentElement.scrollWidth > innerWidth;
  document.title = wide ? "wide" : "fits"; document.body.append(wide ? "page too wide" : "page fits"); } })
  .observe(document.getElementById("state"), {childList: true, characterData: true, subtree: true});
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine (apt-get install chromium)")
def test_a_dropped_photograph_is_answered(predict: Predictor, digit: Callable[..., bytes], tmp_path: Path) -> None:
    script = DROP.replace("DATA", base64.b64encode(digit(0)).decode())
    with serving(predict, Place(port=0)) as server, browser.chromium(tmp_path / "profile") as devtools:
        for name, (width, height) in SIZES.items():
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": name == "phone"}
            shot = browser.picture(devtools, server.url, "page fits", {}, size=size, script=script, rest=0.2)
            image = Image.open(BytesIO(shot))
            assert image.size == (width, height)
            assert len(image.convert("RGB").getcolors(2**24) or []) > 50  # the digit and its attack are there
