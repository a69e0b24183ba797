"""Hooks that MkDocs calls while it builds the site (mkdocs.yml).

They fill in generated parts, redirect links that leave `docs` to copies or pages, convert formulas to MathML, and warn
of public names without a docstring; a warning fails the build.
"""

import logging
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from docs import ROOT
from docs.generate import docstrings, formulas, headings, links, made

NOT_IN_NAV = InclusionLevel.NOT_IN_NAV
log = logging.getLogger("mkdocs.hooks.certizoo")  # MkDocs counts warnings below "mkdocs"


def on_pre_build(config: MkDocsConfig) -> None:
    """Warn of every public name without a docstring."""
    for name in docstrings.missing(ROOT):
        log.warning("%s is public and has no docstring", name)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add files outside `docs` that pages refer to, and the curves of the leaderboard."""
    pages = {file.src_uri: _text(file) for file in files.documentation_pages()}
    for path in links.copied(pages):
        files.append(
            File.generated(config, f"{links.COPIES}/{path}", abs_src_path=str(ROOT / path), inclusion=NOT_IN_NAV)
        )
    for name, content in made.files().items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in generated parts and correct titles and links."""
    uri = page.file.src_uri
    return links.rewritten(made.filled(headings.one_title(markdown)), uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert formulas to MathML, and proofs that docstrings name to links."""
    return links.of_docstrings(formulas.as_mathml(html), page.file.src_uri)


def _text(file: File) -> str:
    return made.filled(Path(file.abs_src_path or "").read_text())
