"""The pages fit a phone and a desktop, and their tables sort.

With CERTIZOO_SCREENSHOTS=FOLDER the pictures are kept there, as for those in docs/screenshots.
"""

import os
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from tests.docs.conftest import built
from tests.tools import browser
from tests.tools.browser import look

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here (Debian: apt-get install chromium)"),
]
PAGES = {
    "start": ("start.html", "Ten minutes"),
    "leaderboard": ("leaderboard.html", "Certified accuracy, model by model"),
    "zoo": ("reference/zoo.html", "cert_vit_c10"),
    "proofs": ("proofs.html", "Notation"),
    "config": ("reference/config.html", "attack.eps"),
}
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
KEPT = ("start", "leaderboard", "zoo")
WIDTH = "document.documentElement.scrollWidth"
SORT = "document.querySelectorAll('th button')[3].click(), document.querySelectorAll('th button')[3].click()"
ORDER = "[...document.querySelectorAll('tbody tr')].map(row => parseFloat(row.cells[3].textContent))"
SEARCH = """(async () => {
  const field = document.querySelector('.md-search__input');
  field.focus();
  field.value = 'LoFAST';
  field.dispatchEvent(new Event('input', {bubbles: true}));
  field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
  for (let i = 0; i < 100 && !document.querySelector('.md-search-result__item'); i++)
    await new Promise(done => setTimeout(done, 100));
  return document.querySelectorAll('.md-search-result__item').length;
})()"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("whole") / "site", "*")


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with browser.chromium(tmp_path_factory.mktemp("profile")) as address:
        yield address


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_window(name: str, size: str, whole: Path, devtools: str) -> None:
    (file, words), (width, height) = PAGES[name], SIZES[size]
    png, (found,) = look(devtools, (whole / file).as_uri(), words, width, height, WIDTH)
    assert found <= width
    image = Image.open(BytesIO(png)).convert("RGB")
    assert len(image.convert("L").getcolors() or []) > 32, "a blank page"
    if (folder := os.environ.get("CERTIZOO_SCREENSHOTS")) and name in KEPT:
        image.quantize(64).save(Path(folder) / f"{name}_{size}.png", optimize=True)


def test_the_search_finds_in_pages_from_the_disk(whole: Path, devtools: str) -> None:
    _, (count,) = look(devtools, (whole / "index.html").as_uri(), "CertiZoo", 1280, 900, SEARCH)
    assert count > 0


def test_a_click_sorts_a_column_both_ways(whole: Path, devtools: str) -> None:
    """Columns sort by number, the largest first; parameters are in millions."""
    click = SORT.partition(", ")[0]
    page = (whole / "reference/zoo.html").as_uri()
    _, (_, falling, _, rising) = look(devtools, page, "cert_vit_c10", 1280, 900, click, ORDER, click, ORDER)
    assert falling == sorted(falling, reverse=True) != rising
    assert rising == sorted(rising)
