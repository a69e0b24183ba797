"""Facts: tags that say what was proved or measured of a version.

`certified_acc.0.1` is of L2, `certified_acc.linf.0.0156863` of another norm: a share has the norm in its name, so that
figures of two norms are never taken for each other.

They are written by who measured them, and say what certificate.json says. No configuration, no command line and no
spool gives them.
"""

import re
from collections.abc import Mapping
from typing import Any

from certizoo import UserError

WEIGHTS, DATA = "weights_sha256", "data_digest"
CERTIFIED, LOW = "certified_acc", "certified_low"  # with .EPS: the share of images, and its lower confidence bound
L2 = "l2"  # what a share is of that names no norm
NORMS = (L2, "linf")
# tag -> where certificate.json says the same
STATED = {
    "clean_acc": ("clean",),
    "images": ("images",),
    "method": ("method",),
    "dataset": ("dataset",),
    "attention": ("attention",),
    "certizoo": ("certizoo",),
    "git_commit": ("git_commit",),
    WEIGHTS: (WEIGHTS,),
    DATA: (DATA,),
    "image_list_sha256": ("image_list_sha256",),
    "norm": ("threat_model", "norm"),
    "dtype": ("numerics", "served_dtype"),
    "torch": ("numerics", "torch"),
}
SHARES = {CERTIFIED: "certified", "pgd_acc": "pgd"}  # tag.EPS -> its name in the certificate's table
OF_EVALUATION = ("attacked_acc", "proved_acc", "flags")
# Besides: of the certificate, but worked out; of the registry itself.
OTHERS = (LOW, "aa_acc", "penalty", "headline", "certificate_sha256", "files_sha256", "code_sha256", "champion_by",
          "champion_images", "median_radius")  # fmt: skip
NAME = re.compile(r"[\w./ -]{1,100}", re.ASCII)
MAX_VALUE = 1000


def refuse_given(tags: Mapping[Any, object], key: str) -> None:
    """Raise UserError for tags of a person (the config's `key`) that are facts, by whatever spelling, or no tags."""
    for name, value in tags.items():
        if not isinstance(name, str) or not NAME.fullmatch(name) or isinstance(value, Mapping | list):
            raise UserError(f"{key}: {str(name)[:80]!r} is no tag; write NAME: TEXT in ASCII letters, digits, '_', '.'")
        if len(str(value)) > MAX_VALUE:
            raise UserError(f"{key}.{name} is longer than {MAX_VALUE} characters; shorten it")
        if is_reserved(name):
            raise UserError(f"{key}: {name} is a fact, which only who measures it writes; use another name")


def is_reserved(name: str) -> bool:
    """`certified_acc.0.1`, `Clean-Acc`, `weights_sha256`, ...: one of ours, or what people would take for one."""
    letters = _letters(name)
    families = (*SHARES, *OF_EVALUATION, LOW, "aa_acc", "clean_acc")
    return letters in map(_letters, (*STATED, *OTHERS)) or letters.startswith(tuple(map(_letters, families)))


def of_evaluation(name: str) -> bool:
    """May be written onto a version that exists: what was measured of it later."""
    return name.startswith(tuple(f"{family}." for family in OF_EVALUATION))


def contradiction(tags: Mapping[str, str], certificate: Any) -> str | None:
    """What the tags say and the certificate does not, if anything."""
    if not isinstance(certificate, dict):
        return "certificate.json is no object"
    for tag, text in tags.items():
        family, norm, eps = parts(tag)
        path = ("accuracy", eps, SHARES[family]) if family in SHARES else STATED.get(tag)
        if path is not None and not _same(text, stated := _at(certificate, path)):
            return f"{tag} is {text}, and certificate.json says {stated}"
        if family in (*SHARES, LOW) and norm != (stated := _at(certificate, STATED["norm"])):
            return f"{tag} is of {norm}, and certificate.json of {stated}"
        if family == LOW and not number(text) <= number(tags.get(share(CERTIFIED, norm, eps), "")):
            return f"{tag} is {text}, above the share that it bounds"
    return None


def share(family: str, norm: str, eps: str) -> str:
    """The name of a share, such as `certified_acc.0.1`."""
    return f"{family}.{eps}" if norm == L2 else f"{family}.{norm}.{eps}"


def parts(name: str) -> tuple[str, str, str]:
    """(family, norm, eps) of a share's name; `certified_acc.l2.0.1` is `certified_acc.0.1`."""
    family, _, rest = name.partition(".")
    norm, _, eps = rest.partition(".")
    return (family, norm, eps) if norm in NORMS else (family, L2, rest)


def number(text: str) -> float:
    """A share in [0,1]; NaN where the text is none."""
    try:
        value = float(text)
    except ValueError:
        return float("nan")
    return value if 0 <= value <= 1 else float("nan")


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def _at(certificate: Any, path: tuple[str, ...]) -> Any:
    """None where it does not say; of earlier code, which knew one norm, that one."""
    found = certificate
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return L2 if found is None and path == STATED["norm"] else found


def _same(text: str, stated: Any) -> bool:
    """Shares stand in tags with four digits."""
    if isinstance(stated, float):
        return abs(number(text) - stated) <= 0.51e-4
    return stated is not None and text == str(stated)
