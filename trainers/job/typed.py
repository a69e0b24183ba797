"""From the keys of one group of the configuration to its dataclass."""

from collections.abc import Mapping
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from certizoo import UserError
from certizoo.nearest import unknown

T = TypeVar("T")


def typed(cls: type[T], config: Mapping[str, Any], group: str) -> T:
    """Return the dataclass from the keys of one group; OmegaConf checks names and types."""
    try:
        schema = OmegaConf.structured(cls)
        for key in schema:
            if not OmegaConf.is_missing(schema, key) and OmegaConf.is_config(schema[key]):
                # A frozen dataclass inside another would refuse its own keys.
                OmegaConf.set_readonly(schema[key], False)
        value = OmegaConf.to_object(OmegaConf.merge(schema, config[group]))
    except OmegaConfBaseException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        if isinstance(error, ConfigKeyError) and error.full_key:
            keys = [f"{group}.{key}" for key in OmegaConf.structured(cls)]
            raise unknown("config key", f"{group}.{error.full_key}", keys) from None
        raise UserError(f"config {group}.{error.full_key or ''}: {str(error).splitlines()[0]}") from None
    assert isinstance(value, cls)
    return value
