"""The page (page.html): it loads nothing, and its one script writes what it receives as text."""

import html as escaping
from pathlib import Path

PAGE = Path(__file__).with_name("page.html")
NOTHING = "default-src 'none'"


def policy(nonce: str) -> str:
    return (
        f"{NOTHING}; img-src data: blob:; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def html(title: str, norm: str, nonce: str) -> str:
    chosen = {name: "checked" if name == norm else "" for name in ("l2", "linf")}
    return (
        PAGE.read_text()
        .replace("NONCE", nonce)
        .replace("TITLE", escaping.escape(title))
        .replace("L2_CHOSEN", chosen["l2"])
        .replace("LINF_CHOSEN", chosen["linf"])
    )
