"""report.html shows the certificate's numbers, escapes data, loads nothing, and renders in a browser.

The breakdown of a loss adds up to the loss.
"""

import base64
import io
import json
import os
import shlex
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy.stats import binomtest  # type: ignore[import-untyped]

import zoo
from certify.__main__ import main
from certify.adjoint.adjoint import Adjoint
from certify.methods.lofast import LoFAST
from certify.shared.breakdown import FIRST_ORDER, IN_FRONT, averaged, columns, names, shares
from certify.stage import register, report, reproduce
from certify.stage import run as stage
from certify.stage.report import gallery
from certify.stage.report.charts import histogram
from certizoo import shards
from certizoo.attacks import AttackConfig
from certizoo.config.compose import compose_config
from tests.tools import browser
from tests.tools.html_page import Page
from tests.tools.small_models import THREE_HEADS
from tests.tools.stage_runs import data

SETTINGS = stage.Settings(
    method="lofast",
    images=90,
    eps=(0.01, 0.05, 5.0),
    headline_eps=0.05,
    batch_size=40,
    attack=AttackConfig(norm="l2", steps=5),
)
HOSTILE = "</title></pre><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&amp;'\""
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def out(handover: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    stage.run(handover, data(digits), SETTINGS, folder)
    return folder


@pytest.fixture(scope="module")
def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / stage.CERTIFICATE).read_text())


@pytest.fixture(scope="module")
def rows(out: Path) -> pd.DataFrame:
    return pd.read_parquet(out / "certificates.parquet")


def rendered(summary: dict[str, Any], rows: pd.DataFrame, class_names: list[str] | None = None) -> str:
    """Return the page with one grey picture for every image."""
    grey = gallery.data_uri(torch.full((1, 8, 8), 0.5))
    circumstances = report.Circumstances("2000-01-01", "python -m certify", class_names)
    return report.report(summary, rows, dict.fromkeys(range(len(rows)), grey), circumstances)


def test_every_number_is_the_certificates(out: Path, summary: dict[str, Any]) -> None:
    found = Page((out / stage.REPORT).read_text())
    assert json.loads(found.texts("pre", id="certificate")[0]) == summary
    cells = iter(found.texts("td"))
    for at in summary["accuracy"].values():
        expected = [f"{100 * summary['clean']:.1f}"]
        for key in ("pgd", "certified"):
            interval = binomtest(round(90 * at[key]), 90).proportion_ci(0.95, "wilson")
            expected += [f"{100 * at[key]:.1f}", f"{100 * interval.low:.1f} to {100 * interval.high:.1f}"]
        assert [next(cells) for _ in range(6)] == [*expected, f"{100 * at['unknown']:.1f}"]
    bold = found.texts("b")
    at = summary["accuracy"]["0.05"]
    headline = [f"{100 * share:.1f} %" for share in (summary["clean"], at["pgd"], at["certified"])]
    assert bold[:4] == [*headline, f"{summary['median_radius']:.4f}"]
    text = "".join(cells)
    for key in ("weights_sha256", "data_digest", "image_list_sha256", "git_commit", "method"):
        assert summary[key] in text, key
    lost = 100 * (summary["clean"] - summary["clean_without_content"])
    alone = f"{100 * summary['clean_without_content']:.1f} % of the images are classified correctly"
    assert f"{alone}, {lost:.1f} points less" in text
    steps = summary["breakdown"]["steps"]
    assert [word for word in found.texts("th", scope="row") if word in steps] == list(steps)
    for cost in steps.values():
        assert f"{cost:.3f}" in text
    assert max(steps, key=lambda name: steps[name]) == bold[4]


def test_the_gallery_shows_the_images_at_the_line(out: Path, rows: pd.DataFrame, digits: Path) -> None:
    certified = rows[rows["certified.0.05"] == "certified"].nsmallest(10, "radius.lofast")
    missed = rows[rows["correct"] & (rows["certified.0.05"] != "certified")].nlargest(10, "radius.lofast")
    assert len(certified)
    assert len(missed)
    found = Page((out / stage.REPORT).read_text())
    expected = [
        [r["key"], r["label"], r["prediction"], f"{r['margin']:.4g}", f"{r['radius.lofast']:.4f}", r["certified.0.05"]]
        for r in [*certified.to_dict("records"), *missed.to_dict("records")]
    ]
    entries = found.texts("dd")
    assert [entries[7 * k : 7 * k + 6] for k in range(len(expected))] == [[*map(str, e)] for e in expected]
    beaten = [*~certified["pgd.0.05"], *~missed["pgd.0.05"]]
    assert entries[6::7] == ["beaten" if yes else "withstood" for yes in beaten]
    pixels: dict[str, torch.Tensor] = {}
    for keys, images, _ in shards.eval_loader(shards.find(data(digits), "test"), data(digits), batch_size=50, limit=90):
        pixels |= dict(zip(keys, images, strict=True))
    for uri, (key, *_) in zip(found.attributes("src"), expected, strict=True):
        kind, _, content = uri.partition(";base64,")
        assert kind == "data:image/png"
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
        assert np.abs(shown / 255 - pixels[str(key)][0].numpy()).max() <= 0.5 / 255 + 1e-6


def test_nothing_is_loaded_from_elsewhere(out: Path) -> None:
    text = (out / stage.REPORT).read_text()
    found = Page(text)
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert not {"script", "link", "iframe", "object"} & {tag for tag, *_ in found.elements}
    assert all(uri.startswith("data:image/") for uri in found.attributes("src"))
    assert all((out / name).is_file() for name in found.attributes("href")), "a link leads nowhere"
    assert "default-src 'none'" in found.attributes("content")[0]
    assert len(text) < 200_000


def test_it_can_be_read_out(out: Path) -> None:
    found = Page((out / stage.REPORT).read_text())
    tags = [tag for tag, *_ in found.elements]
    assert tags.count("img") == len([alt for alt in found.attributes("alt") if alt])
    assert tags.count("svg") == 3 == len([label for label in found.attributes("aria-label") if label])
    assert tags.count("caption") == tags.count("table") == 3
    assert {attrs.get("scope") for tag, attrs, _ in found.elements if tag == "th"} == {"row", "col"}


def test_data_stay_data(summary: dict[str, Any], rows: pd.DataFrame) -> None:
    changed = rows.assign(key=[f"{HOSTILE}{i}" for i in range(len(rows))])
    hostile = summary | dict.fromkeys(("dataset", "git_commit", "attention", "method"), HOSTILE)
    hostile |= {"model": summary["model"] | {"name": HOSTILE}}
    hostile["breakdown"] = summary["breakdown"] | {"steps": {HOSTILE: 2.0}}
    changed = changed.rename(columns={"radius.lofast": f"radius.{HOSTILE}"})
    benign, found = Page(rendered(summary, rows)), Page(rendered(hostile, changed, [HOSTILE] * 10))
    assert {tag for tag, *_ in found.elements} == {tag for tag, *_ in benign.elements}
    assert not found.attributes("onerror")
    assert found.texts("title")[0] == f"{HOSTILE}: certified robustness"
    assert any(text.startswith(HOSTILE) for text in found.texts("dd"))
    assert any(HOSTILE in text for text in found.attributes("alt"))
    assert json.loads(found.texts("pre", id="certificate")[0])["dataset"] == HOSTILE


def without_proofs(summary: dict[str, Any], rows: pd.DataFrame, status: str) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return the summary of the same model with no image certified at any eps."""
    answer, nothing = np.where(rows["correct"], status, "not certified"), np.full(len(rows), np.nan)
    answers = {key: answer for key in map(str, rows) if key.startswith("certified.")}
    costs = {key: nothing for key in map(str, rows) if key.startswith("growth.")}
    bare = rows.assign(**answers, **costs, **{"radius.lofast": 0.0})
    share = float((bare["certified.0.05"] == "unknown").mean())
    accuracy = {eps: at | {"certified": 0.0, "unknown": share} for eps, at in summary["accuracy"].items()}
    return summary | {"accuracy": accuracy, "breakdown": averaged(bare, 0.05), "median_radius": 0.0}, bare


@pytest.mark.parametrize("status", ["not certified", "unknown"])
def test_a_model_without_proofs_has_a_report(summary: dict[str, Any], rows: pd.DataFrame, status: str) -> None:
    text = rendered(*without_proofs(summary, rows, status))
    found = Page(text)
    assert "There is no such image." in found.texts("p")
    assert any(text.startswith("No image has a finite loss") for text in found.texts("p"))
    assert len(found.attributes("src")) == gallery.COUNT
    assert set(found.texts("dd")[5::7]) == {status}
    assert "nan" not in text.partition("<main")[2].partition("<pre")[0].lower()


def test_a_model_that_is_always_wrong_has_a_report(summary: dict[str, Any], rows: pd.DataFrame) -> None:
    bare_summary, bare = without_proofs(summary, rows, "not certified")
    bare = bare.assign(correct=False, margin=-1.0)
    found = Page(rendered(bare_summary | {"clean": 0.0, "breakdown": None}, bare))
    assert found.texts("p").count("There is no such image.") == 2
    assert not found.attributes("src")
    assert "This method has no breakdown." in found.texts("p")


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome here to open the page in")
def test_a_browser_shows_it_and_runs_nothing(summary: dict[str, Any], rows: pd.DataFrame, tmp_path: Path) -> None:
    changed = rows.assign(key=HOSTILE)
    (tmp_path / "page.html").write_text(rendered(summary, changed, [HOSTILE] * 10))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=900,3000"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    outputs = ["--dump-dom", f"--screenshot={tmp_path / 'page.png'}"]
    url = (tmp_path / "page.html").as_uri()
    dom, _ = (
        subprocess.run([str(BROWSER), *options, profile, o, url], capture_output=True, text=True, timeout=120).stdout
        for o in outputs
    )
    seen = Page(dom)
    assert seen.texts("title")[0] == f"{summary['model']['name']}: certified robustness", "a key was run as a script"
    assert len(seen.texts("figure")) == len(Page((tmp_path / "page.html").read_text()).texts("figure")) > 1
    colours = Image.open(tmp_path / "page.png").convert("RGB").getcolors(2**24) or []
    share = {colour: count / (900 * 3000) for count, colour in colours}
    assert share.get((0, 114, 178), 0) > 0.01, "the histograms have no blue bars: the style sheet was not applied"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here (Debian: apt-get install chromium)")
@pytest.mark.parametrize(("name", "size"), [("desktop", (1440, 900)), ("phone", (390, 844))])
def test_it_fits_its_window(
    name: str, size: tuple[int, int], summary: dict[str, Any], rows: pd.DataFrame, tmp_path: Path
) -> None:
    """No part reaches beyond the window, and no heading of a row is broken into letters."""
    (tmp_path / "page.html").write_text(rendered(summary, rows, None))
    width = "document.documentElement.scrollWidth"
    tables = "[...document.querySelectorAll('table')].every((one) => one.scrollWidth <= one.parentElement.clientWidth)"
    narrow = "Math.min(...[...document.querySelectorAll('th[scope=row]')].map((one) => one.clientWidth))"
    with browser.chromium(tmp_path / "profile") as devtools:
        for mode in ("light", "dark"):
            page = (tmp_path / "page.html").as_uri()
            png, found = browser.look(devtools, page, "certified", *size, width, tables, narrow, mode=mode)
            assert found[:2] == [size[0], True]
            assert found[2] >= 24
            if folder := os.environ.get("CERTIZOO_SCREENSHOTS"):
                image = Image.open(io.BytesIO(png)).convert("RGB")
                image.quantize(256).save(Path(folder) / f"report_{name}_{mode}.png", optimize=True)


def test_large_images_are_shrunk() -> None:
    noise = torch.rand(3, 224, 224, generator=torch.Generator().manual_seed(0))
    uri = gallery.data_uri(noise)
    assert uri.startswith("data:image/jpeg")
    assert 2 * gallery.COUNT * len(uri) < 600_000


@pytest.mark.parametrize("mark", [0.0, 0.37, -4.0])
def test_histograms_count_every_image_on_its_side_of_the_mark(mark: float) -> None:
    generator = np.random.default_rng(0)
    for scale in (1e-6, 1.0, 1e3):
        values = scale * generator.normal(size=500)
        groups = {"low": ("open", values[values < mark]), "high": ("certified", values[values >= mark])}
        found = Page(written(histogram("alt", "x", {w: g for w, g in groups.items() if len(g[1])}, mark)))
        notes = [note.split() for note in found.texts("title")[:-1]]
        for word, (_, group) in groups.items():
            assert sum(int(note[0]) for note in notes if note[1].rstrip(",") == word) == len(group)
        bars = [(attrs, note) for (tag, attrs, _), note in zip(rects(found), notes, strict=True)]
        line = next(float(str(attrs["x1"])) for tag, attrs, _ in found.elements if attrs.get("class") == "mark")
        for attrs, note in bars:
            left, width = float(str(attrs["x"])), float(str(attrs["width"]))
            assert left + width <= line + 1 if note[1] == "low," else left >= line - 1


def written(element: ElementTree.Element) -> str:
    return ElementTree.tostring(element, encoding="unicode", method="html")


def rects(found: Page) -> list[tuple[str, dict[str, str | None], list[str]]]:
    return [element for element in found.elements if element[0] == "rect"]


# breakdown ------------------------------------------------------------------------------------------------------------

MODELS = ["lofast_vit_c10_smooth", "spec_vit_digits", "dp_vit_ti"]


def small_model(name: str) -> Any:
    torch.manual_seed(0)
    options = {"norm": {"name": "layernorm", "eps": 0.1}} if name == "dp_vit_ti" else {}
    return zoo.create_model(name, **(THREE_HEADS | options | {"mean": [0.5], "std": [0.5]})).eval()


@pytest.mark.parametrize("name", MODELS)
def test_growth_multiplies_to_the_radius_and_steps_are_named(name: str) -> None:
    model = small_model(name)
    x = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    prover = LoFAST(model)
    analysis = prover.analyse(x, model(x).argmax(-1))
    inner: Any = analysis.parts[0][1]
    for eps in (1e-3, 0.1):
        found = analysis.breakdown(eps)
        assert found.quantity == "growth"
        grown_B = eps * torch.stack(list(found.costs.values())).prod(0)
        torch.testing.assert_close(grown_B, inner.radius(torch.full((6,), eps, dtype=torch.float64)))
    modules = dict(model.named_modules())
    for step in found.costs:
        parent, _, inside = step.partition("(")
        parts = [parent + part for part in inside.rstrip(")").split(", ")] if inside else [step]
        assert all(part in modules or part == "pool" for part in parts), step
    assert len(found.costs) == len(prover.steps)


@pytest.mark.parametrize("name", MODELS[:2])
def test_shares_add_up_to_the_adjoint_loss(name: str) -> None:
    model = small_model(name)
    x = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    prover = Adjoint(model)
    analysis: Any = prover.analyse(x, model(x).argmax(-1)).parts[0][1]
    assert "blocks.0.attn" in names(prover.baked, [layer for layer, _ in prover.nodes])
    for eps in (1e-3, 0.05, 0.5):
        found = analysis.breakdown(eps)
        costs_KB = torch.stack(list(found.costs.values()))
        torch.testing.assert_close(costs_KB.sum(0), torch.ones(6, dtype=torch.float64))
        assert (costs_KB >= 0).all()
        # The first-order term is eps ||g_0|| of some class, relative to the certificate's loss.
        radii = analysis.radii(torch.full((6,), eps, dtype=torch.float64))
        rivals = analysis.rivals(0, 3)
        part_RB = eps * rivals.lengths[0] / rivals.tight(radii, torch.ones(3, 6, dtype=torch.bool))
        assert (part_RB - found.costs[FIRST_ORDER]).abs().amin(0).max() < 1e-9
    assert found.costs[FIRST_ORDER].max() < 0.99, "nothing of second order is left"


def test_shares_by_hand() -> None:
    """One step, two images: loss = min(2 eps + 1, 5 e_1), that is 2 and 1.5."""
    gradients, radii = torch.tensor([[2.0, 2.0], [5.0, 5.0]]), [torch.tensor([0.5, 0.5]), torch.tensor([0.7, 0.3])]
    found = shares(["step"], gradients, radii, torch.ones(1, 2))
    assert found.costs[FIRST_ORDER].tolist() == pytest.approx([0.5, 1 / 1.5])
    assert found.costs[IN_FRONT].tolist() == pytest.approx([0.0, 0.5 / 1.5])
    assert found.costs["step"].tolist() == [0.5, 0.0]
    nothing = shares(["step"], gradients * torch.tensor([[1.0], [0.0]]), radii, torch.full((1, 2), torch.inf))
    assert columns(nothing) == [{}, {}], "0 / 0 is no share"


def test_averages_leave_out_wrong_and_overflowing_images() -> None:
    table = pd.DataFrame(
        {"correct": [True, True, False, True], "growth.a": [2.0, 8.0, 100.0, None], "growth.b": [1.0, 1.0, 1.0, None]}
    )
    found = averaged(table, 0.1)
    assert found is not None
    assert (found["images"], found["eps"], found["quantity"]) == (2, 0.1, "growth")
    assert found["steps"] == pytest.approx({"a": 4.0, "b": 1.0})
    found = averaged(table.rename(columns=lambda name: name.replace("growth", "share")), 0.1)
    assert found is not None
    assert found["steps"] == pytest.approx({"a": 5.0, "b": 1.0})
    assert averaged(table[["correct"]], 0.1) is None


# stage, command, card -------------------------------------------------------------------------------------------------


def test_averages_in_the_certificate_are_those_of_the_rows(summary: dict[str, Any], rows: pd.DataFrame) -> None:
    right = rows[rows["correct"]]
    assert summary["breakdown"]["images"] == len(right)
    for name, cost in summary["breakdown"]["steps"].items():
        assert cost == pytest.approx(np.exp(np.log(right[f"growth.{name}"]).mean()))


def test_of_data_that_moved_the_command_names_the_folder_alone(digits: Path) -> None:
    own = data(digits)
    config = {"model": {"name": "spec_vit_digits"}, "data": asdict(own)}
    found = reproduce.command(Path("handover"), config, replace(own, root="elsewhere"), SETTINGS)
    assert "data.root=elsewhere" in found
    assert "data=" not in found
    assert "data=digits data.root=" in reproduce.command(Path("handover"), config, replace(own, img_size=4), SETTINGS)


def test_the_command_on_the_page_asks_for_the_same(out: Path, handover: Path, digits: Path) -> None:
    (shown,) = Page((out / stage.REPORT).read_text()).texts("pre", id="command")
    program, *arguments = shlex.split(shown)[2:]
    config = compose_config("certify", arguments)
    assert program == "certify"
    assert config["handover"] == str(handover)
    assert config["data"] == {"root": None}, "the hand-over names the data"
    attack = AttackConfig(**config["attack"])
    assert attack == SETTINGS.attack
    for key in ("method", "images", "headline_eps", "batch_size"):
        assert config[key] == getattr(SETTINGS, key)
    assert tuple(config["eps"]) == SETTINGS.eps
    elsewhere = reproduce.command(handover, {"model": {"name": "elsewhere"}}, data(digits), SETTINGS)
    assert f"data=digits data.root={digits}" in elsewhere


TEXTS = ("null", "1e5", "2026_11_30", "Block 5, 2026", "  two  sp ", "it's \\", "${oc.env:HOME}")


@pytest.mark.parametrize("text", TEXTS)
def test_the_command_keeps_a_text_that_looks_like_something_else(text: str, digits: Path) -> None:
    settings = replace(SETTINGS, beacon=text)
    shown = reproduce.command(Path("a=b"), {"model": {"name": "spec_vit_digits"}}, data(digits), settings)
    config = compose_config("certify", shlex.split(shown)[3:])
    assert (config["beacon"], config["handover"]) == (text, "a=b")


def test_it_is_published_linked_and_named(
    out: Path,
    summary: dict[str, Any],
    handover: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (out / "card.md").read_text()
    assert "`report.html`, among the files" in text  # MLflow would not follow a link to it
    assert len(text) < 5000, "MLflow's column"
    assert f"{100 * summary['accuracy']['0.05']['certified']:.1f} (" in text
    collected = register._collect([handover, out], tmp_path / "published")
    assert (collected / "report.html").read_bytes() == (out / "report.html").read_bytes()
    main(
        [f"handover={handover}", f"out={tmp_path / 'out'}", "images=4", "method=lofast", "eps=[0.1]", "attack.steps=1"]
    )
    assert str(tmp_path / "out" / "report.html") in capsys.readouterr().out
