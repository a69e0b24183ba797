"""The site builds without a warning, every link and anchor in it exists, and it loads nothing from other servers."""

import re
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import certify.__main__ as certify
import certizoo.__main__ as program
from certizoo.config.compose import CONFIGS
from docs.generate import docstrings, formulas, headings, links, made
from docs.generate.commands import commands_of, parsers
from docs.generate.config_keys import groups
from tests.docs.conftest import built
from tests.tools.launching import ROOT

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src"}  # elements that a page loads by itself


@dataclass
class Page:
    """The references of a page, the anchors that it offers, levels of headings, and pictures without words."""

    ids: set[str] = field(default_factory=set)
    levels: list[int] = field(default_factory=list)
    mute: list[str] = field(default_factory=list)
    links: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)


class Reader(HTMLParser):
    """A parser that fills a Page."""

    def __init__(self) -> None:
        super().__init__()
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {key: value or "" for key, value in attrs}
        self.page.ids |= {said[key] for key in ("id", "name") if key in said and tag != "meta"}
        if re.fullmatch("h[1-6]", tag):
            self.page.levels.append(int(tag[1]))
        if tag == "img" and not said.get("alt"):
            self.page.mute.append(said.get("src", "")[:80])
        if tag == "a" and "href" in said:
            self.page.links.add(said["href"])
        if (key := LOADED.get(tag)) and key in said:
            self.page.loaded.add(said[key])
        if tag == "link" and said.get("rel", "") in ("stylesheet", "icon", "preload", "modulepreload", "preconnect"):
            self.page.loaded.add(said["href"])


@cache
def page_of(path: Path) -> Page:
    reader = Reader()
    reader.feed(path.read_text())
    return reader.page


def pages(site: Path) -> list[Path]:
    return [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


def broken(site: Path, path: Path) -> list[str]:
    """Return the internal links of a page to missing files or anchors."""
    found = []
    for link in sorted(page_of(path).links | page_of(path).loaded):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if target.is_dir():
            target = target / "index.html"
        if not target.is_file() or site.resolve() not in target.resolve().parents:
            found.append(f"{path.relative_to(site)}: no file {link}")
        elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in page_of(target).ids:
            found.append(f"{path.relative_to(site)}: no anchor {link}")
    return found


def test_every_link_and_every_anchor_exists(site: Path) -> None:
    assert len(pages(site)) > 30
    assert [fault for path in pages(site) for fault in broken(site, path)] == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text(
        '<a id="here"></a><a href="#here"></a><a href="#gone"></a><a href="b.html"></a><img src="../c.png">'
    )
    (tmp_path.parent / "c.png").touch()
    assert [fault.partition(": ")[2] for fault in broken(tmp_path, page)] == [
        "no anchor #gone", "no file ../c.png", "no file b.html",
    ]  # fmt: skip


def test_headings_are_in_order_and_pictures_have_words(site: Path) -> None:
    """A reader who hears the page goes from heading to heading: one title, and no level left out."""
    for path in pages(site):
        levels, mute = page_of(path).levels, page_of(path).mute
        assert levels[:1] == [1], path
        assert levels.count(1) == 1, path
        assert all(below <= above + 1 for above, below in pairwise(levels)), path
        assert not mute, path


def test_every_page_leads_on(site: Path) -> None:
    """It ends with one to three links; its foot has the next page, and copies of files have no place in the order."""
    for path in (ROOT / "docs").rglob("*.md"):
        last = path.read_text().rstrip().rpartition("\n\n")[2]
        assert last.startswith("Next: "), path
        assert 1 <= last.count("](") <= 3, path
    for path in (path for path in pages(site) if "files" not in path.relative_to(site).parts):
        assert 'class="md-footer__link' in path.read_text(), path


def test_nothing_is_fetched_from_another_server(site: Path) -> None:
    for path in pages(site):
        assert not [link for link in page_of(path).loaded if urlsplit(link).netloc], path


def test_no_page_names_the_machine_that_built_it(site: Path) -> None:
    for path in [*pages(site), site / "search" / "search_index.json"]:
        assert str(ROOT) not in path.read_text(), path


def test_nothing_is_left_to_be_made(site: Path) -> None:
    """No placeholder is left, and no formula that a browser would not draw."""
    for path in pages(site):
        text = path.read_text()
        assert "<!-- made at build" not in text, path
        assert 'class="arithmatex"' not in text, path


def test_proofs_are_formulas_with_a_table_of_contents(site: Path) -> None:
    text = (site / "proofs.html").read_text()
    assert text.count("<math") > 1000
    assert text.count("<h1") == 1
    assert "The certificate" in text.partition("md-nav--secondary")[2]


@pytest.mark.slow
def test_the_whole_site_is_built(tmp_path: Path) -> None:
    """The table of the zoo has every model."""
    text = (built(tmp_path / "site", "*") / "reference" / "zoo.html").read_text()
    assert text.count("<tr>") > 100


# parts ---------------------------------------------------------------------------------------------------------------


def test_a_public_name_without_a_docstring_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docstrings, "PACKAGES", ("planted",))
    (tmp_path / "certizoo").mkdir()
    (tmp_path / "certizoo" / "__init__.py").touch()
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "__init__.py").write_text(
        'from planted.inner import Thing, told\n\n__all__ = ["NUMBER", "Thing", "told"]\nNUMBER = 1\n'
    )
    (tmp_path / "planted" / "inner.py").write_text(
        'class Thing:\n    """Is told."""\n\n    def silent(self): ...\n    def _hidden(self): ...\n\n\n'
        'def told():\n    """Yes."""\n\n\ndef not_exported(): ...\n'
    )
    assert sorted(docstrings.missing(tmp_path)) == ["planted.NUMBER", "planted.Thing.silent"]


def test_every_configuration_file_is_on_a_page(site: Path) -> None:
    keys, recipes = ((site / "reference" / f"{name}.html").read_text() for name in ("config", "recipes"))
    for path in sorted(CONFIGS.rglob("*.yaml")):
        name = path.relative_to(CONFIGS).as_posix()
        assert name in keys or path.stem in recipes, name
    assert {"attack", "data", "protocol", "space"} <= set(groups())


def test_the_help_of_every_command_is_on_its_page(site: Path) -> None:
    page = (site / "reference" / "commands.html").read_text()
    titles = set(re.findall(r"<h[23][^>]*>(?:<code>)?([^<]+)", page))
    for command, (module, _) in program.COMMANDS.items():
        assert titles & {f"certizoo {command}", f"python -m {module}", f"{command}.py"}, command
    assert {f"python -m certify {name}" for name in certify.COMMANDS if name != "certify"} <= titles
    assert {f"deepspeed trainers/{name}.py" for name in program.SCRIPTS} <= titles
    for parser in parsers():
        assert {f"{parser.prog} {name}" for name in commands_of(parser)} <= titles


@pytest.mark.parametrize(
    ("link", "found"),
    [
        ("[a](../configs)", "[a](../reference/config.md)"),
        ("[a](../configs/space/l2.yaml)", "[a](../reference/config.md)"),
        ("[a](../CONTRIBUTING.md#house-rules)", "[a](../project/contributing.md#house-rules)"),
        ("[`a`](../benchmarks/results/trials.json)", "[`a`](../files/benchmarks/results/trials.json)"),
        ("[a](../benchmarks/results)", "a"),
        ("[a](proofs.md#linf) [b](https://x.org/../y)", "[a](proofs.md#linf) [b](https://x.org/../y)"),
        ("```sh\n[a](../configs)\n```", "```sh\n[a](../configs)\n```"),
    ],
)
def test_links_that_leave_the_docs_lead_somewhere(link: str, found: str) -> None:
    """In docs/explained/x.md such links begin with one more `../`."""
    deeper = link if link.startswith("```") else link.replace("](../", "](../../")
    assert links.rewritten(deeper, "explained/x.md") == found


def test_a_file_of_the_repository_becomes_a_page() -> None:
    text = made.filled("<!-- made at build: file CONTRIBUTING.md project/contributing.md -->")
    assert "# Contributing" not in text.splitlines()
    assert "    ```python" in text
    with pytest.raises(ValueError, match="there is no part 'gold'"):
        made.filled("<!-- made at build: gold -->")


def test_one_title_a_page() -> None:
    assert (
        headings.one_title("# A\n\n## B\n\n# C\n\n```sh\n# no\n```\n\n## D\n")
        == "# A\n\n## B\n\n## C\n\n```sh\n# no\n```\n\n### D\n"
    )
    assert headings.one_title("# A\n\n## B\n") == "# A\n\n## B\n"


def test_a_formula_that_is_not_understood_is_an_error() -> None:
    assert "<math" in formulas.mathml(r"\lvert x \rvert_\infty \le \arg \max_j m_j", block=False)
    with pytest.raises(ValueError, match="gobbledygook"):
        formulas.mathml(r"\gobbledygook x", block=True)


def test_every_page_of_the_navigation_says_what_it_is() -> None:
    """Every page has a title and more than one line."""
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text()
        assert any(line.startswith("# ") for line in text.splitlines()), path
        assert len(text) > 30, path
    assert (ROOT / "mkdocs.yml").is_file()
    issue = ROOT / ".github" / "ISSUE_TEMPLATE"
    for form in issue.glob("*.yml"):
        assert yaml.safe_load(form.read_text()), form
