"""Contact sheets: many small pictures on one page, each with two lines of text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..arrays import Pixels
from ..errors import InputError
from .fonts import TextPainter

_PAPER, _INK, _PALE = (255, 255, 255), (20, 20, 20), (110, 110, 110)
_GAP, _LINE = 10, 15


@dataclass(frozen=True, slots=True)
class Picture:
    """An image on a sheet, with up to two lines of text under it."""

    image: Pixels
    title: str
    remark: str = ""


def contact_sheet(
    pictures: Sequence[Picture], title: str, columns: int = 8, side: int = 128, missing: set[str] | None = None
) -> Image.Image:
    """Return a page of pictures in rows, each fitted into a square of `side` pixels.

    Args:
        pictures: the pictures with their texts.
        title: the text at the top.
        columns: number of pictures in a row.
        side: size of the squares in pixels.
        missing: gets the characters that no font of this machine has. They are drawn as boxes.
    """
    heading, small = TextPainter(14, missing), TextPainter(11, missing)
    columns = max(1, min(columns, len(pictures)))
    rows = -(-len(pictures) // columns)
    cell, height = side + _GAP, side + 2 * _LINE + _GAP
    page = Image.new("RGB", (max(columns * cell + _GAP, 420), rows * height + 4 * _GAP), _PAPER)
    heading.draw(page, (_GAP, _GAP), title, _INK, page.width)
    for number, picture in enumerate(pictures):
        left, top = _GAP + number % columns * cell, 4 * _GAP + number // columns * height
        fitted = _fitted(picture.image, side)
        page.paste(fitted, (left + (side - fitted.width) // 2, top + (side - fitted.height) // 2))
        small.draw(page, (left, top + side + 1), picture.title, _INK, side)
        small.draw(page, (left, top + side + _LINE), picture.remark, _PALE, side)
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
