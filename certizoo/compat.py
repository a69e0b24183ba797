"""A repair of torchvision's PyPI wheels beside a CPU-only torch; import it before torchvision or timm.

The wheels on PyPI are built for CUDA. With a CPU build of torch their C++ library does not load, and `import
torchvision` (hence `import timm`) fails because two operators are never defined. The zoo uses neither operator;
declaring their signatures is enough for both imports.
"""

import torch

_keep_alive: list[torch.library.Library] = []


def define_missing_torchvision_ops() -> None:
    """Declare `torchvision::nms` if torchvision's own library cannot."""
    if _keep_alive or torch.cuda.is_available() or torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for op in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, op):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _keep_alive.append(library)


define_missing_torchvision_ops()
