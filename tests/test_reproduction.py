"""The page that reproduces the paper: every command plans its run, and every table of the paper has one."""

import json
import re
import shlex
from collections import defaultdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protodcs.bench import cost, paper_tables, streams
from protodcs.cli import app
from protodcs.errors import EncoderError

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "research" / "reproduction.md"
# Those that make tables of the paper. The other one needs the feature pack.
COMMANDS = [line for line in PAGE.read_text().splitlines() if re.match("protodcs bench run .* --features ", line)]


# Images of a stream by the published sizes: 15 corruptions of all images, or one clean dataset.
IMAGES = {
    "CIFAR-10-C + SVHN-C": 540_480,
    "CIFAR-100-C + SVHN-C": 540_480,
    "Tiny-ImageNet-C + ImageNet-O-C": 180_000,
    "ImageNet": 50_000,
    "ImageNet-V2": 10_000,
    "ImageNet-Sketch": 50_889,
    "ImageNet-A": 7_500,
    "ImageNet-R": 30_000,
}


def refuse(name):
    raise EncoderError(f"{name!r} cannot be loaded")


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """What each command plans where no dataset and no weights are. Costs are not measured."""
    streams.source.cache_clear()
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTODCS_DATA", str(tmp_path_factory.mktemp("empty")))
        patch.setattr(streams, "encoder", refuse)
        patch.setattr(cost, "estimates", lambda cells: defaultdict(float))
        patch.chdir(ROOT)
        for command in COMMANDS:
            result = CliRunner().invoke(app, [*shlex.split(command)[1:], "--dry-run", "--json"])
            assert result.exit_code == 0, result.output
            found[command] = json.loads(result.output)
    return found


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.rpartition("/")[2])
def test_a_command_plans_its_run_without_data_and_weights(plans, command):
    plan = plans[command]
    assert plan["todo"] == plan["cells"] == len(plan["plan"])
    assert {entry["samples"] == IMAGES[entry["stream"]] for entry in plan["plan"]} == {True}
    assert any("cannot be loaded" in words for words in plan["missing"])


def test_every_table_of_the_paper_has_a_command():
    assert {table.grid for table in paper_tables.tables()} <= {command.split()[3] for command in COMMANDS}
    for table in paper_tables.tables():
        assert re.search(rf"^# Tables? ([IVX]+ and )?{table.number}\b", PAGE.read_text(), re.MULTILINE), table.number


def test_the_page_names_every_dataset_that_the_commands_need(plans):
    missing = [words for plan in plans.values() for words in plan["missing"]]
    named = {found[1] for words in missing if (found := re.match("The dataset ([a-z0-9-]+) is missing", words))}
    assert len(named) == 10
    assert [name for name in sorted(named) if f"`{name}`" not in PAGE.read_text()] == []
