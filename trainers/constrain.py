"""CertViT: `deepspeed trainers/constrain.py +model=l2_deit_ti pretrained=WEIGHTS`. Keys: configs/constrain.yaml."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project, not trainers/, is where imports start
    from trainers.certvit.run import run
    from trainers.entry import main

    main("constrain", work=run)
