"""Limits on the options of a model, checked before anything is built: kinds of values, and sizes.

The sizes are far beyond those of the zoo, but small enough that an untrusted config cannot occupy a machine for a day.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from certizoo import UserError

LONGEST = 64  # list of options
SIDE = 256  # patches of an image in a row
# option: least and most, for a whole number or for each entry of a list
SIZES = {
    "num_classes": (1, 1_000_000),
    "img_size": (1, 2048),
    "patch_size": (1, 2048),
    "in_chans": (1, 1024),
    "embed_dim": (1, 65_536),
    "depth": (0, 512),
    "depths": (0, 512),
    "num_heads": (1, 65_536),
    "window_size": (1, 2048),
    "gpsa_layers": (0, 512),
    "layers": (0, 65_536),
    "hidden": (1, 1_000_000),
    "stem": (1, 65_536),
    "vocabulary": (2, 65_536),
}
LISTS = ("depths", "layers", "hidden")
ROWS = "(channels, kernel size, stride, padding)"  # of convolutions
MAYBE_LISTS = ("num_heads",)
FLAGS = ("bias", "qkv_bias", "fc_norm")
NUMBERS = {
    "mlp_ratio": (0, 64),
    "drop_path_rate": (0, 1),
    "locality_strength": (-1e6, 1e6),
    "gating_init": (-1e6, 1e6),
    "theta": (-1e6, 1e6),
    "patch_cap": (0, 1e6),
}
MAYBE_NONE = ("attn_norm", "residual", "theta", "stem", "patch_cap", "patch_constraint", "mean", "std")
WORDS = ("backbone", "block", "global_pool", "init", "patch_constraint")
PARTS = ("attention", "norm", "attn_norm", "mlp", "residual")
STATISTICS = ("mean", "std")


def check(options: Mapping[str, Any]) -> None:
    """Raise UserError, of one line, for the first option that is of another kind or beyond its bounds."""
    for option, value in options.items():
        if value is None and option in MAYBE_NONE:
            continue
        fits, what = _kind(option)
        if not fits(value):
            raise UserError(f"model option {option}={_short(value)}: give {what}")
    _check_together(options)


def _kind(option: str) -> tuple[Callable[[Any], bool], str]:
    """Return a check of such values, and the words that describe them to a person."""
    if option in SIZES:
        least, most = SIZES[option]
        words = f"a whole number of {least} to {most}"
        if option == "layers":
            return _list_of(_list_of(_whole(least, most))), f"a list of {ROWS}"
        if option == "stem":
            widths, rows = _list_of(_whole(least, most)), _list_of(_list_of(_whole(0, most)))
            return (
                lambda value: widths(value) or rows(value),
                f"a list of whole numbers of {least} to {most}, or of {ROWS}",
            )
        if option in LISTS:
            return _list_of(_whole(least, most)), f"a list of whole numbers of {least} to {most}"
        if option in MAYBE_LISTS:
            one, several = _whole(least, most), _list_of(_whole(least, most))
            return lambda value: one(value) or several(value), f"{words}, or one a stage"
        return _whole(least, most), words
    if option in NUMBERS:
        low, high = NUMBERS[option]
        return lambda value: _finite(value) and low <= value <= high, f"a number of {low:g} to {high:g}"
    if option in FLAGS:
        return lambda value: isinstance(value, bool), "true or false"
    if option in WORDS:
        return _word, "a name"
    if option in STATISTICS:
        return _list_of(_finite), "a list of numbers, one a channel"
    assert option in PARTS, option
    return _part, "a name, or a mapping {name: ..., option: value}"


def _check_together(options: Mapping[str, Any]) -> None:
    size, patch, channels = options["img_size"], options.get("patch_size"), options["in_chans"]
    if patch is not None and size // patch > SIDE:
        raise UserError(f"img_size={size} is {size // patch} patches of {patch} in a row; use at most {SIDE}")
    if sum(options.get("depths", ())) > SIZES["depth"][1]:
        raise UserError(f"depths={_short(options['depths'])}: more than {SIZES['depth'][1]} blocks; use fewer")
    for name in ("layers", "stem"):
        rows = [row for row in options.get(name) or () if not isinstance(row, int)]
        if any(len(row) != 4 or min(row[:3]) < 1 for row in rows):
            raise UserError(f"{name}={_short(options[name])}: give {ROWS} of each")
    for name in STATISTICS:
        values = options[name]
        if values is not None and len(values) not in (1, channels):
            raise UserError(
                f"{name}={_short(values)} has {len(values)} numbers, but in_chans is {channels}; give one a channel, "
                f"such as {name}={[0.5] * channels}; on the command line set model.mean and model.std"
            )
    if options["std"] is not None and min(options["std"]) <= 0:
        raise UserError(f"std={_short(options['std'])}: pixels are divided by it; give numbers above 0")


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def each(value: Any) -> bool:
        return isinstance(value, list | tuple) and len(value) <= LONGEST and all(map(fits, value))

    return each


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9 and math.isfinite(value)


def _word(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST


def _part(value: Any) -> bool:
    """Accept a name, or a mapping with a name and options of the part."""
    if isinstance(value, Mapping) and isinstance(value.get("name"), str) and len(value) <= LONGEST:
        return all(map(_option, value.values()))
    return _word(value)


def _option(value: Any) -> bool:
    """Accept a number, name, switch, list of numbers, or the class of a module, which no file can hold."""
    return value is None or isinstance(value, bool | type) or _word(value) or _finite(value) or _list_of(_finite)(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
