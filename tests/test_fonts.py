"""Contact sheets with labels in any script, drawn with the fonts of the machine."""

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image
from typer.testing import CliRunner

from protodcs.cli import app
from protodcs.data import fonts
from protodcs.data.contact_sheet import Picture, contact_sheet

CAT = "猫"


def write_font(file, characters):
    """Write a font whose characters are solid squares. Missing ones are empty."""
    pen = TTGlyphPen(None)
    for number, corner in enumerate([(0, 0), (0, 900), (900, 900), (900, 0)]):
        pen.lineTo(corner) if number else pen.moveTo(corner)
    pen.closePath()
    names = [".notdef", *(f"uni{ord(one):04X}" for one in characters)]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(one): f"uni{ord(one):04X}" for one in characters})
    builder.setupGlyf({name: TTGlyphPen(None).glyph() if name == ".notdef" else pen.glyph() for name in names})
    builder.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": "Squares", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(file)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The folder of the only fonts of this machine."""
    monkeypatch.setattr(fonts, "FOLDERS", (str(tmp_path / "fonts"),))
    fonts._files.cache_clear()
    (tmp_path / "fonts").mkdir()
    yield tmp_path / "fonts"
    fonts._files.cache_clear()


def drawn(text):
    """Return the dark pixels of a text, and the characters that are missing."""
    missing = set()
    page = Image.new("RGB", (200, 30), (255, 255, 255))
    fonts.TextPainter(16, missing).draw(page, (0, 0), text, (0, 0, 0), 200)
    return np.asarray(page.convert("L")) < 128, missing


def test_a_character_of_an_installed_font_is_drawn_with_it(installed):
    write_font(installed / "squares.ttf", CAT)
    dark, missing = drawn(CAT)
    assert missing == set()
    assert dark.sum() == pytest.approx(14.4**2, rel=0.15)


def test_a_character_that_no_font_has_is_reported(installed):
    assert drawn(f"cat {CAT}")[1] == {CAT}
    (installed / "broken.ttf").write_bytes(b"no font")
    fonts._files.cache_clear()
    assert drawn(f"cat {CAT}")[1] == {CAT}


def test_a_text_is_drawn_in_parts_if_no_font_has_all_of_it(installed):
    write_font(installed / "squares.ttf", CAT)
    dark, missing = drawn(f"ab {CAT} cd")
    assert missing == set()
    columns = dark.any(axis=0)
    assert columns[:20].any()
    assert columns.nonzero()[0][-1] > fonts.TextPainter(16).width("ab cd") + 12


def test_ascii_needs_no_font_of_the_machine(installed):
    dark, missing = drawn("cat.png")
    assert missing == set()
    assert dark.any()


def test_long_texts_are_cut_to_their_width(installed):
    write_font(installed / "squares.ttf", CAT)
    for text in ("a" * 300, CAT * 300):
        page = Image.new("RGB", (400, 30), (255, 255, 255))
        fonts.TextPainter(16).draw(page, (0, 0), text, (0, 0, 0), 100)
        columns = (np.asarray(page.convert("L")) < 128).any(axis=0).nonzero()[0]
        assert 70 < columns[-1] < 100


def test_a_sheet_reports_what_its_labels_miss(installed):
    missing = set()
    contact_sheet([Picture(np.zeros((8, 8, 3), np.uint8), CAT)], "title", missing=missing)
    assert missing == {CAT}


def test_classify_says_which_characters_are_boxes(installed, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for number in range(3):
        Image.new("RGB", (64, 64), (90 * number, 0, 0)).save(tmp_path / "images" / f"{CAT}{number}.png")
    command = ["classify", "images", "--classes", "demo", "--model", "demo", "--sheet", "sheet.png"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert f"no font on this machine has {CAT}: they are boxes on the sheet" in result.stderr


@pytest.mark.parametrize("text", ["قطة", "größe", "кошка"])
def test_fonts_that_most_machines_have_cover_other_alphabets(text):
    if not any("DejaVuSans" in file.name for file in fonts._files()):
        pytest.skip("DejaVu Sans is not installed")
    assert drawn(text)[1] == set()
