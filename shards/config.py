"""What a run says about its data: exactly the keys of `configs/data/*.yaml`."""

from dataclasses import dataclass

from certizoo import UserError

CHOICES = {
    "augment": ("none", "flip", "flip_crop", "inception", "randaug"),
    "on_corrupt": ("error", "skip"),
    "verify": ("auto", "size", "sha256"),
    "channels": (1, 3),
}
LEAST = {"num_classes": 2, "img_size": 1, "workers": 0, "max_corrupt": 0, "timeout": 1}


@dataclass(frozen=True)
class DataConfig:
    """One data set and how it is read.

    `root` is the folder of the shards, `train` and `test` are globs in it. A root may be a URL (s3, gs, az, abfs,
    https, http, file) or `pipe:COMMAND {shard}`; `timeout` is how many seconds it may be silent. With `cache=FOLDER`
    shards are read from copies there, `cache_gb` (1e9 bytes) of them at most for all processes together. Images leave
    the loaders as `channels` x `img_size` x `img_size`. `workers` are loader processes a rank. `on_corrupt="skip"` lets
    training (never evaluation) pass over at most `max_corrupt` samples. `verify` says how far shards are held
    against their manifest: `size`, `sha256`, or `auto` (sha256 where that takes a second, size otherwise); of shards
    that are fetched, all but `size` mean the sha256 of each when it comes.

    Raises `UserError` for a value that does not exist.
    """

    name: str
    root: str
    train: str
    test: str
    num_classes: int
    img_size: int
    channels: int = 3
    augment: str = "none"
    workers: int = 0
    on_corrupt: str = "error"
    max_corrupt: int = 100
    verify: str = "auto"
    cache: str | None = None
    cache_gb: float = 100
    timeout: int = 60

    def __post_init__(self) -> None:
        for key, allowed in CHOICES.items():
            if getattr(self, key) not in allowed:
                raise UserError(f"data.{key}={getattr(self, key)!r} does not exist; use one of {list(allowed)}")
        for key, least in LEAST.items():
            if not isinstance(getattr(self, key), int) or getattr(self, key) < least:
                raise UserError(f"data.{key}={getattr(self, key)!r}: not a whole number; use at least {least}")
        if not isinstance(self.cache_gb, int | float) or not self.cache_gb > 0:
            raise UserError(f"data.cache_gb={self.cache_gb!r}: not a size; use gigabytes, more than 0")
        if self.augment == "randaug" and self.channels != 3:
            raise UserError("data.augment=randaug needs colour images; use data.channels=3 or data.augment=none")
