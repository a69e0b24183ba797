"""Hydra configurations composed by our own entry points, with errors of one line.

`hydra.main` would give each rank of a distributed run an output folder of its own and knows nothing of a launcher's
flags, so the entry files compose for themselves.
"""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from certizoo.errors import UserError

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def compose_config(config_name: str, overrides: Sequence[str], configs: Path = CONFIGS) -> dict[str, Any]:
    """The resolved configuration. Raises UserError where a key, a group or the model is wrong or missing."""
    try:
        with initialize_config_dir(str(configs), version_base="1.3"):
            config = compose(config_name, overrides=[_free_of_plus(override) for override in overrides])
        _check_model(config, configs)
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_one_line(error, config_name, configs)) from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _free_of_plus(override: str) -> str:
    """model.OPTION=VALUE, whether or not the recipe has the key: the model itself knows its options, and refuses others
    by name."""
    return re.sub(r"^\+?(?=model\.)", "++", override)


def _check_model(config: DictConfig, configs: Path) -> None:
    if OmegaConf.is_missing(config, "model"):
        raise UserError(f"no model given; add +model=NAME, {_suggest('', _names(configs / 'model'))}")


def _names(group: Path) -> list[str]:
    return sorted(path.stem for path in group.glob("*.yaml"))


def _one_line(error: Exception, config_name: str, configs: Path) -> str:
    """Hydra's message, cut to what is wrong and the mend."""
    text = str(error)
    if isinstance(error, MissingConfigException) and (found := re.search(r"Could not find '([^']+)'", text)):
        group, _, name = found[1].rpartition("/")
        return f"there is no {group} {name!r}; {_suggest(name, _names(configs / group))}"
    if "Could not override 'model'" in text:
        return f"write +model=NAME, with a plus sign; {_suggest('', _names(configs / 'model'))}"
    if found := re.search(r"Could not override '([^']+)'", text):
        return f"there is no config key {found[1]!r}; {_suggest(found[1], _keys(config_name, configs))}"
    if found := re.search(r"An item is already at '([^']+)'", text):
        return f"config key {found[1]!r} exists already; write it without the plus sign"
    return f"configuration: {' '.join(text.split('See https')[0].split())}"


def _keys(config_name: str, configs: Path) -> list[str]:
    with initialize_config_dir(str(configs), version_base="1.3"):
        config = OmegaConf.to_container(compose(config_name), resolve=False)

    def flat(node: Any, prefix: str) -> Iterator[str]:
        for key, value in node.items():
            yield prefix + str(key)
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")

    return sorted(flat(config, ""))


def _suggest(wrong: str, choices: Sequence[str]) -> str:
    close = get_close_matches(wrong, choices, n=3) if wrong else []
    if close:
        return f"did you mean {' or '.join(close)}?"
    group = [choice for choice in choices if choice.startswith(wrong.rpartition(".")[0] + ".")] or choices
    return f"choose one of {', '.join(group)}"
