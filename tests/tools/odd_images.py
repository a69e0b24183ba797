"""Image files as people have them: every mode, transparency, orientation tags, cut files, headers that lie."""

import io
import random
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image, PngImagePlugin

from tests.tools.hostile_shards import chunk, png_of

SIDE = 16
MODES_OF = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK", "YCbCr"),
    "WEBP": ("RGB", "RGBA"),
}
EVERY_MODE = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")  # as Pillow may hold
SUFFIX = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp"}
XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="{}"/></x:xmpmeta>'


def drawn(mode: str, seed: int = 0) -> Image.Image:
    """Return a picture without symmetries, half of it transparent where the mode has transparency."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 4), dtype=np.uint8)
    noise[:2, :, 3] = (0, 80, 200, 255)
    image = Image.fromarray(noise, "RGBA").resize((SIDE, SIDE), Image.Resampling.NEAREST)
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    if mode == "PA":
        return drawn("P", seed).convert("PA")
    return image.convert("RGB").convert(mode) if mode in ("P", "1", "RGBX", "CMYK", "YCbCr") else image.convert(mode)


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def transparent(mode: str, see_through: object, seed: int = 0) -> bytes:
    """Return a PNG with a colour, or palette entries, declared transparent."""
    return saved(drawn(mode, seed), "PNG", transparency=see_through)


def sixteen_bits() -> bytes:
    """Return a PNG of 16 bits per colour, which Pillow reads as 8."""
    rows = b"".join(b"\0" + bytes(np.random.default_rng(y).integers(0, 256, SIDE * 6, np.uint8)) for y in range(SIDE))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 16, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def odd_images(seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Iterate over (name, bytes) of 200 image files."""
    draw = random.Random(seed)
    plain = [(kind, mode) for kind, modes in MODES_OF.items() for mode in modes]
    for kind, mode in plain:
        yield f"{mode}.{SUFFIX[kind]}", saved(drawn(mode), kind, **({"lossless": True} if kind == "WEBP" else {}))
    for kind, mode in (("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"), ("JPEG", "RGB"), ("JPEG", "L"),
                       ("JPEG", "CMYK"), ("WEBP", "RGB"), ("WEBP", "RGBA")):  # fmt: skip
        for orientation in (*range(10), 65535):
            data = saved(drawn(mode, orientation), kind, exif=exif_of(orientation))
            yield f"orientation{orientation}-{mode}.{SUFFIX[kind]}", data
    for orientation in range(1, 9):
        text = XMP.format(orientation)
        yield f"xmp{orientation}.jpg", saved(drawn("RGB", orientation), "JPEG", xmp=text.encode())
        info = PngImagePlugin.PngInfo()
        info.add_itxt("XML:com.adobe.xmp", text)
        yield f"xmp{orientation}.png", saved(drawn("RGB", orientation), "PNG", pnginfo=info)
    declared = [("L", 7), ("RGB", (1, 2, 3)), ("1", 0), ("P", 3), ("P", bytes(range(0, 256, 3))), ("P", b"\0"),
                ("P", bytes(256))]  # fmt: skip
    for number, (mode, see_through) in enumerate(declared):
        yield f"transparent{number}-{mode}.png", transparent(mode, see_through)
    yield "sixteen.png", sixteen_bits()
    yield "progressive.jpg", saved(drawn("RGB"), "JPEG", progressive=True)
    for size in ((65535, 65535), (2**31 - 1, 1), (5000, 5000), (SIDE, 0)):
        yield f"huge-{size[0]}x{size[1]}.png", png_of(*size)
    yield "no_exif.jpg", saved(drawn("RGB"), "JPEG", exif=b"Exif\0\0")
    yield "broken_exif.jpg", saved(drawn("RGB"), "JPEG", exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff")
    yield "gif.png", saved(drawn("P"), "GIF")
    yield "nothing.jpg", b""
    yield "text.png", b"no picture"
    for number in range(200 - 13 - 88 - 16 - 7 - 2 - 4 - 5):
        kind, mode = draw.choice(plain)
        data = saved(drawn(mode, number), kind, exif=exif_of(draw.randrange(1, 9)))
        if draw.random() < 0.5:
            yield f"cut{number}-{mode}.{SUFFIX[kind]}", data[: draw.randrange(len(data))]
        else:
            place = draw.randrange(len(data))
            flipped = data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]
            yield f"flipped{number}-{mode}.{SUFFIX[kind]}", flipped
