"""Formulas as MathML, which browsers render without a script."""

import re
from html import unescape

from latex2mathml.converter import convert

# The output of pymdownx.arithmatex: \(...\) in a span, \[...\] in a div.
FOUND = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)
# Bars around an expression are brackets; browsers would space them as operators.
BAR = re.compile("<mo>(&#x0007C;|&#x02016;)</mo>")
# Commands unknown to latex2mathml, in equivalent ones.
UNKNOWN = {r"\arg": r"\mathrm{arg}", r"\lvert": "|", r"\rvert": "|"}
LEFT = re.compile(r"\\[A-Za-z]+")


def as_mathml(html: str) -> str:
    """Return the page with every formula as <math>. Raises ValueError for an unknown command."""
    return FOUND.sub(lambda found: mathml(unescape(found[3]).strip(), block=found[2] == "["), html)


def mathml(formula: str, block: bool) -> str:
    """Convert one formula; a block gets its own line."""
    result = _converted(formula, block)
    if LEFT.search(result):
        result = _converted(_known(formula), block)
    if left := LEFT.search(result):
        raise ValueError(f"latex2mathml leaves {left[0]} of {formula}")
    return f'<div class="formula">{result}</div>' if block else result


def _known(formula: str) -> str:
    for command, words in UNKNOWN.items():
        formula = words.join(re.split(re.escape(command) + r"(?![A-Za-z])", formula))
    return formula


def _converted(formula: str, block: bool) -> str:
    found = convert(formula, display="block" if block else "inline")
    return BAR.sub(r'<mo fence="true" stretchy="false" lspace="0" rspace="0">\1</mo>', found)
