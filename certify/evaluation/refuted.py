"""A counter-example to a certificate, saved with everything that is needed to analyse it."""

import re
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from certify.shared.certificate import UnsoundCertificate
from certizoo.files import whole_file
from certizoo.norms import NAMES

FOLDER = "refuted"


@dataclass(frozen=True)
class Found:
    """An image (C, H, W) in [0,1] whose class an attack changed at a distance in `norm` <= the certified `radius`."""

    key: str
    image_CHW: Tensor
    adversarial_CHW: Tensor
    label: int
    attack: str
    norm: str
    distance: float
    radius: float


def refuse(found: Found, out: Path) -> None:
    """Save the images, if the disk permits, and raise UnsoundCertificate."""
    kept = _kept(found, out)
    raise UnsoundCertificate(
        f"image {found.key} is certified up to {found.radius:.6g} ({NAMES[found.norm]}), but {found.attack} changes "
        f"its class at {found.distance:.6g}: the certificate is wrong. {kept}; please report it with the weights"
    )


def _kept(found: Found, out: Path) -> str:
    """Write OUT/refuted/KEY.safetensors: image and adversarial, the rest as metadata; return a sentence about it."""
    path = out / FOLDER / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', found.key).lstrip('.')}.safetensors"
    facts = {"key": found.key, "label": str(found.label), "attack": found.attack}
    facts |= {found.norm: repr(found.distance), "certified_radius": repr(found.radius)}
    tensors = {"image": found.image_CHW.cpu().contiguous(), "adversarial": found.adversarial_CHW.cpu().contiguous()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            part.write_bytes(save(tensors, facts))
    except OSError as error:
        return f"{path} could not be written ({error.strerror or error})"
    return f"Both images are in {path}"
