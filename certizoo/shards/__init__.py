"""Read and write WebDataset shards: `{name}-{split}-{000000..}.tar` with an image and a `.cls` per sample.

A manifest lists the shards.

Reading: `find` (checks the shards once, before any work), `train_loader`, `eval_loader`, `eval_samples`,
`steps_per_epoch`. Writing: `write`, or `certizoo shards digits|folder|torchvision|index`.
"""

import certizoo.compat  # noqa: F401  (repairs torchvision before anything here imports it)
from certizoo import UserError
from certizoo.shards.format.config import DataConfig, config_of, from_elsewhere, require_fit
from certizoo.shards.format.tar import SampleError
from certizoo.shards.read import eval_loader, eval_samples, steps_per_epoch, train_loader
from certizoo.shards.sets import ShardSet, find
from certizoo.shards.writing.write import write

__all__ = [
    "DataConfig",
    "SampleError",
    "ShardSet",
    "UserError",
    "config_of",
    "eval_loader",
    "eval_samples",
    "find",
    "from_elsewhere",
    "require_fit",
    "steps_per_epoch",
    "train_loader",
    "write",
]
