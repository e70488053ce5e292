"""Figures and install commands in README and documentation, compared with what they come from."""

import re
import tomllib
from pathlib import Path

import pytest

from script_modules import load_file

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
# Pages with a row for each share of unknown images.
TABLES = ["README.md", "docs/start/fit.md"]


def text_of(page):
    return " ".join((ROOT / page).read_text().split())


def rows_of(file):
    """Return the cells of each row of the tables in a file."""
    lines = (line for line in (RESULTS / file).read_text().splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def rejected_over_streams(share):
    """Return the range of the known images rejected over the ten streams, in percent."""
    values = [float(row[6]) for row in rows_of("shares/cells.md") if row[0] == "StreamDCS" and row[2] == f"{share}%"]
    assert len(values) == 10
    return f"{min(values)} to {max(values)} %"


def rejected_by_the_mini_encoder():
    """Return the range of the known images rejected on CIFAR-10-C, in whole percent."""
    rows = rows_of("shares.md")
    first = next(place for place, row in enumerate(rows) if row[0] == "CIFAR-10-C + SVHN-C (mini)" and len(row) == 7)
    values = [float(row[5]) for row in rows[first : first + 4]]
    assert [row[0] for row in rows[first + 1 : first + 5]] == ["", "", "", "Tiny-ImageNet-C + DTD-C (mini)"]
    return f"{min(values):.0f} to {max(values):.0f} %"


@pytest.mark.parametrize("page", TABLES)
@pytest.mark.parametrize("share", [2, 10, 50])
def test_a_table_of_streams_has_the_figures_of_the_results(page, share):
    (by_share,) = [row for row in rows_of("shares/by-share.md") if row[:2] == ["StreamDCS", f"{share}%"]]
    expected = f"| {share} % | {by_share[2]} | {rejected_over_streams(share)} | {by_share[5].replace('%', ' %')} |"
    assert expected in text_of(page)


def test_the_page_about_the_target_has_the_range_of_the_results():
    found = re.findall(r"a target of 5 % gave (.*?) over ten streams", text_of("docs/how-to/false-reject-target.md"))
    assert found == [rejected_over_streams(10)]


@pytest.mark.parametrize("page", [*TABLES, "docs/how-to/false-reject-target.md"])
def test_pages_agree_on_what_the_mini_encoder_rejects(page):
    found = re.findall(r"(\S+ to \S+ %) with the mini encoder on CIFAR-10-C", text_of(page))
    assert found == [rejected_by_the_mini_encoder()]


@pytest.mark.parametrize("page", TABLES)
def test_pages_agree_on_what_is_found_among_most_unknown_images(page):
    (row,) = [row for row in rows_of("shares/by-share.md") if row[:2] == ["StreamDCS", "90%"]]
    assert f"With 90 % unknown images, {row[5].replace('%', ' %')} of them are found." in text_of(page)


@pytest.mark.parametrize("page", ["README.md", "docs/start/install.md"])
def test_the_first_install_command_works_in_a_clone(page):
    first = text_of(page).partition("pip install ")[2]
    (extra,) = re.match(r"'\.\[(.*?)\]'", first).groups()
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_page_about_scale_has_the_tables_of_the_measurements():
    script = load_file(ROOT / "scripts" / "cells.py")
    found = script.measured()
    page = (ROOT / "docs" / "explanation" / "scale.md").read_text()
    assert script.costs(found) in page
    assert script.cells(found) in page
