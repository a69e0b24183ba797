"""The page (page.html): it loads nothing, and its one script writes what it receives as text."""

import base64
import html as escaping
import re
from collections.abc import Sequence
from pathlib import Path

from certify.photos.samples import samples

PAGE = Path(__file__).with_name("page.html")
NOTHING = "default-src 'none'"
NAMED = 20  # classes that the page lists


def policy(nonce: str) -> str:
    return (
        f"{NOTHING}; img-src data: blob:; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def html(title: str, names: Sequence[str], norm: str, nonce: str) -> str:
    """Return the page of a model with these classes."""
    parts = {
        "NONCE": nonce,
        "TITLE": escaping.escape(title),
        "CLASSES": escaping.escape(
            ", ".join(names[:NAMED]) + (f" and {more} more" if (more := len(names) - NAMED) > 0 else "")
        ),
        "SAMPLES": "".join(map(_sample, samples(names))),
        "L2_CHOSEN": "checked" if norm == "l2" else "",
        "LINF_CHOSEN": "checked" if norm == "linf" else "",
    }
    return re.sub("|".join(parts), lambda found: parts[found[0]], PAGE.read_text())


def _sample(path: Path) -> str:
    source = base64.b64encode(path.read_bytes()).decode()
    return f'<button type="button"><img src="data:image/png;base64,{source}" alt="{path.stem}"></button>'
