"""Extensions by other packages: the modules of the entry point group `certizoo.plugins`.

A module registers what it adds when it is imported, which happens where a variant of attention, an objective or a kind
of attack is first looked up. Its package may have a folder `configs` like ours; Hydra searches it after ours.
"""

import importlib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from certizoo.errors import UserError

GROUP = "certizoo.plugins"


@cache
def load() -> None:
    """Import all modules of the group. Raises UserError naming the package of one that cannot be imported."""
    for entry in entry_points(group=GROUP):
        try:
            importlib.import_module(entry.module)
        except Exception as error:
            raise _broken(entry, f"{type(error).__name__}: {error}") from error


@cache
def config_folders() -> tuple[Path, ...]:
    """Return the folders `configs` of the packages; their modules are not imported."""
    found = []
    for entry in entry_points(group=GROUP):
        try:
            spec = find_spec(entry.module)
        except ImportError as error:
            raise _broken(entry, str(error)) from error
        places = (spec.submodule_search_locations if spec else None) or []
        found += [folder for place in places if (folder := Path(place) / "configs").is_dir()]
    return tuple(found)


def _broken(entry: EntryPoint, why: str) -> UserError:
    package = entry.dist.name if entry.dist else entry.value
    return UserError(f"the extension {package} cannot be imported ({why}); repair it, or pip uninstall {package}")
