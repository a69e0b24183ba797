"""Tags that state what was proved or measured about a version.

`certified_acc.0.1` is an L2 share, `certified_acc.linf.0.0156863` one of another norm. The norm is part of the name, so
that figures of two norms are never confused.

The code that measures a value writes its tag, and the tag agrees with certificate.json. No configuration, command line
or publish.json can set these tags.
"""

import re
from collections.abc import Mapping
from typing import Any

from certizoo import UserError
from certizoo.norms import L2, NAMES

WEIGHTS, DATA = "weights_sha256", "data_digest"
CERTIFIED, LOW = "certified_acc", "certified_low"  # with .EPS: the share of images, and its lower confidence bound
# tag -> its place in certificate.json
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
# Others: derived from the certificate, or set by the registry itself.
OTHERS = (LOW, "aa_acc", "penalty", "headline", "certificate_sha256", "files_sha256", "code_sha256", "champion_by",
          "champion_images", "median_radius")  # fmt: skip
NAME = re.compile(r"[\w./ -]{1,100}", re.ASCII)
MAX_VALUE = 1000


def refuse_given(tags: Mapping[Any, object], key: str) -> None:
    """Raise UserError for user tags (the config's `key`) that are invalid or reserved, in any spelling."""
    for name, value in tags.items():
        if not isinstance(name, str) or not NAME.fullmatch(name) or isinstance(value, Mapping | list):
            raise UserError(
                f"{key}: {str(name)[:80]!r} is not a tag; write NAME: TEXT in ASCII letters, digits, '_', '.'"
            )
        if len(str(value)) > MAX_VALUE:
            raise UserError(f"{key}.{name} is longer than {MAX_VALUE} characters; shorten it")
        if is_reserved(name):
            raise UserError(f"{key}: {name} is reserved for measured values; use another name")


def is_reserved(name: str) -> bool:
    """Return True for `certified_acc.0.1`, `Clean-Acc`, `weights_sha256`, ...: our tags and look-alikes."""
    letters = _letters(name)
    families = (*SHARES, *OF_EVALUATION, LOW, "aa_acc", "clean_acc")
    return letters in map(_letters, (*STATED, *OTHERS)) or letters.startswith(tuple(map(_letters, families)))


def of_evaluation(name: str) -> bool:
    """Return True for a tag that an evaluation may add to an existing version."""
    return name.startswith(tuple(f"{family}." for family in OF_EVALUATION))


def contradiction(tags: Mapping[str, str], certificate: Any) -> str | None:
    """Return the first contradiction between the tags and the certificate, if any."""
    if not isinstance(certificate, dict):
        return "certificate.json is not a JSON object"
    for tag, text in tags.items():
        family, norm, eps = parts(tag)
        path = ("accuracy", eps, SHARES[family]) if family in SHARES else STATED.get(tag)
        if path is not None and not _same(text, stated := _at(certificate, path)):
            return f"{tag} is {text}, but certificate.json says {stated}"
        if family in (*SHARES, LOW) and norm != (stated := _at(certificate, STATED["norm"])):
            return f"{tag} is for norm {norm}, but certificate.json for {stated}"
        if family == LOW and not number(text) <= number(tags.get(share(CERTIFIED, norm, eps), "")):
            return f"{tag} is {text}, above the share whose lower bound it is"
    return None


def share(family: str, norm: str, eps: str) -> str:
    """Return the name of a share, such as `certified_acc.0.1`."""
    return f"{family}.{eps}" if norm == L2 else f"{family}.{norm}.{eps}"


def parts(name: str) -> tuple[str, str, str]:
    """Split a share's name into (family, norm, eps); `certified_acc.l2.0.1` is `certified_acc.0.1`."""
    family, _, rest = name.partition(".")
    norm, _, eps = rest.partition(".")
    return (family, norm, eps) if norm in NAMES else (family, L2, rest)


def number(text: str) -> float:
    """Return a share in [0,1]; NaN if the text is not one."""
    try:
        value = float(text)
    except ValueError:
        return float("nan")
    return value if 0 <= value <= 1 else float("nan")


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def _at(certificate: Any, path: tuple[str, ...]) -> Any:
    """Return the certificate's value; None if it is missing."""
    found = certificate
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _same(text: str, stated: Any) -> bool:
    """Compare values; tags hold shares with four digits."""
    if isinstance(stated, float):
        return abs(number(text) - stated) <= 0.51e-4
    return stated is not None and text == str(stated)
