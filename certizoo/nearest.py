"""Suggestions for an unknown name: the three most similar names, and where all of them are listed."""

from collections.abc import Collection, Iterable
from difflib import SequenceMatcher

from certizoo.errors import UserError
from certizoo.text import shown

SHOWN = 3
FEW = 12  # so many names are listed completely if there is nowhere else to look


def nearest(wrong: str, known: Iterable[str]) -> list[str]:
    """Return the SHOWN names most like `wrong`, best first; names that contain it come before all others.

    `lr` alone finds the key `optimizer.lr` too.
    """
    matcher = SequenceMatcher(b=_plain(wrong), autojunk=False)

    def likeness(name: str) -> float:
        ratios = []
        for word in (name,) if "." in wrong else (name, name.rpartition(".")[2]):
            matcher.set_seq1(_plain(word))
            ratios.append(matcher.ratio())
        return max(ratios)

    def by_alphabet(name: str) -> list[tuple[bool, str]]:
        return [(letter.isdigit(), letter) for letter in name]  # dp_vit_ti before dp_vit_t1

    def rank(name: str) -> tuple[bool, float, list[tuple[bool, str]]]:
        return _plain(wrong) not in _plain(name), -likeness(name), by_alphabet(name)

    return sorted(known, key=rank)[:SHOWN]


def choices(wrong: str, known: Collection[str], listed: str | None = None) -> str:
    """Return the remedy of a message: 'nearest: a, b, c (all: WHERE)'.

    WHERE is `listed`, a command or a folder; without it a few names are listed completely.
    """
    if len(known) <= SHOWN:
        return f"choose one of {', '.join(known)}" if known else "there is none"
    everything = listed or (", ".join(known) if len(known) <= FEW else None)
    return f"nearest: {', '.join(nearest(wrong, known))}" + (f" (all: {everything})" if everything else "")


def unknown(kind: str, wrong: object, known: Collection[str], listed: str | None = None) -> UserError:
    """Return the error for a name not in `known`: no model 'x'; nearest: a, b, c (all: python -m zoo)."""
    name = wrong if isinstance(wrong, str) else shown(wrong)
    return UserError(f"no {kind} {shown(wrong)}; {choices(name, known, listed)}")


def _plain(name: str) -> str:
    return name.casefold().replace("-", "_")
