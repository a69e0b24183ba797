"""Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) by timm: a batch is mixed with its reverse.

Legend: images_BCHW in [0,1], labels_B classes, labels_BK probabilities.
"""

from timm.data.mixup import Mixup
from torch import Tensor

from certizoo.shards.views.augment import seeded
from trainers.settings import MixConfig


def mixed(config: MixConfig, images_BCHW: Tensor, labels_B: Tensor, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return mixed (images_BCHW, labels_BK), a function of the arguments; the arguments if mixing is off. B is even."""
    if not config.active:
        return images_BCHW, labels_B
    # The loss applies label smoothing itself (train.label_smoothing).
    mixup = Mixup(config.mixup, config.cutmix, None, config.prob, config.switch_prob, "batch", True, 0.0, classes)
    with seeded(seed):
        images_BCHW, labels_BK = mixup(images_BCHW.clone(), labels_B)
    return images_BCHW, labels_BK
