"""Pages of packages: the names of `__all__`, read from the code without running it."""

from collections.abc import Callable

from docs import ROOT
from docs.generate import docstrings


def page_of(package: str) -> Callable[[], str]:
    """Return a function that makes the page of one package."""
    return lambda: _markdown(package)


def _markdown(package: str) -> str:
    """Return the package with its functions and classes, then each of its public modules."""
    module = docstrings.loaded(ROOT)[package]
    names = docstrings.public(module)
    modules = [name for name in names if module[name].is_module and module[name].canonical_path not in ON_PAGES]
    others = [name for name in names if not module[name].is_module]
    parts = [f"::: {package}\n    options: {{members: [{', '.join(others)}]}}\n"]
    parts += [f'::: {module[name].canonical_path}\n    options: {{filters: ["!^_"]}}\n' for name in modules]
    return "\n".join(parts)


ON_PAGES = set(docstrings.PACKAGES)  # packages with pages of their own
