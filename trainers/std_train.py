"""Standard training: `deepspeed trainers/std_train.py +model=dp_vit_b`; attacks only measure it."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # imports start at the project root, not at trainers/
    from trainers.entry import main

    main("std_train")
