"""Adversarial training: `deepspeed trainers/adv_train.py +model=spec_vit_b`. Keys: configs/adv_train.yaml."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # imports start at the project root, not at trainers/
    from trainers.entry import main

    main("adv_train")
