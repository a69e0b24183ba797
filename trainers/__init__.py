"""Training: `deepspeed trainers/adv_train.py +model=NAME`. The order of techniques is in `trainers/steps/loop.py`."""
