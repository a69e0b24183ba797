"""The images that a report shows: those certified by the least, and those that most nearly have a certificate."""

import base64
import io
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import pandas as pd
from PIL import Image
from torch import Tensor

COUNT = 10  # images on each side
PIXELS = 64  # images up to this side length are shown pixel by pixel, in PNG
SHRUNK = 128  # larger ones are shrunk to this, in JPEG


def chosen(table: pd.DataFrame, method: str, eps: float) -> tuple[list[int], list[int]]:
    """Return the rows of the weakest certified images and of the strongest correct images without a certificate.

    They are ordered by certified radius, then by margin, the closest to changing sides first.
    """
    order = [f"radius.{method}", "margin"]
    certified = table[f"certified.{eps:g}"] == "certified"
    weakest = table[certified].sort_values(order, kind="stable")
    strongest = table[table["correct"] & ~certified].sort_values(order, ascending=False, kind="stable")
    return [list(map(int, part.index[:COUNT])) for part in (weakest, strongest)]  # type: ignore[return-value]


def pictures(
    batches: Iterable[tuple[list[str], Tensor, Tensor]], rows: Collection[int], words: Sequence[str] | None = None
) -> dict[int, str]:
    """Return row -> data: URI, from batches (keys, images, labels) that begin with row 0.

    Of sentences, whose batches are numbers of `words`, return row -> sentence.
    """
    found: dict[int, str] = {}
    first, last = 0, max(rows, default=-1)
    for _, images_BCHW, _ in batches:
        inside = range(first, first + len(images_BCHW))
        found |= {row: _seen(images_BCHW[row - first], words) for row in rows if row in inside}
        first = inside.stop
        if first > last:
            break
    return found


def _seen(given: Tensor, words: Sequence[str] | None) -> str:
    return data_uri(given) if words is None else " ".join(words[number] for number in given.tolist() if number)


def data_uri(image_CHW: Tensor) -> str:
    """Return an image in [0,1] with one or three channels as a data: URI of bounded size."""
    array = (image_CHW.clamp(0, 1) * 255).round().byte().movedim(0, -1).cpu().numpy()
    picture = Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[-1] == 1 else array))
    small = max(picture.size) <= PIXELS
    buffer = io.BytesIO()
    if small:
        picture.save(buffer, "PNG", optimize=True)
    else:
        picture.thumbnail((SHRUNK, SHRUNK))
        picture.save(buffer, "JPEG", quality=85)
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
