"""The page in a real browser answers a dropped image, on a desktop and on a phone.

With CERTIZOO_SCREENSHOTS=FOLDER the pictures are kept there, as for those in docs/screenshots.
"""

import base64
import os
import shutil
from collections.abc import Callable
from io import BytesIO
from itertools import product
from pathlib import Path

import pytest
from PIL import Image

from certify.photos.predict import Predictor
from certify.photos.server import Place
from tests.tools import browser
from tests.tools.photo_server import serving

SIZES = {"desktop": (1440, 1300), "phone": (390, 1900)}
DROP = """
const bytes = Uint8Array.from(atob("DATA"), letter => letter.charCodeAt(0)), carried = new DataTransfer();
carried.items.add(new File([bytes], "digit.png"));
dispatchEvent(new DragEvent("drop", {dataTransfer: carried}));
"""
WIDTH = "document.documentElement.scrollWidth"
SLIDE = """[0, 100, 300].map((share) => {
  document.getElementById("eps").value = share; document.getElementById("eps").dispatchEvent(new Event("input"));
  return document.getElementById("size").textContent; })"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine (apt-get install chromium)")
def test_a_dropped_photograph_is_answered(predict: Predictor, digit: Callable[..., bytes], tmp_path: Path) -> None:
    script = DROP.replace("DATA", base64.b64encode(digit(0)).decode())
    with serving(predict, Place(port=0)) as server, browser.chromium(tmp_path / "profile") as devtools:
        for (name, (width, height)), mode in product(SIZES.items(), ("light", "dark")):
            asked = (devtools, server.url, "Done.", width, height, WIDTH, SLIDE)
            png, (found, words) = browser.look(*asked, script=script, mode=mode)
            assert found <= width
            assert ["proved" in words[0], *("an attack of this size" in word for word in words[1:])] == [True] * 3
            image = Image.open(BytesIO(png)).convert("RGB")
            assert image.size == (width, height)
            assert len(image.getcolors(2**24) or []) > 50  # the page shows the digit and its attack
            if folder := os.environ.get("CERTIZOO_SCREENSHOTS"):
                image.quantize(256).save(Path(folder) / f"serve_{name}_{mode}.png", optimize=True)
