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
    "start": ("index.html", "Certify my model"),
    "digits": ("start.html", "Ten minutes"),
    "leaderboard": ("leaderboard.html", "cert_vit_c10"),
    "faq": ("faq.html", "BatchNorm"),
    "zoo": ("reference/zoo.html", "cert_vit_c10"),
    "proofs": ("proofs.html", "Notation"),
    "config": ("reference/config.html", "attack.eps"),
}
SIZES = {"phone": (390, 844), "desktop": (1440, 900)}
KEPT = ("start", "leaderboard")
RANKING = "document.querySelector('.ranking tbody tr')?.scrollIntoView({block: 'center'})"
DARK = "document.body.setAttribute('data-md-color-scheme', 'slate')"  # as the button for it does
# The number of elements that reach beyond the window, and are not in a part of the page that scrolls by itself.
CUT = """[...document.querySelectorAll('article *')].filter((one) => {
  if (one.getBoundingClientRect().right <= innerWidth + 1 || !one.checkVisibility()) return false;
  for (let up = one; up; up = up.parentElement) if (getComputedStyle(up).overflowX !== 'visible') return false;
  return true;
}).length"""
SORT = "document.querySelectorAll('th button')[3].click(), document.querySelectorAll('th button')[3].click()"
ORDER = "[...document.querySelectorAll('tbody tr')].map(row => parseFloat(row.cells[3].textContent))"


# Texts whose contrast is below 4.5, or 3 for large letters (WCAG 2.2, 1.4.3): colours are painted one over the other.
FAINT = """(() => {
  const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
  const ctx = canvas.getContext('2d', {willReadFrequently: true});
  const pixel = (colours) => {
    for (const colour of colours) { ctx.fillStyle = colour; ctx.fillRect(0, 0, 1, 1); }
    return [...ctx.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = {};
  for (const one of document.querySelectorAll('body *')) {
    const seen = one.checkVisibility({opacityProperty: true, visibilityProperty: true});
    if (!seen || one.closest('svg, [hidden]')) continue;
    const text = [...one.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data).join('').trim();
    const box = one.getBoundingClientRect();
    if (!text || box.width < 2 || box.height < 2) continue;
    const backs = ['white'];
    for (let up = one; up; up = up.parentElement) backs.splice(1, 0, getComputedStyle(up).backgroundColor);
    const style = getComputedStyle(one), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const [a, b] = [light(pixel(backs)), light(pixel([...backs, style.color]))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const kind = `${one.tagName}.${one.className}`;
    if (ratio < (large ? 3 : 4.5)) found[kind] = `${ratio.toFixed(2)} ${text.slice(0, 40)}`;
  }
  return found;
})()"""
# What the keyboard reaches and a screen reader could not name.
NAMELESS = """[...document.querySelectorAll('a[href], button, input, select, summary, [tabindex]')].filter((one) =>
  one.checkVisibility({visibilityProperty: true}) && one.tabIndex >= 0 && !one.textContent.trim() && !one.title &&
  !one.ariaLabel && !one.placeholder && !one.labels?.length && !one.querySelector('img[alt]')
).map((one) => one.outerHTML.slice(0, 120))"""


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
    png, (cut,) = look(devtools, (whole / file).as_uri(), words, width, height, CUT)
    assert cut == 0
    assert len(Image.open(BytesIO(png)).convert("L").getcolors() or []) > 32, "a blank page"


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_texts_are_clear_and_the_keyboard_reaches_only_what_has_a_name(
    name: str, mode: str, whole: Path, devtools: str
) -> None:
    file, words = PAGES[name]
    script = DARK if mode == "dark" else ""
    _, (faint, nameless) = look(devtools, (whole / file).as_uri(), words, 1440, 900, FAINT, NAMELESS, script=script)
    assert faint == {}
    assert nameless == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", KEPT)
def test_charts_take_the_colours_of_the_mode(name: str, size: str, whole: Path, devtools: str) -> None:
    """Lines of a chart differ from its background, and have other colours in the dark mode."""
    (file, words), (width, height) = PAGES[name], SIZES[size]
    strokes = "[...document.querySelectorAll('.chart .line')].map((line) => getComputedStyle(line).stroke).join()"
    found = []
    for mode, script in {"light": RANKING, "dark": f"{DARK}, {RANKING}"}.items():
        png, (colours,) = look(devtools, (whole / file).as_uri(), words, width, height, strokes, script=script)
        found.append(colours)
        if folder := os.environ.get("CERTIZOO_SCREENSHOTS"):
            image = Image.open(BytesIO(png)).convert("RGB")
            image.quantize(256).save(Path(folder) / f"{name}_{size}_{mode}.png", optimize=True)
    assert found[0] != found[1]
    assert all(colours.startswith("rgb(") for colours in found)


def test_filters_hide_rows_and_count_the_rest(whole: Path, devtools: str) -> None:
    shown = "[...document.querySelectorAll('.ranking tbody tr')].filter((row) => row.checkVisibility()).length"
    choose = """(() => { const form = document.querySelector('form.filters');
      const {dataset, norm, attention} = form.elements;
      dataset.value = 'cifar10'; norm.value = 'linf'; attention.checked = true;
      form.dispatchEvent(new Event('input')); return form.querySelector('output').textContent; })()"""
    page = (whole / "leaderboard.html").as_uri()
    _, (every, words, few) = look(devtools, page, "cert_vit_c10", 1440, 900, shown, choose, shown)
    assert 0 < few < every
    assert words == f"{few} rows"


ASKED = (
    *("BatchNorm", "ResNet", "normalisation", "cite", "Windows", "Colab", "GPU", "my own model", "memory", "how long"),
    "which models",
)
TERMS = dict.fromkeys(ASKED, ("FAQ", "My own model")) | {
    "certify image": ("Certify photographs",),
    "certify serve": ("Certify photographs",),
    "certify submit": ("Submit and check an entry",),
    "certify check": ("Submit and check an entry",),
}
HITS = """(async () => {
  const field = document.querySelector('.md-search__input');
  field.focus();
  field.value = 'TERM';
  field.dispatchEvent(new Event('input', {bubbles: true}));
  field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
  for (let i = 0; i < 100 && !document.querySelector('.md-search-result__item'); i++)
    await new Promise(done => setTimeout(done, 100));
  return [...document.querySelectorAll('.md-search-result__item')].slice(0, 3).map((hit) => hit.textContent);
})()"""


@pytest.mark.parametrize("term", TERMS)
def test_the_search_has_an_answer_in_its_first_three_hits(term: str, whole: Path, devtools: str) -> None:
    """One of them is a page that answers, and holds the term."""
    page = (whole / "index.html").as_uri()
    _, (hits,) = look(devtools, page, "CertiZoo", 1440, 900, HITS.replace("TERM", term))
    answers = [
        hit
        for hit in hits
        if term.removeprefix("my ").lower() in hit.lower() and any(title in hit for title in TERMS[term])
    ]
    assert answers, hits


def test_a_click_sorts_a_column_both_ways(whole: Path, devtools: str) -> None:
    """Columns sort by number, the largest first; parameters are in millions."""
    click = SORT.partition(", ")[0]
    page = (whole / "reference/zoo.html").as_uri()
    _, (_, falling, _, rising) = look(devtools, page, "cert_vit_c10", 1280, 900, click, ORDER, click, ORDER)
    assert falling == sorted(falling, reverse=True) != rising
    assert rising == sorted(rising)
