"""One title per page: all but one first-level heading of a file, such as proofs.md, are lowered."""

import re

from docs.generate.links import CODE

HEADING = re.compile(r"^(#{1,5}) ", re.M)


def one_title(markdown: str) -> str:
    """Return the text with one heading of the first level. Anchors depend on the words and stay."""
    without = CODE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), markdown)
    places = [found.start() for found in HEADING.finditer(without)]
    if sum(markdown.startswith("# ", place) for place in places) < 2:
        return markdown
    for place in reversed(places[1:]):
        markdown = f"{markdown[:place]}#{markdown[place:]}"
    return markdown
