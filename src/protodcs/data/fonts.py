"""Draw text in any script with the fonts of this machine.

Pillow's built-in font has little more than ASCII. A text with other characters is drawn with an installed font that
has all of them. If there is none, each part is drawn with a font that has it.
"""

import os
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

FOLDERS = {
    "linux": ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts"),
    "darwin": ("/System/Library/Fonts", "/Library/Fonts", "~/Library/Fonts"),
    "win32": (os.path.join(os.environ.get("WINDIR", "C:/Windows"), "Fonts"),),  # noqa: PTH118
}.get(sys.platform, ("/usr/share/fonts",))
_ENDINGS = (".ttf", ".otf", ".ttc")
_MOST_FILES = 2000
# Fonts for the screen come first, and styles that are hard to read at a small size last.
_PREFERRED = ("sans", "arial", "helvetica", "segoe", "emoji")
_AVOIDED = ("serif", "mono", "bold", "italic", "oblique", "condensed", "light", "thin")
# A code point that no font has: its picture is that of a missing character.
_NO_CHARACTER = "\U0010ffff"
# Colour fonts with bitmaps have one size only.
_BITMAP_SIZE = 109
_ELLIPSIS = "..."

_Colour = tuple[int, int, int]


class Font:
    """A font at one size. Bitmap fonts are scaled to it."""

    def __init__(self, font: "ImageFont.FreeTypeFont | ImageFont.ImageFont", scale: float = 1.0):
        self._font = font
        self._scale = scale
        self._missing = self._picture(_NO_CHARACTER)
        self._found: dict[str, bool] = {}

    def _picture(self, text: str) -> tuple[tuple[int, int], tuple[object, ...]]:
        mask = self._font.getmask(text, mode="RGBA" if self._scale != 1.0 else "L")
        return mask.size, tuple(mask)

    def has(self, character: str) -> bool:
        """Return whether the font has a picture for this character. Spaces, joiners and accents need none."""
        if character.isspace():
            # The spaces of bitmap fonts are as wide as their pictures.
            return self._scale == 1.0
        if unicodedata.category(character) in ("Cf", "Mn", "Me", "Cc"):
            return True
        if character not in self._found:
            picture = self._picture(character)
            self._found[character] = picture != self._missing and any(picture[0])
        return self._found[character]

    def width(self, text: str) -> float:
        """Return the width of a text in pixels."""
        return float(self._font.getlength(text)) * self._scale

    def draw(self, page: Image.Image, position: tuple[float, float], text: str, colour: _Colour) -> None:
        """Draw a text on a page; `position` is the left end of its baseline."""
        if self._scale == 1.0:
            ImageDraw.Draw(page).text(position, text, fill=colour, font=self._font, anchor="ls")
            return
        *_, right, bottom = ImageDraw.Draw(page).textbbox((0, 0), text, font=self._font, embedded_color=True)
        drawn = Image.new("RGBA", (max(1, int(right)), max(1, int(bottom))))
        ImageDraw.Draw(drawn).text((0, 0), text, font=self._font, embedded_color=True)
        size = max(1, round(drawn.width * self._scale)), max(1, round(drawn.height * self._scale))
        small = drawn.resize(size, Image.Resampling.LANCZOS)
        page.paste(small, (round(position[0]), round(position[1]) - round(0.9 * small.height)), small)


class TextPainter:
    """Draws texts of one size, with the built-in font or those of this machine.

    Attributes:
        missing: characters that were drawn as boxes, because no font has them.
    """

    def __init__(self, size: int, missing: set[str] | None = None):
        self._size = size
        self._base = Font(ImageFont.load_default(size=size))
        self.missing: set[str] = set() if missing is None else missing

    def draw(self, page: Image.Image, position: tuple[int, int], text: str, colour: _Colour, width: float) -> None:
        """Draw a text, cut to this width in pixels; `position` is its upper left corner."""
        left: float = position[0]
        baseline = position[1] + self._size
        for font, part in self._parts(self._cut(text, width)):
            font.draw(page, (left, baseline), part, colour)
            left += font.width(part)

    def width(self, text: str) -> float:
        """Return the width of a text in pixels."""
        return sum(font.width(part) for font, part in self._parts(text))

    def _cut(self, text: str, width: float) -> str:
        if self.width(text) <= width:
            return text
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.width(text[:middle] + _ELLIPSIS) <= width else (low, middle - 1)
        return text[:low] + _ELLIPSIS

    def _parts(self, text: str) -> list[tuple[Font, str]]:
        """Return the text in parts, each with a font that has its characters."""
        if all(map(self._base.has, text)):
            return [(self._base, text)]
        needed = {character for character in text if not self._base.has(character)}
        for font in _fonts_with(frozenset(needed), self._size):
            if all(map(font.has, text)):
                return [(font, text)]
        parts: list[tuple[Font, str]] = []
        for character in text:
            font = parts[-1][0] if parts and parts[-1][0].has(character) else self._font_of(character)
            if parts and parts[-1][0] is font:
                parts[-1] = (font, parts[-1][1] + character)
            else:
                parts.append((font, character))
        return parts

    def _font_of(self, character: str) -> Font:
        if self._base.has(character):
            return self._base
        font = next(_fonts_with(frozenset(character), self._size), None)
        if font is None:
            self.missing.add(character)
            return self._base
        return font


def _fonts_with(characters: frozenset[str], size: int) -> Iterator[Font]:
    """Yield the installed fonts that have all of these characters."""
    for file in _files():
        font = _loaded(file, size)
        if font is not None and all(map(font.has, characters)):
            yield font


@cache
def _files() -> tuple[Path, ...]:
    """Return the font files of this machine, the most readable ones first."""
    folders = [Path(folder).expanduser() for folder in FOLDERS]
    found = [file for folder in folders for file in folder.rglob("*") if file.suffix.lower() in _ENDINGS]
    return tuple(sorted(found, key=_rank)[:_MOST_FILES])


def _rank(file: Path) -> tuple[int, int, str]:
    name = file.stem.lower()
    return sum(word in name for word in _AVOIDED), -any(word in name for word in _PREFERRED), name


@cache
def _loaded(file: Path, size: int) -> Font | None:
    try:
        return Font(ImageFont.truetype(file, size))
    except (OSError, ValueError):
        pass
    try:
        return Font(ImageFont.truetype(file, _BITMAP_SIZE), size / _BITMAP_SIZE)
    except (OSError, ValueError):
        return None
