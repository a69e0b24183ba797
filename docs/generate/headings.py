"""One title per page: from the second first-level heading of a file, such as proofs.md, all headings are lowered."""

import re

from docs.generate.links import CODE

HEADING = re.compile(r"^(#{1,5}) ", re.M)


def one_title(markdown: str) -> str:
    """Return the text with one heading of the first level. Anchors depend on the words and stay."""
    without = CODE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), markdown)
    places = [found.start() for found in HEADING.finditer(without)]
    titles = [place for place in places if markdown.startswith("# ", place)]
    for place in reversed(places):
        if len(titles) < 2 or place < titles[1]:
            break
        markdown = f"{markdown[:place]}#{markdown[place:]}"
    return markdown
