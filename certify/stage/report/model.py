"""The report's section on the model: which step costs most, and the facts of the certificate."""

from collections.abc import Sequence
from dataclasses import dataclass

from certify.rows.intervals import at_most, eps_in, percent
from certify.rows.summary import Summary
from certify.stage.report.html import Element, data, el
from certizoo.norms import NAMES
from zoo import penalty

SIDE_FILES = ("certificate.json", "certificates.parquet", "card.md", "curve.png")
MEANINGS = {
    "growth": "By how much each step widens the radius that reaches it, e_k / e_(k-1). The product of all is the "
    + "radius in front of the head divided by that of the L2 ball around the images, and the loss is proportional to "
    + "it. Geometric means over",
    "share": "Parts of the loss of the class that binds: the first-order term, which no better bound would lower; what "
    + "the growth of the radius up to the cut adds to it; and the second-order remainder of each step behind the cut. "
    + "Means over",
}


@dataclass(frozen=True)
class Circumstances:
    """Facts that the certificate itself does not depend on."""

    date: str
    command: str
    class_names: Sequence[str] | None = None


def costs(breakdown: Summary | None, norm: str) -> list[Element]:
    """Return the steps in the order of the model, with a bar for the cost of each."""
    if breakdown is None:
        return [el("p", "This method has no breakdown.", class_="dim")]
    steps, quantity, eps = breakdown["steps"], breakdown["quantity"], eps_in(norm, breakdown["eps"])
    if not steps:
        return [el("p", f"No image has a finite loss at eps {eps}.", class_="dim")]
    costliest = max(steps, key=lambda name: steps[name])
    head = el("tr", el("th", "step", scope="col"), el("th", quantity, scope="col"), el("td", aria_hidden="true"))
    meaning = (
        f"{MEANINGS[quantity]} the {breakdown['images']} correctly classified images with a finite loss at eps {eps}."
    )
    return [
        el("p", meaning),
        el("p", "Costliest: ", el("b", data(costliest)), f", {cost_text(steps[costliest], quantity)}."),
        el(
            "table",
            el("caption", "The steps in the order of the model."),
            el("thead", head),
            el("tbody", *(_cost(name, cost, quantity, max(steps.values())) for name, cost in steps.items())),
        ),
    ]


def cost_text(cost: float, quantity: str) -> str:
    return f"{cost:.3f}" if quantity == "growth" else f"{percent(cost)} %"


def _cost(name: str, cost: float, quantity: str, most: float) -> Element:
    width = f"width:{100 * cost / most if most > 0 else 0:.1f}%"
    bar = el("td", el("i", style=width), class_="bar", aria_hidden="true")
    return el("tr", el("th", data(name), scope="row"), el("td", cost_text(cost, quantity)), bar)


def _content(summary: Summary) -> str:
    alone = summary["clean_without_content"]
    if alone is None:
        return "not asked, or its attention has no scores"
    lost = f"{100 * (summary['clean'] - alone):.1f} points less"
    return f"with all attention scores 0, {percent(alone)} % of the images are classified correctly, {lost}"


def _which(summary: Summary) -> str:
    first, images = summary["first"], summary["images"]
    return f"test images {first} to {first + images - 1}" if first else f"its first {images} test images"


def facts(summary: Summary, circumstances: Circumstances) -> list[Element]:
    """Return everything that a reader needs to check the certificate, or to reproduce it."""
    attack, numerics, model = summary["attack"], summary["numerics"], summary["model"]
    difference = numerics["largest_logit_difference_served_to_float64"]
    image, table = (at_most(numerics[f"failure_probability_of_{of}"]) for of in ("an_image", "the_table"))
    beacon = f", of the beacon {summary['beacon']}" if summary["beacon"] else ""
    found = {
        "model": f"{model['name']}, {summary['attention']} attention, penalty {penalty.name_of(summary['penalty'])}",
        "content": _content(summary),
        "dataset": f"{summary['dataset']}, {_which(summary)}",
        "shards": f"sha256 {summary['data_digest']}",
        "image list": f"sha256 {summary['image_list_sha256']}",
        "weights": f"sha256 {summary['weights_sha256']}",
        "method": summary["method"],
        "threat model": f"{NAMES[summary['norm']]} ball in {summary['threat_model']['space']}",
        "attack": f"PGD, {attack['steps']} steps, {attack['restarts']} restart(s), {attack['loss']} loss, same images",
        "numerics": f"{numerics['dtype']}; {numerics['norms']}; {numerics['slack']}",
        "chance": f"the bounds of an image fail with a probability of at most {image}, any of all images with {table}",
        "nonce": f"{summary['nonce']}, {summary['nonce_origin']}{beacon}",
        "assumed": " ".join(assumption["sentence"] for assumption in summary["assumptions"]),
        "served": f"{numerics['served_dtype']}; its logits differed from the certified ones by up to {difference:.2g}",
        "time": f"{summary['seconds_per_image']:.3g} s an image to certify",
        "code": f"certizoo {summary['certizoo']}, torch {numerics['torch']}; trained at commit {summary['git_commit']}",
        "written": circumstances.date,
    }
    rows = [el("tr", el("th", word, scope="row"), el("td", data(fact), class_="text")) for word, fact in found.items()]
    links = [part for name in SIDE_FILES for part in (el("a", name, href=name), " ")]
    return [
        el("table", el("caption", "The facts of this certificate."), el("tbody", *rows)),
        el("p", "Reproduce it with:"),
        el("pre", circumstances.command, id="command"),
        el("p", "Beside this page: ", *links),
    ]
