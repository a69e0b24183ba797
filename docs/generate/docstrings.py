"""Public names without a docstring: those of `__all__`, and public methods of public classes."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe

PACKAGES = ("zoo", "zoo.rules", "certify", "certizoo.shards", "certizoo.attacks", "certizoo.registry")


def missing(root: Path) -> list[str]:
    """Return dotted names without a docstring."""
    found, modules = [], loaded(root)
    for package in PACKAGES:
        module = modules[package]
        found += [f"{package}.{name}" for name in public(module) for name in _silent(module[name], name)]
    return found


@cache
def loaded(root: Path) -> griffe.ModulesCollection:
    """Return the packages below `root`. Their code is read but not run."""
    loader = griffe.GriffeLoader(search_paths=[str(root)])
    for package in dict.fromkeys(name.partition(".")[0] for name in (*PACKAGES, "certizoo")):
        loader.load(package)
    loader.resolve_aliases(external=False)
    return loader.modules_collection


def public(module: griffe.Module | griffe.Alias) -> list[str]:
    """Return the names of `__all__`."""
    return [str(name) for name in module.exports or []]


def _silent(item: griffe.Object | griffe.Alias, name: str) -> Iterator[str]:
    """Iterate over the name and its public functions without a docstring; imported names do not count."""
    if not item.has_docstring:
        yield name
    if item.is_class or item.is_module:
        for key, member in item.members.items():
            own = not key.startswith("_") and not (item.is_module and member.is_alias)
            if own and member.is_function and not member.has_docstring:
                yield f"{name}.{key}"
