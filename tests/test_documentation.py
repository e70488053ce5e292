"""The documentation: its examples run, its pictures are shown, and its words are those of other projects."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
# Packages whose wording is not finished. Shorten this list; never add to it.
UNFINISHED = ("src/protodcs/serve",)


def blocks(page, kind):
    return [text for head, text in FENCE.findall(page.read_text()) if head == kind]


def pages_with_examples():
    return [page for page in sorted((ROOT / "docs").rglob("*.md")) if blocks(page, "python")]


@pytest.fixture(scope="module")
def wording():
    spec = importlib.util.spec_from_file_location("wording", ROOT / "scripts" / "wording.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["wording"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", pages_with_examples(), ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), scope)
    printed = capsys.readouterr().out
    assert printed
    for shown in blocks(page, "text") if page.stem == "new-class" else ():
        assert shown in printed


@pytest.mark.long
def test_the_first_service_runs(tmp_path, monkeypatch):
    import httpx

    page = ROOT / "docs" / "tutorials" / "first-service.md"
    (block,) = blocks(page, " { .python .service }")
    command = [sys.executable, "-m", "protodcs", "serve", "--encoder", "demo", "--port", "8765"]
    with subprocess.Popen(command, cwd=tmp_path) as service:
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=20), timeout=120) as client:
                assert client.get("http://127.0.0.1:8765/v1/ready").json() == {"ready": True}
            exec(compile(block.replace(":8000", ":8765"), str(page), "exec"), {})
        finally:
            service.terminate()


def test_every_picture_is_shown_on_a_page():
    text = "".join(page.read_text() for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
    assert [picture.name for picture in (ROOT / "docs").rglob("*.png") if picture.name not in text] == []


def test_the_documentation_has_no_private_words(wording):
    found = [str(one) for page in wording.documents() for one in wording.in_document(page)]
    assert not found, "\n".join(found)


def test_docstrings_comments_and_names_have_no_private_words(wording):
    found = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        if not file.relative_to(ROOT).as_posix().startswith(UNFINISHED):
            found += [str(one) for one in wording.in_code(file)]
    assert not found, "\n".join(found)


def test_most_sentences_of_the_documentation_are_short(wording):
    figures = wording.figures(page.read_text() for page in wording.documents())
    assert figures.sentences > 500
    assert figures.long < 0.12


def test_wording_counts_what_a_reader_reads(wording):
    text = "# A heading\n\nOne short sentence. A second one; it has a semicolon.\n\n| a | table |\n\n```\ncode\n```\n"
    assert wording.sentences(text) == ["One short sentence.", "A second one; it has a semicolon."]
    assert wording.figures(["The strangers wait at the door today."]).private > 0
