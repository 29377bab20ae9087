"""From encoded bytes that anybody may have sent to pixels, within bounds of memory and time.

What a file says of its size is checked before its pixels are decoded. A row of pixels takes as little as a few bits
in a file, so that the bound on bytes alone bounds nothing.
"""

from __future__ import annotations

import io
import threading
import warnings

from PIL import Image, ImageOps

from qbe.errors import QBEError
from qbe.pictures.picture import Picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_PIXELS = 25_000_000  # 75 MB of them, and two copies on the way
MOST_ASPECT = 50  # processors make the shorter side as long as they need it
LEAST_SIDE = 4  # fewer rows could be taken for channels
_MOST_SCANS = 128  # of a JPEG: each goes over all pixels
_SCAN = b"\xff\xda"

# Pillow's own bounds are for the process; ours are lower, and what it warns of is refused here.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
_one = threading.Lock()  # what one takes bounds what all take


def decode(picture: Picture) -> Image.Image:
    """Its pixels, upright, of mode RGB; of several frames the first.

    Raises:
        QBEError: another format, damaged, truncated, too large, too small or too narrow.
    """
    with _one:
        try:
            return _decoded(picture)
        except QBEError:
            raise
        except Exception as error:  # Pillow's decoders raise whatever damage makes them meet
            said = " ".join(str(error).split())[:100] or type(error).__name__
            raise QBEError(
                f"{picture.name} cannot be read ({said}): give a whole PNG, JPEG, WebP or GIF file", field="prompt"
            ) from error


def _decoded(picture: Picture) -> Image.Image:
    try:
        image: Image.Image = Image.open(io.BytesIO(picture.data), formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise QBEError(f"{picture.name} is no PNG, JPEG, WebP or GIF: convert it first", field="prompt") from None
    except Image.DecompressionBombError:
        raise _too_large(picture, "far too many") from None
    with image:
        _check(picture, image.size)
        if image.format == "JPEG" and picture.data.count(_SCAN) > _MOST_SCANS:
            raise QBEError(
                f"{picture.name} has more than {_MOST_SCANS} scans: save it as a baseline JPEG", field="prompt"
            )
        image.load()
        _check(picture, image.size)  # a GIF's frame may be larger than the file says
        return ImageOps.exif_transpose(image).convert("RGB")


def _too_large(picture: Picture, pixels: str) -> QBEError:
    return QBEError(
        f"{picture.name} has {pixels} pixels, but at most {MOST_PIXELS} are taken: make it smaller", field="prompt"
    )


def _check(picture: Picture, size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MOST_PIXELS:
        raise _too_large(picture, f"{width} x {height}")
    if min(size) < LEAST_SIDE or max(size) > MOST_ASPECT * min(size):
        raise QBEError(
            f"{picture.name} has {width} x {height} pixels: each side must have {LEAST_SIDE} or more, and at most "
            f"{MOST_ASPECT} times as many as the other", field="prompt",
        )  # fmt: skip
