"""Contact sheets: many small pictures on one page, each with two lines of text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from ..arrays import Pixels
from ..errors import InputError

_PAPER, _INK, _PALE = (255, 255, 255), (20, 20, 20), (110, 110, 110)
_GAP, _LINE = 10, 15


@dataclass(frozen=True, slots=True)
class Picture:
    """An image on a sheet, with up to two lines of text under it."""

    image: Pixels
    title: str
    remark: str = ""


def contact_sheet(pictures: Sequence[Picture], title: str, columns: int = 8, side: int = 128) -> Image.Image:
    """Return a page of pictures in rows, each fitted into a square of `side` pixels."""
    font = ImageFont.load_default(size=11)
    columns = max(1, min(columns, len(pictures)))
    rows = -(-len(pictures) // columns)
    cell, height = side + _GAP, side + 2 * _LINE + _GAP
    page = Image.new("RGB", (max(columns * cell + _GAP, 420), rows * height + 4 * _GAP), _PAPER)
    pen = ImageDraw.Draw(page)
    pen.text((_GAP, _GAP), title, fill=_INK, font=ImageFont.load_default(size=14))
    for number, picture in enumerate(pictures):
        left, top = _GAP + number % columns * cell, 4 * _GAP + number // columns * height
        small = _fitted(picture.image, side)
        page.paste(small, (left + (side - small.width) // 2, top + (side - small.height) // 2))
        pen.text((left, top + side + 1), _cut(picture.title, side, font), fill=_INK, font=font)
        pen.text((left, top + side + _LINE), _cut(picture.remark, side, font), fill=_PALE, font=font)
    return page


def save_sheets(pages: Sequence[Image.Image], file: Path) -> None:
    """Write sheets below each other, in the format that the file's ending names.

    Raises:
        InputError: the ending is that of no supported format.
    """
    formats = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
    if file.suffix.lower() not in formats:
        raise InputError(f"A contact sheet must be a .png, .jpg or .webp file; given: {file.name!r}")
    whole = Image.new("RGB", (max(page.width for page in pages), sum(page.height for page in pages)), _PAPER)
    top = 0
    for page in pages:
        whole.paste(page, (0, top))
        top += page.height
    file.parent.mkdir(parents=True, exist_ok=True)
    whole.save(file, format=formats[file.suffix.lower()], optimize=True)


def _fitted(image: Pixels, side: int) -> Image.Image:
    height, width = image.shape[:2]
    factor = side / max(height, width)
    # Small images are shown by their own pixels, large ones are averaged.
    how = Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS
    return Image.fromarray(image).resize((max(1, round(width * factor)), max(1, round(height * factor))), how)


def _cut(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
