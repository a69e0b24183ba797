"""The badges of README.md, from the project's own files: `python -m docs.badges`."""

import json
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

from certizoo.norms import L2
from docs import ROOT

FOLDER = Path(__file__).parent / "badges"
EPS = "0.141176"  # 36/255
HEIGHT, PAD, LETTER = 20, 7, 6.1  # pixels; a letter of Verdana at 11 pixels has about this width, and is set to it
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" aria-label="{title}">
<title>{title}</title>
<rect width="{width}" height="{height}" rx="3" fill="#37474f"/>
<path d="M{left} 0H{inner}a3 3 0 0 1 3 3V17a3 3 0 0 1 -3 3H{left}z" fill="#3949ab"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{pad}" y="14" textLength="{label_length}">{label}</text>
<text x="{value_at}" y="14" textLength="{value_length}">{value}</text>
</g>
</svg>
"""


def badges() -> dict[str, str]:
    """Return name -> SVG."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entry = json.loads((ROOT / "leaderboard" / "cert_vit_c10.json").read_text())
    certified = entry["curves"][L2][EPS]["certified"]
    return {
        "python": badge("python", project["requires-python"].replace(">=", "≥ ")),
        "license": badge("license", project["license"]),
        "certified": badge("certified, CIFAR-10, L2 36/255", f"{certified} %"),
    }


def badge(label: str, value: str) -> str:
    """Return an SVG of two fields beside each other."""
    label_length, value_length = (round(LETTER * len(text)) for text in (label, value))
    left = label_length + 2 * PAD
    width = left + value_length + 2 * PAD
    return SVG.format(
        width=width, height=HEIGHT, left=left, inner=width - 3, pad=PAD, value_at=left + PAD, label_length=label_length,
        value_length=value_length, label=escape(label), value=escape(value), title=escape(f"{label}: {value}"),
    )  # fmt: skip


def main() -> None:
    """Write the badges."""
    FOLDER.mkdir(exist_ok=True)
    for name, svg in badges().items():
        (FOLDER / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    main()
