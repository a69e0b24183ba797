"""An entry of the leaderboard from finished results, certificate.json or evaluation.json."""

import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import zoo
from certify.evaluation.run import EVALUATION
from certify.evaluation.run import ROWS as EVALUATED
from certify.leaderboard.entry import Entry, faults, sound_of
from certify.leaderboard.nonces import of_entry
from certify.rows import records
from certify.rows.draws import recorded
from certify.rows.intervals import at_most
from certify.rows.summary import Summary
from certify.stage.run import CERTIFICATE, ROWS
from certizoo import UserError
from zoo import penalty
from zoo.models import overview
from zoo.user_models import is_function

KINDS = {"dp": "dot product", "l2": "L2", "ln": "Lipschitz-normalised", "scsa": "scaled cosine"}
SAME = ("weights_sha256", "images", "images_sha256", "dataset", "served_dtype")  # equal for all results of one entry
NUMERICS = (
    "float64 of the served float32 weights; weight norms verified by Cholesky with Rump's margin, Jacobian norms by "
    "Lanczos with a proved chance to fail; clean rounding counts as loss"
)
ROUNDED = "; so does what the served model rounds anywhere in the ball"


def summary_of(folder: Path) -> Summary:
    """Return the summary in a folder of results. Raises UserError if its rows have changed since."""
    if summary := records.require_rows(folder / CERTIFICATE, ROWS, search_radii=bool, numerics=dict):
        return summary
    if summary := records.require_rows(folder / EVALUATION, EVALUATED):
        return summary
    raise UserError(f"{folder} holds neither {CERTIFICATE} nor {EVALUATION}; finish python -m certify there first")


def entry_of(summaries: Sequence[Summary], **said: Any) -> Entry:
    """Return one entry from all results, which are of the same weights on the same images.

    `said` holds the fields that no result contains: name (by default that of the model), title, training, extra_data,
    source, paper, year (by default this one), and the command if another one made the results. Raises UserError.
    """
    first = summaries[0]
    served = first["served_dtype"]
    for key in SAME:
        if len({str(summary[key]) for summary in summaries}) > 1:
            raise UserError(f"these results differ in {key}; pass results of one model on the same images")
    curves: dict[str, dict[str, Any]] = {}
    for summary in summaries:
        for norm, curve in _curves(summary).items():
            curves[norm] = curves.get(norm, {}) | curve
    methods = sorted({str(summary["method"]) for summary in summaries})
    if methods == ["None"] or len(methods) > 1:
        raise UserError(f"these results are by methods {', '.join(methods)}; pass results of one method")
    name = said.get("name") or first["model"]["name"].rpartition(":")[2]
    entry = {
        "name": name,
        "title": said.get("title") or name,
        "dataset": first["dataset"],
        "images": first["images"],
        "images_sha256": first["images_sha256"],
        "clean": _percent(first["clean"]),
        "curves": curves,
        "method": methods[0],
        "served_dtype": served,
        "numerics": NUMERICS + (ROUNDED if served else ""),
        "extra_data": bool(said.get("extra_data")),
        "parameters": parameters_of(first["model"]),
        "training": said.get("training") or _training(first),
        "weights_sha256": first["weights_sha256"],
        "command": said.get("command") or " && ".join(_command(summary) for summary in summaries),
        "source": said.get("source"),
        "published": False,
        "soundness": _soundness(summaries),
        "year": said.get("year") or datetime.now(UTC).year,
        "paper": said.get("paper"),
        "attention": _attention(first),
        "sound": sound_of(served),
        "failure_probability": float(at_most(failure_of(summaries))),
        "nonces": nonces_of(summaries),
    }
    for fault in (*faults(entry), *of_entry(entry)):
        raise UserError(f"these results make no valid entry: {fault}")
    return entry


def parameters_of(model: Mapping[str, Any]) -> int:
    """Return the number of parameters of the model as it is served."""
    if is_function(model["name"]):
        return int(model["parameters"])
    return sum(weights.numel() for weights in overview.on_meta(**model).parameters())


def _attention(summary: Summary) -> str | None:
    """Return the kind of attention and what was added to it, None for a model without."""
    name = str(summary["attention"])
    if name == "none":
        return None
    gated, msvp = summary["model"].get("gpsa_layers"), penalty.name_of(summary.get("penalty", {})) == "msvp"
    return f"{KINDS.get(name, name)}{', gated positions' if gated else ''}{', MSVP' if msvp else ''}"


def _curves(summary: Summary) -> dict[str, dict[str, Any]]:
    """Return norm -> eps -> shares.

    A certificate has shares at every eps; an evaluation has them for the balls of attacks in the norm of its radii.
    """
    if "worst_case" not in summary:
        attack = _attack_name(summary["attack"])
        return {
            summary["norm"]: {
                eps: {"certified": _percent(found["certified"]), "attacked": _percent(found["pgd"]), "attack": attack}
                for eps, found in summary["accuracy"].items()
            }
        }
    curves: dict[str, dict[str, Any]] = {}
    for name, found in summary["accuracy"].items():
        if found["eps"] is None or found["certified"] is None or found["norm"] != summary["norm"]:
            continue
        point = {
            "certified": _percent(found["certified"]["accuracy"]),
            "attacked": _percent(found["accuracy"]),
            "attack": _attack_name(summary["attacks"][name]),
        }
        curve = curves.setdefault(found["norm"], {})
        known = curve.get(f"{found['eps']:g}")
        if known is None or point["attacked"] < known["attacked"]:
            curve[f"{found['eps']:g}"] = point
    for ball in summary["worst_case"]:  # images that survive all attacks
        names = " + ".join(_attack_name(summary["attacks"][name]) for name in ball["attacks"])
        if (there := curves.get(ball["norm"], {}).get(f"{ball['eps']:g}")) is not None:
            there |= {"attacked": _percent(ball["accuracy"]), "attack": names}
    return curves


def _attack_name(options: Mapping[str, Any]) -> str:
    """Return a name such as 'PGD-100', 'PGD-20 x 5' or 'AutoAttack'."""
    kind = options.get("kind", "pgd")
    if kind != "pgd":
        return {"autoattack": "AutoAttack"}.get(kind, str(kind))
    restarts = options.get("restarts", 1)
    return f"PGD-{options.get('steps', 10)}" + (f" x {restarts}" if restarts > 1 else "")


def _training(summary: Summary) -> str:
    epochs = ((summary.get("training") or {}).get("train") or {}).get("epochs")
    return f"{epochs} epochs" if epochs else "not said"


def _command(summary: Summary) -> str:
    """Return the command that reproduces the result, except for the location of the data."""
    name = summary["model"]["name"]
    published = name in (entries := zoo.weights.entries()) and entries[name].sha256 == summary["weights_sha256"]
    words = [f"model={name}", "out=OUT"] if published or is_function(name) else ["handover=HANDOVER"]
    words += [f"data={summary['dataset']}", "data.root=SHARDS", f"images={summary['images']}"]
    words += [f"method={summary['method']}", f"norm={summary['norm']}"]
    words += [f"served_dtype={summary['served_dtype'] or 'null'}"]
    if "worst_case" in summary:
        return shlex.join(["python", "-m", "certify", "evaluate", *words, f"protocol={summary['protocol']}"])
    words += [f"eps=[{','.join(repr(eps) for eps in summary['eps'])}]", f"headline_eps={summary['headline_eps']!r}"]
    words += [f"attack.steps={summary['attack']['steps']}"]
    words += [] if summary["search_radii"] else ["search_radii=false"]
    return shlex.join(["python", "-m", "certify", *words])


def _soundness(summaries: Sequence[Summary]) -> str:
    served = summaries[0]["served_dtype"]
    of = f"model as served in {served}, rounding included" if served else "served weights in exact arithmetic"
    one = max(summary["numerics"]["failure_probability_of_an_image"] for summary in summaries)
    return (
        f"Proved for the {of}. Each radius is wrong with a probability of at most {at_most(one)}, and at least one "
        f"radius of the table with at most {at_most(failure_of(summaries))}. No attack succeeded within a certified "
        "radius."
    )


def failure_of(summaries: Sequence[Summary]) -> float:
    """Return the probability that any of these radii is false: the sum over the results."""
    chances = (summary["numerics"]["failure_probability_of_the_table"] for summary in summaries)
    return min(1.0, sum(chances) * (1 + 1e-9))


def nonces_of(summaries: Sequence[Summary]) -> list[dict[str, str | None]]:
    """Return the nonces of these results and their origins."""
    found = dict.fromkeys(map(recorded, summaries))
    return [{"nonce": nonce.text, "origin": nonce.origin, "beacon": nonce.beacon} for nonce in found]


def _percent(share: float) -> float:
    return round(100 * share, 4)
