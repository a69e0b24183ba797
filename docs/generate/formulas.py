"""Formulas as MathML, which browsers draw without a script."""

import re
from html import unescape

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves: \(...\) in a span, \[...\] in a div.
FOUND = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)
# Bars around something are brackets, which browsers would space as operators between two things.
BAR = re.compile("<mo>(&#x0007C;|&#x02016;)</mo>")
# Commands that latex2mathml does not know, in words that it does.
UNKNOWN = {r"\arg": r"\mathrm{arg}", r"\lvert": "|", r"\rvert": "|"}
LEFT = re.compile(r"\\[A-Za-z]+")


def as_mathml(html: str) -> str:
    """The page with every formula as <math>. Raises ValueError for one with a command that is not understood."""
    return FOUND.sub(lambda found: mathml(unescape(found[3]).strip(), block=found[2] == "["), html)


def mathml(formula: str, block: bool) -> str:
    """One formula; of a block, in a line of its own."""
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
