"""The documentation: its examples run, its pictures are shown, and its words are those of other projects."""

import ast
import csv
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
import yaml

from ports import free_port
from protodcs.bench import grid
from protodcs.cli import app
from protodcs.cli.cluster.settings import ClusterSettings
from protodcs.demo import DemoStream
from protodcs.serve.cluster.cells import CellsConfig
from protodcs.serve.settings import ServeConfig

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
TITLE = re.compile(r'title="([^"]*)"')
PICTURE = re.compile(r"!\[(.*?)\]\((.*?)\)")
SNIPPET = re.compile(r'^--8<-- "(.*)"$', re.MULTILINE)
# Pages whose shell commands run, in order.
RUN_IN_SHELL = ("start/quickstart.md", "tutorials/write-a-method.md", "tutorials/first-service.md")


class Block(NamedTuple):
    """A code block: its language, whether tests run it, its title and its text."""

    language: str
    tested: bool
    title: str
    text: str


def all_blocks(page):
    for indent, head, text in FENCE.findall(page.read_text()):
        language = re.search(r"[a-z]+", head)
        title = TITLE.search(head)
        shown = SNIPPET.sub(lambda match: (ROOT / match[1]).read_text(), textwrap.dedent(text) if indent else text)
        yield Block(language[0] if language else "", ".notest" not in head, title[1] if title else "", shown)


def blocks(page, *languages):
    return [block.text for block in all_blocks(page) if block.language in languages and block.tested]


def all_pages():
    """Return the pages that people write. Hand-made pages of results are among them."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def pages_of_results():
    """Return the pages of results, without those of single values."""
    return [page for page in sorted((ROOT / "docs" / "results").glob("*.md")) if page.stem not in ("events", "ui")]


def pages_with_examples():
    pages = [page for page in all_pages() if blocks(page, "python")]
    return [page for page in pages if page.name != "first-service.md"]


def commands(page):
    """Yield the `protodcs` commands of a page, in fenced and indented blocks, each as a list of words."""
    prose = FENCE.sub("", page.read_text())
    indented = re.findall(r"^ {4,}.*$", prose, re.MULTILINE)
    shown = [block.text for block in all_blocks(page) if block.language in ("sh", "bash")]
    for text in ["\n".join(indented), *shown]:
        for line in text.replace("\\\n", " ").splitlines():
            for command in re.split(r"&&|\|", line):
                words = (
                    shlex.split(command, comments=True) if "protodcs" in command and "'protodcs" not in command else []
                )
                while words and "=" in words[0]:
                    words = words[1:]
                if words and words[0] == "protodcs":
                    yield words[1:]


@pytest.fixture
def shell(tmp_path):
    """Return a function that runs lines of the shell in an empty folder, and returns what they print."""
    program = tmp_path / "bin" / "protodcs"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m protodcs "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(lines, **environment):
        command = ["bash", "-euo", "pipefail", "-c", lines]
        settings = {**os.environ, "PATH": path, "COLUMNS": "100", **environment}
        done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def in_shell(shell):
    """Return a function that runs the shell commands of a page and returns what they print."""

    def run(page, **environment):
        text = "".join(blocks(page, "sh"))
        lines = [line for line in text.splitlines() if not line.startswith(("pip install", "protodcs serve"))]
        return shell("\n".join(lines), **environment)

    return run


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
    scope = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), scope)
    printed = capsys.readouterr().out
    assert printed
    if page.stem in ("compare", "how-a-decision-is-made", "index", "new-class", "README", "write-a-method"):
        # The first output of this page is that of a command.
        for shown in blocks(page, "text")[page.stem == "compare" :]:
            assert shown in printed


@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda notebook: notebook.stem)
def test_a_notebook_prints_what_it_shows_and_ends_with_a_picture(notebook, shell, tmp_path, monkeypatch, capsys):
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    plt.switch_backend("agg")
    scope, value = {"__name__": "__main__"}, None
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    with plt.rc_context():
        for cell in cells:
            text = "".join(cell["source"])
            if text.startswith("%%sh\n"):
                shell(text.partition("\n")[2])
                continue
            tree = ast.parse(text)
            # A notebook shows the value of the last line of a cell.
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else ast.parse("None").body[0]
            exec(compile(tree, notebook.name, "exec"), scope)
            value = eval(compile(ast.Expression(last.value), notebook.name, "eval"), scope)
            shown = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
            assert capsys.readouterr().out == shown
        value.savefig(tmp_path / "picture.png")
    stored = [output for output in cells[-1]["outputs"] if "image/png" in output.get("data", {})]
    assert len(stored) == 1


def test_blocks_that_do_not_run_say_why_and_are_valid_python():
    skipped = [block for page in all_pages() for block in all_blocks(page) if not block.tested]
    assert [block.text for block in skipped if not block.title.startswith("Not tested: ")] == []
    for block in skipped:
        if block.language == "python":
            ast.parse(block.text)


def test_every_block_has_a_language_that_is_checked():
    checked = {"python", "sh", "bash", "text", "yaml", "json"}
    found = {block.language for page in all_pages() for block in all_blocks(page)}
    assert found <= checked


@pytest.mark.parametrize("page", [page for page in all_pages() if list(commands(page))], ids=lambda page: page.stem)
def test_the_commands_of_a_page_exist_with_their_options(page):
    for words in commands(page):
        command, name = typer.main.get_command(app), "protodcs"
        context = command.make_context(name, ["--help"], resilient_parsing=True)
        while words and hasattr(command, "get_command"):
            found = command.get_command(context, words[0])
            if found is None:
                break
            command, name, words = found, words[0], words[1:]
        # Raises an error for an unknown command or option, and for a missing argument.
        command.make_context(name, [word for word in words if word != "..."], resilient_parsing=name == "protodcs")


def test_the_grids_and_settings_of_the_documentation_are_valid():
    grids = services = 0
    for page in all_pages():
        for text in blocks(page, "yaml"):
            content = yaml.safe_load(text)
            if "methods" in content:
                grid.Grid.model_validate(
                    content | {"methods": [m for m in content["methods"] if ":" not in m["method"]]}
                )
                grids += 1
            elif "cells" in content:
                CellsConfig(**content)
            else:
                cluster = content.pop("cluster", {})
                assert set(cluster) <= set(ClusterSettings.model_fields)
                assert set(content) <= set(ServeConfig.model_fields)
                services += 1
        for text in blocks(page, "json"):
            json.loads(text if text.startswith("{") else f"{{{text}}}")
    assert grids
    assert services


def test_the_comparison_of_a_folder_runs(in_shell, tmp_path):
    page = ROOT / "docs" / "how-to" / "compare.md"
    printed = in_shell(page).splitlines()
    shown, _ = blocks(page, "text")

    def without_time(line):
        # The last column is the time of a method, if the first is its name.
        return line.rsplit("│", 2)[0] if line.count("│") == 9 else line.rstrip()

    assert [line for line in map(without_time, shown.splitlines()) if line not in map(without_time, printed)] == []
    assert (tmp_path / "compare.png").is_file()


def test_the_made_up_season_of_camera_traps_runs(in_shell, tmp_path):
    page = ROOT / "docs" / "how-to" / "camera-traps.md"
    printed = in_shell(page)
    written, rows = blocks(page, "text")
    assert written in printed
    assert set(rows.splitlines()) <= set((tmp_path / "species.events.csv").read_text().splitlines())


def test_new_classes_are_found_named_and_recognised_in_a_later_folder(in_shell, tmp_path):
    in_shell(ROOT / "docs" / "tutorials" / "new-class.md")
    later = DemoStream(400, unknown=0.3, seed=1)
    with (tmp_path / "summer.csv").open(newline="") as lines:
        named = [row for row in csv.DictReader(lines) if row["label"] in ("clock", "spider")]
    assert {row["known"] for row in named} == {"False"}
    right = [row["label"] == later[int(Path(row["file"]).stem)].kind for row in named]
    assert len(right) > 5
    assert sum(right) > 0.5 * len(right)


@pytest.mark.parametrize("page", RUN_IN_SHELL[:2])
def test_the_shell_commands_of_a_page_run(page, in_shell, tmp_path):
    for block in all_blocks(ROOT / "docs" / page):
        if block.title.endswith(".py"):
            (tmp_path / block.title).write_text(block.text)
        if block.language == "yaml":
            (tmp_path / "mine.yaml").write_text(block.text)
    printed = in_shell(ROOT / "docs" / page)
    if page.endswith("quickstart.md"):
        first, _, rows = blocks(ROOT / "docs" / page, "text")
        assert first in printed
        assert set(rows.splitlines()) <= set((tmp_path / "decisions.csv").read_text().splitlines())
        figures = re.findall(r"\d+\.\d \(.*?\)", (ROOT / "docs" / page).read_text())
        assert len(figures) == 8
        assert [figure for figure in figures if figure not in printed] == []
    else:
        assert "| streamdcs | **87.72" in printed


def test_the_first_service_runs(tmp_path, in_shell, capsys):
    import httpx

    page, url = ROOT / "docs" / RUN_IN_SHELL[2], f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "protodcs", "serve", "--encoder", "demo", "--port", url.rpartition(":")[2]]
    with subprocess.Popen(command, cwd=tmp_path) as service:
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=20), timeout=120) as client:
                assert client.get(f"{url}/v1/ready").json() == {"ready": True}
            printed = in_shell(page, PROTODCS_URL=url)
            for block in blocks(page, "python"):
                exec(compile(block.replace("http://127.0.0.1:8000", url), str(page), "exec"), {})
        finally:
            service.terminate()
    commands_print, example_prints = blocks(page, "text")
    assert commands_print in printed
    assert capsys.readouterr().out == example_prints


def test_every_picture_is_shown_on_a_page():
    text = "".join(page.read_text() for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
    assert [picture.name for picture in (ROOT / "docs").rglob("*.png") if picture.name not in text] == []


@pytest.mark.parametrize("page", pages_of_results(), ids=lambda page: page.stem)
def test_a_page_of_results_shows_a_picture_that_exists(page):
    pictures = PICTURE.findall(page.read_text())
    assert pictures
    assert [file for alternative, file in pictures if not alternative or not (page.parent / file).is_file()] == []


def test_the_charts_of_results_are_drawn_from_their_tables(tmp_path):
    script = ROOT / "scripts" / "draw_results.py"
    subprocess.run([sys.executable, "-W", "error", script, "--out", tmp_path], check=True)
    drawn = list(tmp_path.glob("*.png"))
    shown = "".join(page.read_text() for page in pages_of_results())
    assert drawn
    assert [file.name for file in drawn if f"]({file.name})" not in shown or file.stat().st_size > 80_000] == []


def test_the_documentation_has_no_private_words(wording):
    found = [str(one) for page in wording.documents() for one in wording.in_document(page)]
    assert not found, "\n".join(found)


def test_docstrings_comments_and_names_have_no_private_words(wording):
    found = []
    for file in sorted((ROOT / "src").rglob("*.py")):
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
