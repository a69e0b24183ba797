"""Training: `deepspeed trainers/adv_train.py +model=NAME`. The order of techniques is in `trainers/loop.py`."""

import certizoo  # noqa: F401  (repairs torchvision before timm imports it)
