"""An entry of the leaderboard: the form of leaderboard/schema.json, and the consistency of its figures.

Entries may come from anyone. In per cent of the same images, certified <= attacked <= clean holds at every eps, and
neither grows with eps.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from certify.rows.devices import DTYPES
from certify.shared.ball import NORMS
from certizoo import UserError
from certizoo.documents import read_json
from certizoo.files import require_file_name

Entry = dict[str, Any]
TEXT, NUMBER, WHOLE, FLAG = (str,), (int, float), (int,), (bool,)
NONE = (type(None),)
# field -> allowed types; tests/certify/leaderboard/test_entry.py compares them with the schema
FIELDS: dict[str, tuple[type, ...]] = {
    "name": TEXT,
    "title": TEXT,
    "dataset": TEXT,
    "images": WHOLE,
    "images_sha256": (*TEXT, *NONE),
    "clean": NUMBER + NONE,
    "curves": (dict,),
    "method": TEXT,
    "numerics": TEXT,
    "extra_data": FLAG,
    "parameters": (*WHOLE, *NONE),
    "training": TEXT,
    "weights_sha256": (*TEXT, *NONE),
    "command": (*TEXT, *NONE),
    "source": (*TEXT, *NONE),
    "published": FLAG,
    "soundness": TEXT,
    "year": WHOLE,
    "paper": (*TEXT, *NONE),
    "attention": (*TEXT, *NONE),
    "sound": TEXT,
}
AS_SERVED, EXACT = "as served", "exact"
SOUND = (AS_SERVED, EXACT, "rounding uncounted", "norms estimated", "no", "unknown")  # how far a certificate is proved
# of entries that are proved here. served_dtype: type in which the certified model is served; null: its float64 function
PROVED: dict[str, tuple[type, ...]] = {
    "failure_probability": NUMBER,
    "nonces": (list,),
    "served_dtype": (*TEXT, *NONE),
}
NONCE: dict[str, tuple[type, ...]] = {"nonce": TEXT, "origin": TEXT, "beacon": (*TEXT, *NONE)}
POINT: dict[str, tuple[type, ...]] = {"certified": NUMBER + NONE, "attacked": NUMBER + NONE, "attack": (*TEXT, *NONE)}


def read(path: Path) -> Entry:
    """Read the entry in a file. Raises UserError naming the first fault."""
    entry = read_json(path)
    for fault in faults(entry):
        raise UserError(f"{path} is not a valid entry: {fault}; create it with python -m certify submit")
    require_file_name(entry["name"], "name")
    return dict(entry)


def faults(entry: object) -> Iterator[str]:
    """Yield the faults in the form of an entry and in the consistency of its figures."""
    if not isinstance(entry, dict):
        yield "it is not a mapping"
        return
    yield from _form(entry, FIELDS if entry.get("published") is True else FIELDS | PROVED, "")
    if entry.get("served_dtype") not in (None, *DTYPES):
        yield f"served_dtype is {str(entry['served_dtype'])[:60]!r}"
    yield from _soundness(entry)
    yield from _chance(entry)
    curves = entry.get("curves")
    for norm, curve in curves.items() if isinstance(curves, dict) else ():
        if norm not in NORMS or not isinstance(curve, dict) or not curve:
            yield f"curves.{norm} is not a curve in one of {', '.join(NORMS)}"
        else:
            yield from _curve(norm, curve, entry.get("clean"))


def sound_of(served_dtype: str | None) -> str:
    """Return how far a certificate made here is proved."""
    return AS_SERVED if served_dtype else EXACT


def _soundness(entry: Entry) -> Iterator[str]:
    """Yield the fault in `sound`: an entry that is checked here must state what its command proves."""
    sound = entry.get("sound")
    if isinstance(sound, str) and sound not in SOUND:
        yield f"sound is {sound[:60]!r}; use {', '.join(SOUND)}"
    elif entry.get("published") is False and sound != (proved := sound_of(entry.get("served_dtype"))):
        yield f"sound is {str(sound)[:60]!r}, and the certificate is proved {proved}"


def _chance(entry: Entry) -> Iterator[str]:
    """Yield the faults in the failure probability, and in the nonces that it is over."""
    failure = entry.get("failure_probability", 0)
    if not (isinstance(failure, int | float) and 0 <= failure <= 1):
        yield f"failure_probability is {str(failure)[:60]!r}, not a probability"
    nonces = entry.get("nonces")
    if nonces == []:
        yield "nonces is empty"
    for place, nonce in enumerate(nonces if isinstance(nonces, list) else ()):
        if isinstance(nonce, dict):
            yield from _form(nonce, NONCE, f"nonces.{place}.")
        else:
            yield f"nonces.{place} is {str(nonce)[:60]!r}"


def points(entry: Entry) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Yield (norm, eps, figures) of every point, each curve by increasing eps."""
    for norm, curve in entry["curves"].items():
        for eps in sorted(curve, key=float):
            yield norm, float(eps), curve[eps]


def _curve(norm: str, curve: Entry, clean: object) -> Iterator[str]:
    before: dict[str, object] = {"certified": clean, "attacked": clean}
    for eps in sorted(curve, key=lambda eps: _number(eps) or 0.0):
        where, point = f"curves.{norm}.{eps}", curve[eps]
        if not (_number(eps) or 0.0) > 0 or not isinstance(point, dict):
            yield f"{where} is not a point at a radius above 0"
            continue
        yield from _form(point, POINT, f"{where}.")
        shares = {key: point.get(key) for key in ("certified", "attacked")}
        for key, share in shares.items():
            if _less(before[key], share):
                yield f"{where}.{key} is {share}, more than {before[key]} at a smaller radius"
            before[key] = before[key] if share is None else share
        if _less(shares["attacked"], shares["certified"]):
            yield f"{where} has {shares['certified']} certified and only {shares['attacked']} left by an attack"


def _form(content: Entry, wanted: dict[str, tuple[type, ...]], where: str) -> Iterator[str]:
    for key in sorted({*wanted, *map(str, content)}):
        if key not in wanted or key not in content:
            yield f"{where}{key[:60]} is {'unknown' if key not in wanted else 'missing'}"
        elif not isinstance(content[key], wanted[key]) or (isinstance(content[key], bool) and bool not in wanted[key]):
            yield f"{where}{key} is {str(content[key])[:60]!r}"
        elif wanted[key][:2] == NUMBER and content[key] is not None and not 0 <= content[key] <= 100:
            yield f"{where}{key} is {content[key]}, not a percentage"


def _number(text: object) -> float | None:
    try:
        return float(str(text))
    except ValueError:
        return None


def _less(one: object, other: object) -> bool:
    return isinstance(one, int | float) and isinstance(other, int | float) and one < other
