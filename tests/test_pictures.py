"""Pictures from anybody: what is decoded, what is refused in one line, and that both take bounded memory."""

from __future__ import annotations

import base64
import io
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from models_tiny import one_line
from picture_models import drawn, encoded, tiny
from qbe.errors import QBEError
from qbe.pictures import Picture
from qbe.pictures.decode import MOST_PIXELS, decode
from qbe.pictures.lru import ByteLRU
from qbe.pictures.picture import MOST_BYTES
from qbe.pictures.processor import PictureProcessor
from qbe.pictures.tower import tower_of

KINDS = ("PNG", "JPEG", "WEBP", "GIF")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *more: bytes, rows: bytes = b"") -> bytes:
    """A PNG that says it has this size."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def damaged(data: bytes, seed: int) -> bytes:
    """One of many kinds of damage: cut, bits, bytes, zeros, runs doubled or left out, parts swapped, lengths."""
    chance = random.Random(seed)
    raw, at = bytearray(data), chance.randrange(len(data))
    size = chance.choice((1, 2, 4, 16, 256))
    kind = seed % 8
    if kind == 0:
        return bytes(raw[:at])
    if kind == 1:
        for _ in range(size):
            raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    elif kind == 2:
        raw[at : at + size] = chance.randbytes(size)
    elif kind == 3:
        raw[at : at + size] = bytes(size)
    elif kind == 4:
        raw[at:at] = raw[at : at + size]
    elif kind == 5:
        del raw[at : at + size]
    elif kind == 6:
        other = chance.randrange(len(raw))
        raw[at], raw[other] = raw[other], raw[at]
    else:
        head = chance.randrange(min(64, len(raw) - 4))
        raw[head : head + 4] = chance.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0"))
    return bytes(raw)


def attempted(data: bytes) -> Image.Image | str:
    """Its pixels, or why there are none."""
    try:
        return decode(Picture(data))
    except QBEError as error:
        return str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_of_every_format(kind: str) -> None:
    image = drawn(1)
    found = decode(Picture(encoded(image, kind)))
    assert (found.mode, found.size) == ("RGB", image.size)
    if kind == "PNG":
        assert found.tobytes() == image.tobytes()


def test_first_frame_upright_without_alpha() -> None:
    frames, file = [drawn(s) for s in (1, 2, 3)], io.BytesIO()
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert decode(Picture(file.getvalue())).tobytes() == frames[0].tobytes()
    turned, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    drawn(1).save(turned, "JPEG", exif=exif)
    assert decode(Picture(turned.getvalue())).size == (40, 60)
    assert decode(Picture(encoded(drawn(1).convert("RGBA")))).mode == "RGB"


@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_kinds_of_damage(kind: str) -> None:
    """Each is decoded, within bounds, or refused in one line."""
    whole, refused = encoded(drawn(2), kind), 0
    for seed in range(100):
        data = damaged(whole, seed)
        found = attempted(data)
        refused += isinstance(found, str)
        if isinstance(found, str):
            assert "\n" not in found
        else:
            assert found.mode == "RGB"
            assert found.width * found.height <= MOST_PIXELS
    assert refused > 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_refused(kind: str) -> None:
    whole = encoded(drawn(3, (200, 100)), kind)
    for part in (0.1, 0.5, 0.9):
        with pytest.raises(QBEError) as refused:
            decode(Picture(whole[: int(part * len(whole))]))
        one_line(refused, "the picture")


SWELLS = zlib.compress(bytes(1 << 26))
BOMBS = {
    "a size that no memory has": (png(2**31 - 1, 2**31 - 1), "at most 25000000"),
    "a gigapixel of nothing": (png(50_000, 50_000, rows=bytes(1000)), "at most 25000000"),
    "just too many pixels": (png(5001, 5000), "at most 25000000"),
    "rows that do not end": (png(64, 64, rows=bytes(1 << 24)), "(64, 64)"),
    "a profile that swells": (png(64, 64, _chunk(b"iCCP", b"p\0\0" + SWELLS)), "cannot be read"),
    "text that swells": (png(64, 64, *[_chunk(b"zTXt", b"t\0\0" + SWELLS)] * 4), "cannot be read"),
    "a thread": (png(200_000, 4), "at most 50 times"),
    "a point": (png(1, 1), "4 or more"),
    "scans without end": (encoded(drawn(1), "JPEG")[:-2] + b"\xff\xda\0\x08" * 5000, "128 scans"),
    "a GIF of the largest size": (b"GIF89a" + b"\xff" * 4 + encoded(drawn(1), "GIF")[10:], "at most"),
    "a TIFF": (encoded(drawn(1), "TIFF"), "is no PNG, JPEG, WebP or GIF"),
    "a script": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no PNG"),
    "a drawing": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no PNG"),
}  # fmt: skip


_CHILD = """
import sys
from pathlib import Path
from qbe.errors import QBEError
from qbe.pictures import Picture
from qbe.pictures.decode import decode
for file in sys.argv[1:]:
    try:
        print(decode(Picture.open(file)).size)
    except QBEError as error:
        print(error)
print(int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) >> 10)
"""


def decoded_apart(tmp_path: Path, *files: bytes) -> tuple[list[str], int]:
    """What came of each file, in a process of its own, and the MiB that this had at most."""
    if not Path("/proc/self/status").is_file():
        pytest.skip("its memory is read from /proc")
    names = []
    for i, data in enumerate(files):
        (tmp_path / f"{i}").write_bytes(data)
        names.append(str(tmp_path / f"{i}"))
    done = subprocess.run([sys.executable, "-c", _CHILD, *names], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    *said, most = done.stdout.splitlines()
    return said, int(most)


def test_bombs_take_no_memory(tmp_path: Path) -> None:
    said, most = decoded_apart(tmp_path, *(data for data, _ in BOMBS.values()))
    assert len(said) == len(BOMBS)  # one line each
    for line, (name, (_, wanted)) in zip(said, BOMBS.items(), strict=True):
        assert wanted in line, name
    assert most < 250


def test_the_largest_picture_takes_what_is_foreseen(tmp_path: Path) -> None:
    said, most = decoded_apart(tmp_path, encoded(Image.new("RGBA", (5000, 5000)), "PNG"))
    assert said == ["(5000, 5000)"]
    assert most < 450


@pytest.mark.parametrize(("uri", "said"), [
    ("http://169.254.169.254/latest", "nothing is fetched"),
    ("file:///etc/passwd", "nothing is fetched"),
    ("data:image/png;base64", "without a comma"),
    ("data:image/png;base64,@@@@", "no base64"),
    ("data:image/png;base64,", "empty"),
    ("data:image/png;base64," + "A" * (MOST_BYTES * 4 // 3 + 8), "more than"),
])  # fmt: skip
def test_uris_that_are_refused(uri: str, said: str) -> None:
    with pytest.raises(QBEError) as refused:
        Picture.of_uri(uri)
    one_line(refused, said)


def test_where_pictures_come_from(tmp_path: Path) -> None:
    image, file = drawn(4), tmp_path / "a.png"
    data = encoded(image)
    file.write_bytes(data)
    uri = "DATA:image/png;base64," + base64.b64encode(data).decode()
    sources: list[Any] = [data, file, str(file), uri, Picture.of_uri(uri)]
    assert {Picture.of(s).digest for s in sources} == {Picture(data).digest}
    assert decode(Picture.of(image)).tobytes() == image.tobytes()
    for missing in (tmp_path / "none.png", tmp_path):
        with pytest.raises(QBEError) as refused:
            Picture.open(missing)
        one_line(refused, "cannot read the picture")
    large = tmp_path / "large.png"
    with large.open("wb") as sparse:
        sparse.truncate(1 << 34)
    with pytest.raises(QBEError, match="at most 16777216"):
        Picture.open(large)


@pytest.mark.parametrize("size", [(56, 56), (60, 40), (33, 70), (4, 100)])
def test_placeholders_are_those_of_transformers(size: tuple[int, int]) -> None:
    """SmolVLM's processor itself cannot be made without torchvision: what it writes for a picture can."""
    model, tokenizer, processor = tiny("smolvlm")
    ids = PictureProcessor(processor, model.config).prepare(Picture.of(drawn(1, size))).token_ids
    made = processor.image_processor([drawn(1, size)], return_row_col_info=True, return_tensors="pt")
    text = get_image_prompt_string(
        made["rows"][0][0], made["cols"][0][0], 4, "<fake_token_around_image>", "<image>", "<global-img>"
    )
    assert list(ids) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_processor_that_fails_is_one_line() -> None:
    model, _, processor = tiny("llava")

    class Failing:
        image_token, tokenizer = processor.image_token, processor.tokenizer

        def __call__(self, **_: Any) -> Any:
            raise ZeroDivisionError("a\nb")

    with pytest.raises(QBEError) as refused:
        PictureProcessor(Failing(), model.config).prepare(Picture.of(drawn(1)))
    one_line(refused, "picture (60 x 40 pixels) cannot be prepared", "a b")


def test_models_that_read_none_say_why(tmp_path: Path) -> None:
    model, tokenizer, processor = tiny("llava")
    model.config.name_or_path = str(tmp_path)
    assert "has no processor" in str(tower_of(model, "tiny", tokenizer))
    (tmp_path / "preprocessor_config.json").write_text("{")
    assert "cannot be loaded" in str(tower_of(model, "tiny", tokenizer))
    model.config.model_type = "gemma3"
    why = tower_of(model, "tiny", tokenizer)
    assert isinstance(why, str)
    assert "'gemma3'" in why
    with pytest.raises(QBEError, match="gemma3"):
        tower_of(model, "tiny", tokenizer, processor)
    assert "model of text" in str(tower_of(torch.nn.Linear(1, 1), "tiny", tokenizer))


def test_what_was_used_least_recently_goes_first() -> None:
    cache: ByteLRU[str, int] = ByteLRU(10)
    cache.put("a", 1, 4)
    cache.put("b", 2, 4)
    assert cache.get("a") == 1
    cache.put("c", 3, 4)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    cache.put("a", 4, 11)  # more than all may have
    assert (cache.get("a"), cache.nbytes) == (None, 4)
    cache.drop("c")
    assert (cache.nbytes, cache.hits, cache.misses) == (0, 3, 2)
