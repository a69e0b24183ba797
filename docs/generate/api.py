"""Pages of packages whose public names are modules too: what `__all__` lists, read from the code and not run."""

from collections.abc import Callable
from pathlib import Path

from docs.generate import docstrings

ROOT = Path(__file__).resolve().parents[2]


def page_of(package: str) -> Callable[[], str]:
    """Of one package, as a part of a page."""
    return lambda: _markdown(package)


def _markdown(package: str) -> str:
    """The package with its functions and classes, then each of its public modules."""
    module = docstrings.loaded(ROOT)[package]
    names = docstrings.public(module)
    modules = [name for name in names if module[name].is_module and module[name].canonical_path not in ON_PAGES]
    others = [name for name in names if not module[name].is_module]
    parts = [f"::: {package}\n    options: {{members: [{', '.join(others)}]}}\n"]
    parts += [f'::: {module[name].canonical_path}\n    options: {{filters: ["!^_"]}}\n' for name in modules]
    return "\n".join(parts)


ON_PAGES = set(docstrings.PACKAGES)  # those that have a page of their own
