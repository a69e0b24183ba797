"""CertViT: `deepspeed trainers/constrain.py +model=l2_deit_ti pretrained=WEIGHTS`. Keys: configs/constrain.yaml."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # imports start at the project root, not at trainers/
    from certizoo.imports import large_imports
    from trainers.entry import main

    with large_imports():
        from trainers.certvit.run import run

    main("constrain", work=run)
