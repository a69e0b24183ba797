"""Hydra configurations composed by our own entry points, with one-line errors.

`hydra.main` would give each rank of a distributed run its own output folder and does not accept a launcher's flags, so
the entry files compose for themselves.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from certizoo import plugins
from certizoo.config.recipes import TABLES, row, table
from certizoo.config.schema import written
from certizoo.errors import UserError
from certizoo.nearest import unknown

CONFIGS = (Path(__file__).parents[1] / "configs").resolve()  # in a checkout a link to the top level's
LISTED = {"model": "python -m zoo", "experiment": "configs/experiment, configs/experiments.yaml"}
TEXTS = re.compile(r"(certify\.)?(name|out|run_dir|nonce|beacon)")  # keys whose numbers are names
NO_VALUE = object()  # of a word that Hydra cannot read, or would sweep over
WITH_PLUS = ("model", "attention", "experiment")  # groups without a default in the main files


def compose_config(config_name: str, overrides: Sequence[str], configs: Path = CONFIGS) -> dict[str, Any]:
    """Return the resolved configuration. Raises UserError if a key or a group is wrong, or the model missing."""
    if own := next((word for word in overrides if re.match(r"[+~]*hydra\.(?!searchpath)", word)), None):
        raise UserError(
            f"{own} sets an option of Hydra, which has no effect here; to place results, set run_dir or out"
        )
    if flag := next((word for word in overrides if word.startswith("-")), None):
        raise UserError(f"{flag} is a flag, but options are KEY=VALUE; see configs/{config_name}.yaml for the keys")
    try:
        words = [_free_of_plus(_readable(override)) for override in overrides]
        config = _composed(config_name, words, configs)
        _check_parts(config, config_name, overrides, configs)
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: null for a group
        raise UserError(_one_line(error, config_name, overrides, configs)) from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _composed(config_name: str, overrides: Sequence[str], configs: Path) -> DictConfig:
    """Compose with Hydra.

    If Hydra finds no file of a chosen model or experiment, on the command line or in an experiment, the row of its
    table is added to Hydra's store.
    """
    store = ConfigStore.instance()
    try:
        while True:
            try:
                with initialize_config_dir(str(configs), version_base="1.3"):
                    return compose(config_name, overrides=_with_plugins(overrides))
            except MissingConfigException as error:
                group, _, name = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
                if (content := row(group, name, configs)) is None:
                    raise
                store.store(name, content, group, package="_global_")
    finally:
        for group in TABLES:
            store.repo.pop(group, None)  # the next composition may find a file of that name


def _with_plugins(overrides: Sequence[str]) -> list[str]:
    """Add the folders of other packages to Hydra's search path, before those that the user names."""
    key, places = "hydra.searchpath=", [f"'file://{folder}'" for folder in plugins.config_folders()]
    if not places:
        return list(overrides)
    own = [override.removeprefix(key)[1:-1] for override in overrides if override.startswith(key)]
    rest = [override for override in overrides if not override.startswith(key)]
    return [*rest, f"{key}[{','.join([*places, *own])}]"]


def files_of(group: str, configs: Path = CONFIGS) -> dict[str, Path]:
    """Return the files of a group by name, those of other packages included; ours come first, as for Hydra."""
    folders = [*reversed(plugins.config_folders()), configs]
    return {path.stem: path for folder in folders for path in sorted((folder / group).glob("*.yaml"))}


def override(key: str, value: object) -> str:
    """Return the word KEY=VALUE by which a command gets exactly this value: text may look like a number or null."""
    if not isinstance(value, str):
        return f"{key}={json.dumps(value, separators=(',', ':'))}"
    plain = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # no interpolation
    return f"{key}={value}" if _meaning(f"{key}={value}") == plain else f"{key}={_quoted(plain)}"


def _readable(word: str) -> str:
    """Quote a value that Hydra's grammar would not take for what it is.

    It cannot read `~/runs`, `a=b`, letters of other scripts or `{a,b}.tar`, takes `a,b` for two values to sweep over,
    and makes other numbers of names such as 2026_11_30 and 1e5.
    """
    key, equals, value = word.partition("=")
    meant = _meaning(word)
    number = isinstance(meant, bool | int | float) and TEXTS.fullmatch(key.lstrip("+"))
    return f"{key}={_quoted(value)}" if equals and (number or meant is NO_VALUE) else word


def _meaning(word: str) -> object:
    """Return the value of a word as Hydra reads it; NO_VALUE if it cannot, or sweeps."""
    try:
        found = OverridesParser.create().parse_override(word)
    except HydraException:
        return NO_VALUE
    return NO_VALUE if found.is_sweep_override() else found.value()


def _quoted(value: str) -> str:
    """Return the text in quotes; only backslashes in front of a quote, and quotes, need another one."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def _free_of_plus(override: str) -> str:
    """Allow model.OPTION=VALUE even if the recipe lacks the key: the model refuses unknown options by name."""
    return re.sub(r"^\+?(?=model\.)", "++", override)


def _check_parts(config: DictConfig, config_name: str, overrides: Sequence[str], configs: Path) -> None:
    """Require a model if one is needed, and refuse parts that nothing reads.

    Each part's reader checks the keys inside.
    """
    known = _parts(config_name, configs)
    for word in overrides:
        part = re.split(r"[.=@]", word.lstrip("+"))[0]
        if word.startswith("+") and part in config and part not in known:
            raise unknown("config key", part, known, f"configs/{config_name}.yaml")
    if OmegaConf.is_missing(config, "model"):
        raise UserError("no model given; add +model=NAME, such as +model=spec_vit_b (all: python -m zoo)")


def _one_line(error: Exception, config_name: str, overrides: Sequence[str], configs: Path) -> str:
    """Shorten Hydra's message to the fault and its remedy."""
    text = str(error)
    if isinstance(error, MissingConfigException) and (found := re.search(r"Could not (?:find|load) '([^']+)'", text)):
        group, _, name = found[1].partition("/")
        rows = {key for key in table(group, configs) if key.isidentifier()}  # no patterns
        names = sorted(rows | set(files_of(group, configs)))
        return str(unknown(group, name, names, _listed(group)))
    if found := re.search(r"Could not (?:override|delete from config\.) '([^']+)'", text):
        key = found[1]
        if key in WITH_PLUS and "model" in _parts(config_name, configs):
            return f"write +{key}=NAME, with a plus sign (all: {_listed(key)})"
        return str(unknown("config key", key, _keys(config_name, overrides, configs), f"configs/{config_name}.yaml"))
    if text.startswith("Config group override must be"):
        chosen = {word.partition("=")[0].lstrip("+"): word for word in overrides}
        groups = (key for key, word in chosen.items() if key and not isinstance(_meaning(word), str))
        group = next((key for key in groups if (configs / key).is_dir()), None)
        if group is None:
            return f"{chosen.get('', 'a word')} sets nothing; write KEY=VALUE"
        return f"{chosen[group]} names no file; write {group}=NAME (all: {_listed(group)})"
    if found := re.search(r"An item is already at '([^']+)'", text):
        return f"config key {found[1]!r} exists already; write it without the plus sign"
    if found := re.search(r"Error parsing override '([^'=]+)'\s+missing EQUAL", text):
        return f"{found[1]!r} sets nothing; write KEY=VALUE, such as +model=NAME"
    return f"configuration: {' '.join(text.split('See https')[0].split())}"


def _listed(group: str) -> str:
    return LISTED.get(group, f"configs/{group}")


def defaults_of(config_name: str, configs: Path = CONFIGS) -> dict[str, str]:
    """Return every key of a configuration with its default as one writes it, such as null, true or [0.1,1]."""
    pairs = _flat(_composed(config_name, (), configs))
    return {key: written(value) for key, value in pairs if not (isinstance(value, dict) and value)}


def _flat(config: DictConfig) -> Iterator[tuple[str, Any]]:
    """Iterate over the dotted keys, sections before their content, and the values as they were written."""

    def below(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in node.items():
            yield prefix + str(key), value
            if isinstance(value, dict):
                yield from below(value, f"{prefix}{key}.")

    return below(OmegaConf.to_container(config, resolve=False), "")


@cache
def _parts(config_name: str, configs: Path) -> list[str]:
    """Return the first words of all keys."""
    return [key for key in _keys(config_name, (), configs) if "." not in key]


def _keys(config_name: str, overrides: Sequence[str], configs: Path) -> list[str]:
    """Return every key, including those of the groups that the overrides choose."""
    groups = [word for word in overrides if (configs / word.partition("=")[0].lstrip("+")).is_dir()]
    try:
        config = _composed(config_name, groups, configs)
    except HydraException:  # another fault besides the one that is reported
        config = _composed(config_name, (), configs)
    return sorted(key for key, _ in _flat(config))
