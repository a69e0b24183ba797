"""Operations on the pixels of every image by the fastest available kernel: OpenCV's with the extra `jpeg`.

Pixels are uint8. Mirrored images and planes have the same bytes with every kernel; resized ones differ by at most a
level of 255.
"""

import numpy as np
import torch
from numpy.typing import NDArray

try:
    import cv2

    cv2.setNumThreads(1)  # there are as many loader processes as cores
except ImportError:
    cv2 = None  # type: ignore[assignment]


def resized(image_HWC: NDArray[np.uint8], size: int, interpolation: str) -> NDArray[np.uint8]:
    """Resize as Pillow's bilinear or bicubic filter to size x size: the same pixels to 2 levels of 255.

    Pillow widens its kernel when the image shrinks, and so does torch with `antialias`. When an image grows there is
    nothing to widen, and OpenCV's bilinear kernel takes less than half of torch's time.
    """
    height, width, channels = image_HWC.shape
    if cv2 is not None and interpolation == "bilinear" and max(height, width) <= size:
        grown = cv2.resize(image_HWC, (size, size), interpolation=cv2.INTER_LINEAR)
        return np.asarray(grown, np.uint8).reshape(size, size, channels)
    image_BCHW = torch.from_numpy(np.array(image_HWC)).permute(2, 0, 1)[None]  # a copy: torch needs writable memory
    small_BCHW = torch.nn.functional.interpolate(image_BCHW, (size, size), mode=interpolation, antialias=True)
    return small_BCHW[0].permute(1, 2, 0).numpy()


def mirrored(image_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the image mirrored left to right."""
    if cv2 is not None and image_HWC.flags.c_contiguous:
        return np.asarray(cv2.flip(image_HWC, 1), np.uint8).reshape(image_HWC.shape)
    return image_HWC[:, ::-1]


def write_planes(image_HWC: NDArray[np.uint8], out_CHW: NDArray[np.uint8]) -> None:
    """Copy the image to out_CHW."""
    if cv2 is not None and image_HWC.flags.c_contiguous:
        cv2.split(image_HWC, list(out_CHW))
    else:
        out_CHW[...] = image_HWC.transpose(2, 0, 1)
