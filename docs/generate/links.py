"""Links from pages to targets outside `docs`, relative to the source of the text.

On GitHub they lead into the repository. On the site they lead to a page made from the file, to a copy of it, or, for a
folder, nowhere.
"""

import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from docs import ROOT

COPIES = "files"  # folder of the site with copies of files
# Pages of the site by path in the repository; a folder stands for everything in it.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changes.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "cluster/README.md": "project/clusters.md",
    "configs/model": "reference/recipes.md",
    "configs/names.yaml": "reference/recipes.md",
    "configs/experiment": "reference/recipes.md",
    "configs/experiments.yaml": "reference/recipes.md",
    "configs": "reference/config.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
CODE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.M | re.S)
NAMED = re.compile(r"\bdocs/([a-z_]+)\.md#([\w-]+)")  # in a docstring
OUTSIDE = re.compile(r"^(?:[a-z][a-z+.-]*:|#|/)", re.I)


def rewritten(markdown: str, page: str) -> str:
    """Return the text of docs/`page` with its links rewritten for the site. Fenced code is unchanged."""
    parts, last = [], 0
    for block in CODE.finditer(markdown):
        parts += [_rewritten(markdown[last : block.start()], page), block[0]]
        last = block.end()
    return "".join([*parts, _rewritten(markdown[last:], page)])


def rebased(markdown: str, folder: str, page: str) -> str:
    """Return the text of a file in `folder` of the repository as if it were at docs/`page`."""

    def link(found: re.Match[str]) -> str:
        if OUTSIDE.match(found[3]):
            return found[0]
        target, mark, anchor = found[3].partition("#")
        moved = posixpath.relpath(posixpath.join(folder, target), posixpath.dirname(f"docs/{page}"))
        return f"{found[1]}[{found[2]}]({moved}{mark}{anchor})"

    return LINK.sub(link, markdown)


def of_docstrings(html: str, page: str) -> str:
    """Return the HTML of an API page with the anchors that it names as links."""
    if not page.startswith("reference/api/"):
        return html
    up = os.path.relpath(".", posixpath.dirname(page))
    return NAMED.sub(lambda found: f'<a href="{up}/{found[1]}.html#{found[2]}">{found[1]}: {found[2]}</a>', html)


def copied(pages: Mapping[str, str]) -> list[str]:
    """Return the repository paths of referenced files without a page of their own."""
    found = {path for page, text in pages.items() for path, _ in _targets(text, page) if _page_of(path) is None}
    return sorted(path for path in found if (ROOT / path).is_file())


def _targets(markdown: str, page: str) -> Iterator[tuple[str, str]]:
    """Iterate over (path in the repository, the link) of every link that leaves `docs`."""
    for found in LINK.finditer(CODE.sub("", markdown)):
        if (path := _path(found[3], page)) is not None:
            yield path, found[3]


def _path(link: str, page: str) -> str | None:
    """Return the link's target in the repository; None if it is elsewhere or inside `docs`."""
    if OUTSIDE.match(link):
        return None
    target = link.partition("#")[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(f"docs/{page}"), target))
    return None if path == "docs" or path.startswith(("docs/", "..")) else path


def _page_of(path: str) -> str | None:
    for place in (path, *map(str, PurePosixPath(path).parents)):
        if place in PAGES:
            return PAGES[place]
    return None


def _rewritten(markdown: str, page: str) -> str:
    def link(found: re.Match[str]) -> str:
        path = _path(found[3], page)
        if path is None:
            return found[0]
        if not (ROOT / path).exists():
            return found[0]  # MkDocs reports that it is missing
        _, mark, anchor = found[3].partition("#")
        if (to := _page_of(path)) is None:
            if not (ROOT / path).is_file():
                return found[2]  # a folder: its name
            to, mark, anchor = f"{COPIES}/{path}", "", ""
        elif path not in PAGES:
            mark = anchor = ""
        return f"{found[1]}[{found[2]}]({os.path.relpath(to, posixpath.dirname(page) or '.')}{mark}{anchor})"

    return LINK.sub(link, markdown)
