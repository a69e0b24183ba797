"""An answer as a picture: the image, the nearest attack that was found, and the change between them."""

from io import BytesIO

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from certify.photos.predict import Answer
from certizoo.norms import NAMES

SIDE, GAP, TEXT = 288, 16, 52  # pixels: of a panel, between panels, and of the text below
INK, DIM, PAPER = "#1b1f24", "#5a6470", "#ffffff"


def panels(answer: Answer) -> list[tuple[str, str, Tensor]]:
    """Return (title, note, image (C, H, W) in [0,1]) of each panel.

    The change is drawn around grey, scaled to the full range.
    """
    norm, image_CHW = NAMES[answer.norm], answer.photo.image_CHW
    proved = f"proved up to {norm} {answer.proved}" if answer.radius > 0 else "nothing proved"
    found = [(answer.name, proved, image_CHW)]
    if answer.attacked_CHW is not None:
        change_CHW = answer.attacked_CHW - image_CHW
        scale = 0.5 / max(float(change_CHW.abs().max()), 1e-12)
        found += [
            (answer.attacked_name, f"found at {norm} {answer.found}", answer.attacked_CHW),
            ("the change", f"{scale:.3g} times", 0.5 + scale * change_CHW),
        ]
    return found


def png(image_CHW: Tensor, side: int | None = None) -> bytes:
    """Return the image as a PNG file, enlarged pixel by pixel to `side`."""
    image, buffer = _image(image_CHW), BytesIO()
    (image if side is None else image.resize((side, side), Image.Resampling.NEAREST)).save(buffer, "PNG")
    return buffer.getvalue()


def picture(answer: Answer) -> bytes:
    """Return all panels side by side, as PNG."""
    shown = panels(answer)
    sheet = Image.new("RGB", (GAP + len(shown) * (SIDE + GAP), GAP + SIDE + TEXT), PAPER)
    draw = ImageDraw.Draw(sheet)
    for place, (title, note, image_CHW) in enumerate(shown):
        left = GAP + place * (SIDE + GAP)
        sheet.paste(_image(image_CHW).convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST), (left, GAP))
        draw.text((left, GAP + SIDE + 4), title, INK, ImageFont.load_default(18))
        draw.text((left, GAP + SIDE + 27), note, DIM, ImageFont.load_default(15))
    buffer = BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()


def _image(image_CHW: Tensor) -> Image.Image:
    array_HWC = image_CHW.clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return Image.fromarray(array_HWC[..., 0] if array_HWC.shape[2] == 1 else array_HWC)
