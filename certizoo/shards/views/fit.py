"""The evaluation view of an image. H, W: height, width; C: channels."""

from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from certizoo.images import Pixels, array_of

CROP_RATIO = 224 / 256  # centre crop of photographs: the usual protocol of ImageNet


def fit(image_HWC: Pixels, size: int) -> Pixels:
    """Return the evaluation view, size x size: the image itself if it fits, else the resized centre (bicubic).

    A larger image is resized to short side size / CROP_RATIO and cropped. A smaller one is enlarged to short side
    `size`, so that nothing of it is lost.
    """
    if image_HWC.shape[:2] == (size, size):
        return image_HWC
    image = Image.fromarray(image_HWC.squeeze(2) if image_HWC.shape[2] == 1 else image_HWC)
    short = size if min(image.size) <= size else round(size / CROP_RATIO)
    resized = F.resize(image, [short], interpolation=v2.InterpolationMode.BICUBIC, antialias=True)
    return array_of(F.center_crop(resized, [size, size]), image_HWC.shape[2])
