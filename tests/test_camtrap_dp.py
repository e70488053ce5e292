"""Camtrap DP: the package that `protodcs classify --camtrap-dp` writes is valid, and says what was decided."""

import csv
import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protodcs.cli import app
from protodcs.demo.season import CAMERAS, SPECIES, make_season
from protodcs.integrations.camtrap_dp import COLUMNS, FILES

# A folder with the schemas of https://github.com/tdwg/camtrap-dp, if there is one.
SCHEMAS = os.environ.get("PROTODCS_CAMTRAP_DP")
MOMENT = {"type": "datetime", "format": "%Y-%m-%dT%H:%M:%S%z"}
# No path that begins with a dot, slash or tilde, or leads to a folder above.
INSIDE = r"^(?=^[^./~])(^((?!\.{2}).)*$).*$"
FRACTION = {"type": "number", "constraints": {"minimum": 0, "maximum": 1}}
# What Camtrap DP 1.0 asks of the columns that we fill; all other columns are empty.
ASKED = {
    "deployments": {
        "deploymentID": {"type": "string", "constraints": {"required": True, "unique": True}},
        "latitude": {"type": "number", "constraints": {"required": True, "minimum": -90, "maximum": 90}},
        "longitude": {"type": "number", "constraints": {"required": True, "minimum": -180, "maximum": 180}},
        "deploymentStart": MOMENT | {"constraints": {"required": True}},
        "deploymentEnd": MOMENT | {"constraints": {"required": True}},
        "timestampIssues": {"type": "boolean"},
    },
    "media": {
        "mediaID": {"type": "string", "constraints": {"required": True, "unique": True}},
        "deploymentID": {"type": "string", "constraints": {"required": True}},
        "timestamp": MOMENT | {"constraints": {"required": True}},
        "filePath": {"type": "string", "constraints": {"required": True, "pattern": INSIDE}},
        "filePublic": {"type": "boolean", "constraints": {"required": True}},
        "fileName": {"type": "string"},
        "fileMediatype": {"type": "string", "constraints": {"required": True, "pattern": "^(image|video|audio)/.*$"}},
    },
    "observations": {
        "observationID": {"type": "string", "constraints": {"required": True, "unique": True}},
        "deploymentID": {"type": "string", "constraints": {"required": True}},
        "mediaID": {"type": "string"},
        "eventID": {"type": "string"},
        "eventStart": MOMENT | {"constraints": {"required": True}},
        "eventEnd": MOMENT | {"constraints": {"required": True}},
        "observationLevel": {"type": "string", "constraints": {"required": True, "enum": ["media", "event"]}},
        "observationType": {"type": "string", "constraints": {"required": True, "enum": [
            "animal", "human", "vehicle", "blank", "unknown", "unclassified"]}},
        "scientificName": {"type": "string"},
        "count": {"type": "integer", "constraints": {"minimum": 1}},
        "bboxX": FRACTION, "bboxY": FRACTION,
        "bboxWidth": {"type": "number", "constraints": {"minimum": 1e-15, "maximum": 1}},
        "bboxHeight": {"type": "number", "constraints": {"minimum": 1e-15, "maximum": 1}},
        "classificationMethod": {"type": "string", "constraints": {"enum": ["human", "machine"]}},
        "classifiedBy": {"type": "string"},
        "classificationTimestamp": MOMENT,
        "classificationProbability": FRACTION,
        "observationTags": {"type": "string"},
    },
}  # fmt: skip
KEYS = {"deployments": "deploymentID", "media": "mediaID", "observations": "observationID"}
FOREIGN = {"deployments": [], "media": ["deployments"], "observations": ["deployments", "media"]}


@pytest.fixture(scope="module")
def season(tmp_path_factory):
    folder = tmp_path_factory.mktemp("season") / "season"
    make_season(folder, events=40, seed=4)
    return folder


def write_package(folder, *options, results=None, deployments=None):
    out = folder / "package"
    given = {
        "--megadetector": results or folder / "results.json",
        "--classes": folder / "species.txt",
        "--deployments": deployments or folder / "deployments.csv",
        "--out": folder / "species.json",
        "--camtrap-dp": out,
        "--model": "demo",
    }
    words = [str(word) for pair in given.items() for word in pair]
    done = CliRunner().invoke(app, ["classify", *words, *map(str, options)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done, out


@pytest.fixture
def copied(season, tmp_path):
    return Path(shutil.copytree(season, tmp_path / "season"))


@pytest.fixture(scope="module")
def written(season, tmp_path_factory):
    folder = Path(shutil.copytree(season, tmp_path_factory.mktemp("copied") / "season"))
    done, out = write_package(folder, "--time-zone", "Europe/Brussels")
    assert done.exit_code == 0, done.stderr
    assert {file.name for file in out.iterdir()} == set(FILES)
    return out


def table(package, name):
    with (package / f"{name}.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def schema(name):
    fields = [{"name": column, **ASKED[name].get(column, {"type": "any"})} for column in COLUMNS[name]]
    keys = [{"fields": KEYS[one], "reference": {"resource": one, "fields": KEYS[one]}} for one in FOREIGN[name]]
    return {"fields": fields, "primaryKey": [KEYS[name]], "foreignKeys": keys}


def errors_of(package, schemas):
    """Return what frictionless finds wrong with the tables, by a schema for each."""
    import frictionless

    description = json.loads((package / "datapackage.json").read_text())
    for resource in description["resources"]:
        resource["schema"] = schemas[resource["name"]]
    del description["profile"]
    report = frictionless.Package(description, basepath=str(package)).validate()
    return [error.message for task in report.tasks for error in task.errors] + [one.message for one in report.errors]


def test_the_tables_are_valid(written):
    assert errors_of(written, {name: schema(name) for name in COLUMNS}) == []
    empty = {name: set(COLUMNS[name]) - set(ASKED[name]) for name in COLUMNS}
    assert [row for name in COLUMNS for row in table(written, name) if any(row[column] for column in empty[name])] == []


@pytest.mark.parametrize(("name", "column", "value"), [
    ("deployments", "latitude", "91"), ("media", "filePath", "../a.jpg"), ("observations", "deploymentID", "Z99"),
    ("observations", "observationType", "beast"),
])  # fmt: skip
def test_a_wrong_table_is_found(written, tmp_path, name, column, value):
    shutil.copytree(written, tmp_path / "package")
    rows = table(written, name)
    rows[0][column] = value
    with (tmp_path / "package" / f"{name}.csv").open("w", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS[name], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    assert errors_of(tmp_path / "package", {name: schema(name) for name in COLUMNS})


@pytest.mark.long
@pytest.mark.skipif(SCHEMAS is None, reason="PROTODCS_CAMTRAP_DP names no folder of schemas")
def test_the_package_is_valid_by_the_published_schemas(written):
    import jsonschema

    published = {name: json.loads(Path(SCHEMAS, f"{name}-table-schema.json").read_text()) for name in COLUMNS}
    assert {name: tuple(one["name"] for one in published[name]["fields"]) for name in COLUMNS} == COLUMNS
    assert errors_of(written, published) == []
    description = json.loads((written / "datapackage.json").read_text())
    profile = json.loads(Path(SCHEMAS, "camtrap-dp-profile.json").read_text())
    # The general profile of data packages and GeoJSON are elsewhere.
    own = {"$defs": profile["$defs"], **profile["allOf"][1]}
    own["properties"]["spatial"] = {"type": "object"}
    jsonschema.validate(description, own)


def test_the_description_has_what_the_profile_asks_for(written):
    description = json.loads((written / "datapackage.json").read_text())
    asked = {"resources", "profile", "created", "contributors", "project", "spatial", "temporal", "taxonomic"}
    assert asked <= set(description)
    assert [resource["path"] for resource in description["resources"]] == [f"{name}.csv" for name in COLUMNS]
    assert {row["scientificName"] for row in description["taxonomic"]} <= set(SPECIES)
    assert description["spatial"]["coordinates"][0] == [5.0, 50.0]
    assert description["temporal"]["start"].startswith("2025-05")


def test_every_box_and_every_event_is_an_observation(written, season):
    results = json.loads((season / "results.json").read_text())
    observations = table(written, "observations")
    of_images = [row for row in observations if row["observationLevel"] == "media"]
    confident = [box for image in results["images"] for box in image["detections"] if box["conf"] >= 0.2]
    assert len([row for row in of_images if row["bboxWidth"]]) == len(confident)
    empty = [image["file"] for image in results["images"] if all(box["conf"] < 0.2 for box in image["detections"])]
    assert [row["mediaID"] for row in of_images if row["observationType"] == "blank"] == empty
    with (season / "truth.csv").open(newline="") as lines:
        truth = {row["event"]: row["shows"] for row in csv.DictReader(lines)}
    of_events = [row for row in observations if row["observationLevel"] == "event"]
    assert len(of_events) == len(truth)
    kinds = [row["observationType"] for row in of_events]
    shown = list(truth.values())
    for kind, name in (("human", "person"), ("vehicle", "vehicle"), ("blank", "nothing")):
        assert kinds.count(kind) == shown.count(name)
    assert kinds.count("animal") > 20
    for row in observations:
        assert (row["scientificName"] in SPECIES) == (row["observationType"] == "animal")
        assert ("nearestClass:" in row["observationTags"]) == (row["observationType"] == "unknown")
        if row["observationType"] in ("animal", "unknown"):
            assert float(row["classificationProbability"]) >= 0.5
            assert row["classifiedBy"].startswith("ProtoDCS")


def test_times_have_the_zone_of_the_cameras(written, copied):
    assert {row["timestamp"][-6:] for row in table(written, "media")} == {"+02:00"}
    assert {row["timestampIssues"] for row in table(written, "deployments")} == {"false"}
    done, package = write_package(copied)
    assert done.exit_code == 0
    assert {row["timestamp"][-6:] for row in table(package, "media")} == {"+00:00"}
    assert {row["timestampIssues"] for row in table(package, "deployments")} == {"true"}
    assert errors_of(package, {name: schema(name) for name in COLUMNS}) == []


def test_what_the_user_knows_of_a_deployment_stays(copied):
    rows = [f"{camera},50,5,2025-04-01T00:00:00+02:00,,trailGame" for camera in CAMERAS]
    own = copied / "own.csv"
    own.write_text("deploymentID,latitude,longitude,deploymentStart,deploymentEnd,featureType\n" + "\n".join(rows))
    done, package = write_package(copied, deployments=own)
    assert done.exit_code == 0
    for row in table(package, "deployments"):
        assert row["deploymentStart"] == "2025-04-01T00:00:00+02:00"
        assert row["deploymentEnd"].startswith("2025-0")
        assert row["featureType"] == "trailGame"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("deploymentID,latitude\nA01,50\n", "must have rows with the columns"),
        ("deploymentID,latitude,longitude,altitude\nA01,50,5,9\n", "does not have: altitude"),
        ("deploymentID,latitude,longitude\nA01,50,5\n", "no row for the camera 'A02'"),
        ("deploymentID,latitude,longitude\nA01,50,5\nA02,50,5\nB01,x,5\nB02,50,5\n", "latitude must be a number"),
    ],
)
def test_wrong_deployments_are_explained(copied, content, message):
    (copied / "own.csv").write_text(content)
    done, package = write_package(copied, deployments=copied / "own.csv")
    assert done.exit_code == 1
    assert message in done.stderr
    assert not package.exists()
    assert not (copied / "species.json").exists()


def test_options_that_do_not_fit_are_explained(copied):
    words = ["classify", "--megadetector", copied / "results.json", "--classes", "cat,dog", "--model", "demo"]

    def problem(*options):
        return CliRunner().invoke(app, [*map(str, words), *map(str, options)]).stderr

    assert "needs --deployments" in problem("--camtrap-dp", copied / "package")
    assert "no time zone 'Mars/Olympus'" in problem(
        "--camtrap-dp", copied / "package", "--deployments", copied / "deployments.csv", "--time-zone", "Mars/Olympus"
    )
    (copied / "package").mkdir()
    (copied / "package" / "media.csv").write_text("mine")
    done, _ = write_package(copied)
    assert "media.csv exists already" in done.stderr
    assert (copied / "package" / "media.csv").read_text() == "mine"


def test_images_without_a_time_are_left_out(copied):
    results = json.loads((copied / "results.json").read_text())
    for image in results["images"][:3]:
        (copied / image["file"]).unlink()
    (copied / "results.json").write_text(json.dumps(results))
    done, package = write_package(copied)
    assert done.exit_code == 0
    assert "3 images have no time" in done.stderr
    assert len(table(package, "media")) == len(results["images"]) - 3
    assert errors_of(package, {name: schema(name) for name in COLUMNS}) == []


def test_absolute_paths_are_refused_before_anything_is_written(copied):
    results = json.loads((copied / "results.json").read_text())
    for image in results["images"]:
        image["file"] = str(copied / image["file"])
    (copied / "results.json").write_text(json.dumps(results))
    with (copied / "deployments.csv").open("w") as lines:
        lines.write("deploymentID,latitude,longitude\n")
        lines.writelines(f"{copied / camera},50,5\n" for camera in CAMERAS)
    done, package = write_package(copied)
    assert done.exit_code == 1
    assert "relative paths" in done.stderr
    assert not package.exists()
