"""The model card of the registry, in Markdown.

A paragraph is one line, since the registry shows every line break.
"""

from certify.rows.intervals import at_most, eps_in, interval, percent, radius_in
from certify.rows.summary import Summary
from certizoo.norms import NAMES
from certizoo.text import code, markdown
from zoo import penalty


def model_card(summary: Summary) -> str:
    """Return the card: the model, what is proved, how it was trained, how to use it, and what is not claimed."""
    paragraphs = [
        f"# {markdown(summary['model']['name'])}",
        _about(summary),
        _table(summary),
        "On one page, with curve, histograms and the borderline images: `report.html`, among the files of the version.",
        *_proof(summary),
        *_model(summary),
        _use(summary),
        f"**Weights.** sha256 {code(summary['weights_sha256'][:16])}; trained at commit {code(summary['git_commit'])}; "
        f"certizoo {markdown(summary['certizoo'])}.",
    ]
    return "\n\n".join(paragraphs) + "\n"


def _about(summary: Summary) -> str:
    n, clean = summary["images"], summary["clean"]
    return (
        f"{markdown(summary['attention'])} attention, trained on {markdown(summary['dataset'])} (penalty: "
        f"{markdown(penalty.name_of(summary['penalty']))}). Clean accuracy {percent(clean)} % ({interval(clean, n)}) "
        f"on {n} test images (list sha256 {code(summary['image_list_sha256'][:16])}); median certified radius "
        f"{radius_in(summary['norm'], summary['median_radius'])} ({NAMES[summary['norm']]})."
    )


def _table(summary: Summary) -> str:
    """Return the accuracies with their 95 % intervals; the headline is bold."""
    n, bold, norm = summary["images"], f"{summary['headline_eps']:g}", summary["norm"]

    def row(eps: str, at: dict[str, float]) -> str:
        shown = [f"{percent(at[key])} ({interval(at[key], n)})" for key in ("certified", "pgd")]
        mark = "**" if eps == bold else ""
        name = f"{mark}{eps_in(norm, float(eps))}{mark}"
        return f"| {name} | {mark}{shown[0]}{mark} | {percent(at['unknown'])} | {shown[1]} |"

    head = f"| {NAMES[norm]} eps | certified ({summary['method']}) % | unknown % | PGD % (upper bound) |"
    return "\n".join([head, "|---|---|---|---|", *(row(*item) for item in summary["accuracy"].items())])


def _proof(summary: Summary) -> list[str]:
    """Return the paragraphs about the certificate and its assumptions."""
    attack, numerics, threat = summary["attack"], summary["numerics"], summary["threat_model"]
    return [
        f"**Threat model.** {NAMES[summary['norm']]} ball in {threat['space']}.",
        f"**Attack.** PGD, {attack['steps']} steps, {attack['restarts']} restart(s), {attack['loss']} loss, on the "
        "same images.",
        f"**Numerics.** {numerics['dtype']}; {numerics['norms']}; {numerics['slack']}. {chance(numerics)} The "
        f"certificate is of {_function(numerics)}; served in {numerics['served_dtype']}, its logits differed by at "
        f"most {numerics['largest_logit_difference_served_to_float64']:.2g} on these images.",
        f"**Assumed.** {' '.join(assumption['sentence'] for assumption in summary['assumptions'])}",
        "**Not claimed.** Anything of other images than those listed, of other norms, of changes beyond eps, or of "
        "inputs that are normalised outside the model. Intervals are Wilson's of 95 %.",
    ]


def _function(numerics: Summary) -> str:
    proved = numerics["rounding_of_the_served_model"] == "proved"
    return "the model as it is served, rounding included" if proved else "the float64 function"


def chance(numerics: Summary) -> str:
    """Return a sentence with the probability that `norms` mentions."""
    image, table = (at_most(numerics[f"failure_probability_of_{of}"]) for of in ("an_image", "the_table"))
    known = f"That probability is at most {image} for an image, and {table} for all of these images together."
    return known if numerics["failure_probability_of_an_image"] else "No bound here rests on chance."


def _model(summary: Summary) -> list[str]:
    """Return the paragraphs about training and about the step that costs the certificate most."""
    training, breakdown = summary["training"], summary["breakdown"]
    attack, train = training.get("attack") or {}, training.get("train") or {}
    words = {
        "objective": (training.get("objective") or {}).get("name"),
        "epochs": train.get("epochs"),
        "batch": train.get("batch_size"),
        "optimizer": (training.get("optimizer") or {}).get("name"),
        "learning rate": (training.get("optimizer") or {}).get("lr"),
        "attack eps": attack.get("eps"),
        "attack steps": attack.get("steps"),
        "seed": training.get("seed"),
    }
    known = [f"{word} {markdown(value)}" for word, value in words.items() if value is not None]
    found = [f"**Training.** {', '.join(known)}."] if known else []
    if breakdown and breakdown["steps"]:
        name, cost = max(breakdown["steps"].items(), key=lambda item: item[1])
        what = f"radius times {cost:.3g}" if breakdown["quantity"] == "growth" else f"{percent(cost)} % of the loss"
        eps = eps_in(summary["norm"], breakdown["eps"])
        found.append(f"**Costliest step.** {code(name)}: {what} at eps {eps}, of {len(breakdown['steps'])} steps.")
    return found


def _use(summary: Summary) -> str:
    if "vocabulary" in summary["model"]:
        return (
            "**Use.** `model, config = zoo.handover.load(Path(FOLDER))` gives the model; `tokenizer.json` numbers the "
            "words of a sentence, `model.patch_embed.embed(numbers)` embeds them, and the model takes these embeddings "
            "-> logits. `python -m certify handover=FOLDER data=NAME data.root=SHARDS out=AGAIN` proves it again."
        )
    size, channels = (markdown(summary["model"].get(key, word)) for key, word in (("img_size", "H"), ("in_chans", "C")))
    return (
        "**Use.** `model, config = zoo.handover.load(Path(FOLDER))` gives the model: images "
        f"(B, {channels}, {size}, {size}) in [0,1] -> logits. `python -m certify handover=FOLDER data=NAME "
        "data.root=SHARDS out=AGAIN` proves it again."
    )
