"""The data settings of a run: exactly the keys of `configs/data/*.yaml`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Annotated, Any

from certizoo import UserError
from certizoo.config.schema import Ge, Le, OneOf, PathText, Positive, Section, section_of
from certizoo.shards.format.tokens import SUFFIX

TEXT = "text"
PIPE = "pipe:"  # prefix of a root that is a command
# A name without special meaning in a path, a URL or a command
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")

MAX_TEXT = 4096


@dataclass(frozen=True)
class DataConfig(Section):
    """One data set and how it is read.

    Attributes:
        root: the folder of the shards, a URL (s3, gs, az, abfs, https, http, file) or `pipe:COMMAND {shard}`.
        train, test: globs in the root.
        timeout: seconds that a remote root may be silent.
        cache: folder for local copies of shards, at most `cache_gb` (1e9 bytes) for all processes together.
        channels, img_size: images leave the loaders as `channels` x `img_size` x `img_size`.
        kind: "images", or "text": sentences leave the loaders as the numbers of their first `img_size` tokens.
        tokenizer: the tokeniser of text; null takes NAME.tokenizer.json beside the shards.
        erase: probability that a training image loses a rectangle (timm's RandomErasing, with black).
        mix: the shares of several training sets, {NAME: SHARE}, this set (`name`) among them. Shards of the others are
            `NAME-train-*.tar` in the root, or in FOLDER of `FOLDER/NAME`, relative to the root.
        repeats: views of each training image that an epoch draws (repeated augmentation, Hoffer et al. 2020).
        interpolation: of training crops; evaluation always uses Pillow's bicubic resizing.
        workers: loader processes per rank.
        on_corrupt: "skip" lets training (never evaluation) skip at most `max_corrupt` samples.
        verify: how shards are compared with their manifest: `size`, `sha256`, or `auto` (sha256 if it takes about a
            second, else size). Fetched shards and blocks are checked by sha256 on arrival, except with `size`. Cached
            files are checked by size when opened, and with `sha256` also by sha256; a changed file is fetched again.

    Raises:
        UserError: a value does not exist.
    """

    name: str
    root: str
    train: str
    test: str
    num_classes: Annotated[int, Ge(2), Le(1_000_000)]
    img_size: Annotated[int, Ge(1), Le(4096)]
    channels: Annotated[int, OneOf(1, 3)] = 3
    kind: Annotated[str, OneOf("images", "text")] = "images"
    tokenizer: PathText | None = None
    augment: Annotated[str, OneOf("none", "flip", "flip_crop", "flip_crop_jitter", "inception", "randaug")] = "none"
    erase: Annotated[float, Ge(0), Le(1)] = 0.0
    mix: dict[str, Positive] | None = None
    repeats: Annotated[int, Ge(1), Le(64)] = 1
    interpolation: Annotated[str, OneOf("bilinear", "bicubic")] = "bilinear"
    workers: Annotated[int, Ge(0), Le(512)] = 0
    on_corrupt: Annotated[str, OneOf("error", "skip")] = "error"
    max_corrupt: Annotated[int, Ge(0), Le(10**12)] = 100
    verify: Annotated[str, OneOf("auto", "size", "sha256")] = "auto"
    cache: PathText | None = None
    cache_gb: Positive = 100
    timeout: Annotated[int, Ge(1), Le(86_400)] = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("root", "train", "test"):
            if not _is_text(getattr(self, key)):
                raise UserError(f"data.{key}={str(getattr(self, key))[:80]!r} is invalid; give one line of text")
        require_name(self.name, "data.name")
        if self.augment in ("flip_crop_jitter", "randaug") and self.channels != 3:
            raise UserError(
                f"data.augment={self.augment} needs colour images; use data.channels=3 or data.augment=none"
            )
        if self.mix is not None:
            _require_shares(self.mix, self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a sample in bytes: an image (C, H, W), or two bytes for each token (T, 2)."""
        return (self.img_size, 2) if self.kind == TEXT else (self.channels, self.img_size, self.img_size)

    @property
    def tokens(self) -> Path:
        """Return the file of the tokeniser. Raises UserError if it cannot be known."""
        if self.tokenizer is not None:
            return Path(self.tokenizer)
        if is_remote(self.root):
            raise UserError(f"data.root={self.root[:200]} is remote; copy its tokeniser and set data.tokenizer=FILE")
        return self.folder / f"{self.name}{SUFFIX}"

    @property
    def mixed(self) -> list["DataConfig"]:
        """Return the training sets of the mixture, this one first."""
        others = [name for name in self.mix or () if name != self.name]
        return [self, *(self._beside(name) for name in others)]

    def _beside(self, where: str) -> "DataConfig":
        folder, _, name = where.rpartition("/")
        root = self.root if not folder else folder if is_remote(where) else str(self.folder / folder)
        return replace(self, name=name, root=root, train=f"{name}-train-*.tar", mix=None)

    @property
    def folder(self) -> Path:
        """Return the root if it is a folder of this machine. Raises UserError for a home that does not exist."""
        return _expanded(self.root)


def _require_shares(mix: Mapping[str, float], name: str) -> None:
    """Raise UserError unless the shares are of sets with names, the set `name` among them, and sum to 1."""
    for where in mix:
        require_name(where.rpartition("/")[2], "a name in data.mix")
    if name not in mix:
        raise UserError(f"data.mix has no share of {name}, the run's own data; add {name}: SHARE")
    if not isclose(total := sum(mix.values()), 1, abs_tol=1e-6):
        raise UserError(f"the shares of data.mix sum to {total:.6g}; let them sum to 1")


def require_name(name: object, key: str) -> None:
    """Raise UserError unless `name`, the value of `key`, is plain: it becomes part of file names and globs."""
    if not isinstance(name, str) or not PLAIN.fullmatch(name):
        raise UserError(f"{key}={str(name)[:80]!r}: not a name; use letters, digits and _.+=-")


def is_remote(root: str) -> bool:
    """Return True if `data.root` is a URL or a command, which does not depend on the current folder."""
    return root.lower().startswith(PIPE) or "://" in root


def config_of(said: object, where: str) -> DataConfig:
    """Return the data that `where` describes by these keys. Raises UserError for keys that are wrong or missing."""
    if not isinstance(said, Mapping):
        raise UserError(f"{where} does not name its data; add data=NAME data.root=FOLDER")
    return section_of(DataConfig, said, "data", "configs/data")


def require_fit(data: DataConfig, model: Mapping[str, Any]) -> None:
    """Raise UserError unless a model with these options takes the images and the labels of the data."""
    name = model["name"]
    require_kind(data, model, name)
    sizes = {"img_size": "img_size"} | ({} if data.kind == TEXT else {"channels": "in_chans"})
    for key, option in sizes.items():
        own = getattr(data, key)
        if (taken := model.get(option, own)) != own:
            raise UserError(f"data.{key} is {own}, but {name} takes {taken}. Set data.{key}={taken}.")
    if (classes := model.get("num_classes", data.num_classes)) != data.num_classes:
        raise UserError(
            f"data.num_classes is {data.num_classes}, but {name} has {classes} classes. Use the data of its training, "
            f"or set data.num_classes={classes} if labels mean the same."
        )


def require_kind(data: DataConfig, options: Mapping[str, Any], name: str) -> None:
    """Raise UserError unless the model `name` with these options takes images, or text, as the data are."""
    taken = TEXT if "vocabulary" in options else "images"
    if data.kind != taken:
        raise UserError(f"data.kind is {data.kind}, but {name} takes {taken}; choose another model or other data")


def from_elsewhere(said: object, where: str, *, trusted: bool) -> DataConfig:
    """Return the data that a file from elsewhere describes, restricted to a local folder without a cache or a mixture.

    A cache would be written where the file says. If `trusted`, a URL and a cache are allowed too, but never a command.

    Raises:
        UserError: the file asks for more.
    """
    config = config_of(said, where)
    own = "set data.root=FOLDER yourself"
    if config.root.lower().startswith(PIPE):
        raise UserError(f"data.root={config.root[:200]} is a command that {where} names; {own}")
    if is_remote(config.root) and not trusted:
        raise UserError(
            f"data.root={config.root[:200]} is a remote place that {where} names; {own}, or trust_data=true"
        )
    return replace(config, mix=None, cache=config.cache if trusted else None)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


def _expanded(folder: str) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise UserError(f"data.root={folder} names a home that does not exist; give another folder") from None
