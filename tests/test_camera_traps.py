"""Camera traps: boxes of a detector in, species and unknown animals out, image by image and event by event."""

import csv
import io
import json
import shutil
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save
from typer.testing import CliRunner

from protodcs.cli import app
from protodcs.data.crop import Box, Crop, crop_around
from protodcs.data.exif import capture_time, parse_time
from protodcs.demo.season import CAMERAS, SPECIES, make_season
from protodcs.encoders import files as encoded_files
from protodcs.errors import DataError
from protodcs.integrations import megadetector
from protodcs.integrations.camera_offsets import without_offsets
from protodcs.integrations.camera_traps import Photo, camera_of, group_events, photos

NOON = datetime(2025, 5, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def season(tmp_path_factory):
    folder = tmp_path_factory.mktemp("season") / "season"
    make_season(folder, events=60, seed=3)
    return folder


def classify(folder, *options, results="results.json", out="species.json"):
    arguments = ["classify", "--megadetector", results, "--classes", "species.txt", "--model", "demo", "--out", out]
    paths = {"results.json", "species.txt", "species.json", results, out}
    given = [str(folder / word) if word in paths else word for word in arguments]
    done = CliRunner().invoke(app, [*given, *map(str, options)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture(scope="module")
def classified(season, tmp_path_factory):
    """Return the results before and after, the events and the summary."""
    folder = tmp_path_factory.mktemp("classified")
    for name in ("results.json", "species.txt"):
        shutil.copy(season / name, folder)
    done = classify(folder, "--images", season, "--json")
    assert done.exit_code == 0, done.stderr
    assert {file.name for file in folder.iterdir()} == {
        "results.json", "species.txt", "species.json", "species.events.csv", "species.states"
    }  # fmt: skip
    before, after = (json.loads((folder / name).read_text()) for name in ("results.json", "species.json"))
    with (folder / "species.events.csv").open(newline="") as lines:
        return before, after, list(csv.DictReader(lines)), json.loads(done.stdout)


def boxes(results):
    return [(image["file"], box) for image in results["images"] for box in image["detections"]]


# The results file.


def test_only_boxes_of_animals_that_the_detector_is_sure_of_get_a_species(classified):
    before, after, _, report = classified
    classes = {name: number for number, name in after["classification_categories"].items()}
    assert list(classes) == [*SPECIES, "unknown"]
    counted = 0
    for (_, given), (_, box) in zip(boxes(before), boxes(after), strict=True):
        wanted = given["category"] == "1" and given["conf"] >= 0.2
        assert {key: value for key, value in box.items() if key != "classifications"} == given
        assert ("classifications" in box) == wanted
        if wanted:
            counted += 1
            (first, confidence), (second, rest) = box["classifications"]
            assert confidence >= rest
            assert confidence + rest == pytest.approx(1)
            assert classes["unknown"] in (first, second)
    assert counted == report["boxes"]["all"] > 100
    assert {box["category"] for _, box in boxes(before)} == {"1", "2", "3"}
    assert {key: after[key] for key in before if key not in ("info", "images")} == {
        key: before[key] for key in before if key not in ("info", "images")
    }
    assert after["info"]["detector"] == before["info"]["detector"]
    assert "demo" in after["info"]["classifier"]


def test_most_listed_animals_get_their_species(classified, season):
    _, after, events, _ = classified
    with (season / "truth.csv").open(newline="") as lines:
        shows = {row["file"]: row["shows"] for row in csv.DictReader(lines)}
    names = after["classification_categories"]
    tops = [(names[box["classifications"][0][0]], shows[file]) for file, box in boxes(after) if len(box) > 3]
    listed = [(top, shown) for top, shown in tops if shown in SPECIES]
    assert np.mean([top == shown for top, shown in listed]) > 0.75
    assert len([event for event in events if event["label"] in SPECIES]) > 30


@pytest.mark.long
def test_the_validator_of_megadetector_finds_nothing_wrong(classified):
    validation = pytest.importorskip("megadetector.postprocessing.validate_batch_results")
    found = validation.validate_batch_results(classified[1])["validation_results"]
    assert (found["errors"], found["warnings"]) == ([], [])


@pytest.fixture
def two_cameras():
    """Features of four classes before two cameras, of which one sees mostly the first class; what the cameras add."""
    rng = np.random.default_rng(0)
    texts = rng.normal(size=(4, 64))
    added = 0.8 * rng.normal(size=(2, 64))
    classes = np.concatenate([rng.choice(4, 300), rng.choice(4, 300, p=[0.85, 0.05, 0.05, 0.05])])
    cameras = np.repeat([0, 1], 300)
    rows = texts[classes] + added[cameras] + 0.3 * rng.normal(size=(600, 64))
    unit = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit, cameras, texts, classes


def spread(features, cameras, classes):
    """Return how far the means of a class before two cameras are apart, on average."""
    means = [[features[(cameras == camera) & (classes == one)].mean(axis=0) for camera in (0, 1)] for one in range(4)]
    return float(np.mean([np.linalg.norm(first - second) for first, second in means]))


def test_what_a_camera_adds_is_removed_and_its_frequent_species_stay(two_cameras):
    features, cameras, texts, classes = two_cameras
    found, means = without_offsets(features, cameras, texts)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1, abs=1e-5)
    assert spread(found, cameras, classes) < 0.2 * spread(features, cameras, classes)
    # The frequent class is as far from the others as before.
    others = found[classes != 0].mean(axis=0)
    assert np.linalg.norm(found[classes == 0].mean(axis=0) - others) > 0.5
    # Later, one of the cameras comes alone.
    alone, _ = without_offsets(features[300:], np.zeros(300, dtype=np.int64), texts, means)
    assert alone == pytest.approx(found[300:], abs=0.02)


def test_one_camera_keeps_its_features(two_cameras):
    features, _, texts, _ = two_cameras
    for count in (1, 2, 300):
        found, _ = without_offsets(features[:count], np.zeros(count, dtype=np.int64), texts)
        assert found == pytest.approx(features[:count], abs=1e-6)


def test_a_class_that_was_not_seen_has_a_mean_later(two_cameras):
    features, cameras, texts, classes = two_cameras
    _, before = without_offsets(features[classes != 3], cameras[classes != 3], texts)
    _, after = without_offsets(features, cameras, texts, before)
    seen = ~np.isnan(before.classes).any(axis=1)
    assert np.array_equal(after.classes[seen], before.classes[seen])
    assert not np.isnan(after.classes).any()


def test_a_file_names_its_own_confidence_and_an_option_overrides_it(season, tmp_path):
    results = json.loads((season / "results.json").read_text())
    assert megadetector.usual_confidence(results) == 0.2
    results["info"]["detector_metadata"] = {"typical_detection_threshold": 0.8}
    assert megadetector.usual_confidence(results) == 0.8
    (tmp_path / "results.json").write_text(json.dumps(results))
    shutil.copy(season / "species.txt", tmp_path)
    counts = []
    for number, options in enumerate(([], ["--min-confidence", 0.5])):
        done = classify(tmp_path, "--images", season, "--json", *options, out=f"{number}.json")
        counts.append(json.loads(done.stdout)["boxes"]["all"])
    confident = [box for _, box in boxes(results) if box["category"] == "1"]
    assert counts == [sum(box["conf"] >= least for box in confident) for least in (0.8, 0.5)]


def test_an_image_that_cannot_be_read_keeps_its_boxes_and_is_reported(season, tmp_path):
    shutil.copytree(season, tmp_path / "copy")
    results = json.loads((season / "results.json").read_text())
    bad = next(image["file"] for image in results["images"] for box in image["detections"] if box["conf"] > 0.2)
    (tmp_path / "copy" / bad).write_bytes(b"<html>not found</html>")
    results["images"] += [
        {"file": "A01/broken.jpg", "failure": "Failure image access", "detections": None},
        {"file": "A01/a.mp4", "frame_rate": 20, "frames_processed": [0], "detections": [
            {"category": "1", "conf": 0.9, "bbox": [0, 0, 1, 1], "frame_number": 0}]},
    ]  # fmt: skip
    (tmp_path / "copy" / "results.json").write_text(json.dumps(results))
    done = classify(tmp_path / "copy")
    assert done.exit_code == 0
    assert "1 boxes have no decision" in done.stderr
    assert bad in done.stderr
    after = json.loads((tmp_path / "copy" / "species.json").read_text())
    kept = [image for image in after["images"] if image["file"] in (bad, "A01/broken.jpg", "A01/a.mp4")]
    assert kept == [image for image in results["images"] if image in kept]


@pytest.mark.parametrize("name", ["species.json", "species.events.csv", "species.json.features"])
def test_no_file_is_overwritten(season, tmp_path, name):
    for source in ("results.json", "species.txt"):
        shutil.copy(season / source, tmp_path)
    (tmp_path / name).write_text("mine\n")
    done = classify(tmp_path, "--images", season)
    assert done.exit_code == 1
    assert name in done.stderr
    assert (tmp_path / name).read_text() == "mine\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "is not JSON"),
        ("[]", "no list `images`"),
        ('{"images": []}', "no `detection_categories`"),
        ('{"images": [{}], "detection_categories": {}}', "image 0 has no `file`"),
        ('{"images": [], "detection_categories": {}, "info": 3}', "`info` is no object"),
        ('{"images": [{"file": "a", "detections": [{"category": "1", "conf": 1, "bbox": [0, 0, NaN, 1]}]}], '
         '"detection_categories": {}}', "'a' has a detection without"),
    ],
)  # fmt: skip
def test_a_file_of_another_format_is_explained(tmp_path, content, message):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(DataError, match=message):
        megadetector.read_results(tmp_path / "results.json")


def test_problems_of_the_command_are_explained(season, tmp_path, classified):
    for source in ("results.json", "species.txt"):
        shutil.copy(season / source, tmp_path)
    assert "Set --images" in classify(tmp_path).stderr
    assert "Use --images" in classify(tmp_path, "--sheet", "a.png").stderr
    assert "must be a .json file" in classify(tmp_path, out="species.csv").stderr
    assert "Set --min-confidence" in classify(tmp_path, "--min-confidence", 1).stderr
    (tmp_path / "again.json").write_text(json.dumps(classified[1]))
    assert "has classifications already" in classify(tmp_path, results="again.json").stderr
    done = CliRunner().invoke(app, ["classify", "--classes", "cat,dog", "--model", "demo"])
    assert "Give a folder of images" in done.stderr


# From one half of the season to the next.


def run(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """Classify the first half of a season, without its most frequent species on the list."""
    folder = tmp_path_factory.mktemp("halves") / "season"
    make_season(folder, events=120, seed=3)
    (folder / "species.txt").write_text("\n".join(name for name in SPECIES if name != "butterfly"))
    assert classify(folder, results="first-half.json", out="first.json").exit_code == 0
    return folder


@pytest.fixture(scope="module")
def named(halves):
    """Return the folder of clusters of the first half. Those that show mostly butterflies have this name."""
    discover = ("discover", halves / "first.json", "--model", "demo", "--out")
    assert run(*discover, halves / "clusters").exit_code == 0
    with (halves / "truth.csv").open(newline="") as lines:
        shows = {row["file"]: row["shows"] for row in csv.DictReader(lines)}
    kinds = {}
    with (halves / "clusters" / "clusters.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            kinds.setdefault(row["cluster"], []).append(shows[row["sample"].split(", box")[0]])
    kinds.pop("", None)
    mostly = [cluster for cluster, inside in kinds.items() if inside.count("butterfly") > 0.8 * len(inside)]
    assert mostly
    names = [word for cluster in mostly for word in ("--name", f"{cluster}=butterfly")]
    assert run(*discover, halves / "named", *names).exit_code == 0
    return halves / "named"


def test_a_species_that_was_named_is_recognised_in_the_next_half(halves, named, tmp_path):
    given = ("classify", "--megadetector", halves / "second-half.json", "--model", "demo")
    earlier = ("--state", halves / "first.states", "--clusters", named / "clusters.state")
    done = run(*given, *earlier, "--out", tmp_path / "second.json")
    assert done.exit_code == 0, done.stderr
    with (halves / "truth.csv").open(newline="") as lines:
        shows = {row["file"]: row["shows"] for row in csv.DictReader(lines)}
    after = json.loads((tmp_path / "second.json").read_text())
    names = after["classification_categories"]
    assert list(names.values()) == [*(name for name in SPECIES if name != "butterfly"), "unknown", "butterfly"]
    called = [
        shows[file]
        for file, box in boxes(after)
        if "classifications" in box and names[box["classifications"][0][0]] == "butterfly"
    ]
    assert len(called) > 3
    assert called.count("butterfly") > 0.8 * len(called)
    with (tmp_path / "second.events.csv").open(newline="") as lines:
        events = [row for row in csv.DictReader(lines) if row["label"] == "butterfly"]
    assert events
    assert {row["known"] for row in events} == {"False"}
    with (named / "clusters.csv").open(newline="") as lines:
        assert "butterfly" in {row["name"] for row in csv.DictReader(lines)}


def test_a_season_continues_with_what_was_learned(halves, tmp_path):
    from protodcs.core import state

    given = ("classify", "--megadetector", halves / "second-half.json", "--model", "demo")
    done = run(*given, "--state", halves / "first.states", "--out", tmp_path / "second.json", "--json")
    assert done.exit_code == 0, done.stderr

    def seen(folder):
        return state.unpack(state.read(folder / "season.state"))[0].counters["sequence"]

    boxes = json.loads(done.stdout)["boxes"]["all"]
    assert seen(tmp_path / "second.states") - seen(halves / "first.states") == boxes > 0
    means = [
        load_file(folder / "class-means.safetensors")
        for folder in (halves / "first.states", tmp_path / "second.states")
    ]
    assert np.array_equal(means[0]["centre"], means[1]["centre"])


def test_damaged_class_means_are_explained(halves, tmp_path):
    shutil.copytree(halves / "first.states", tmp_path / "states")
    given = ("classify", "--megadetector", halves / "second-half.json", "--model", "demo", "--out", tmp_path / "a.json")
    means = tmp_path / "states" / "class-means.safetensors"
    for content, message in (
        (b"nonsense", "is damaged"),
        (save({"centre": np.zeros(3), "classes": np.zeros((2, 3))}), "other classes"),
    ):
        means.write_bytes(content)
        assert message in " ".join(run(*given, "--state", tmp_path / "states").stderr.split())
    means.unlink()
    assert "has no class-means.safetensors" in run(*given, "--state", tmp_path / "states").stderr


def test_problems_with_states_and_clusters_are_explained(halves, tmp_path):
    given = ("classify", "--megadetector", halves / "second-half.json", "--model", "demo", "--out", tmp_path / "a.json")
    assert "Give --classes, or --state" in run(*given).stderr
    assert "Give --classes, or --state" in run(*given, "--classes", "a,b", "--state", halves / "first.states").stderr
    assert "part of a state" in run(*given, "--state", halves, "--target-false-reject", 0.1).stderr
    assert "has no season.state" in run(*given, "--state", tmp_path).stderr
    discover = ("discover", halves / "first.json", "--model", "demo", "--out", tmp_path / "clusters", "--name")
    assert "such as 0=monarch" in run(*discover, "monarch").stderr
    assert run(*discover, "999=monarch").exit_code == 1
    assert not (tmp_path / "clusters").exists()
    assert "no classified boxes" in run("discover", halves / "results.json", "--model", "demo").stderr


# Cameras, times and events.


@pytest.mark.parametrize(
    ("path", "camera"),
    [
        ("A01/IMG_0001.JPG", "A01"),
        ("north/A01/DCIM/100RECNX/IMG_0001.JPG", "north/A01"),
        ("A01/dcim/101_BTCF/x.jpg", "A01"),
        ("100RECNX/A01/x.jpg", "100RECNX/A01"),
        ("x.jpg", ""),
    ],
)
def test_the_camera_is_the_folder_without_those_of_its_memory_card(path, camera):
    assert camera_of(path) == camera


def test_windows_paths_have_the_same_cameras(tmp_path):
    results = {"images": [{"file": "A01\\DCIM\\100RECNX\\a.jpg", "datetime": "2025:05:01 12:00:00"}]}
    assert photos(results, tmp_path) == [Photo(0, "A01/DCIM/100RECNX/a.jpg", "A01", NOON)]


def test_an_event_ends_after_a_gap_and_at_an_image_without_a_time():
    def photo(number, seconds, camera="A"):
        time = None if seconds is None else NOON + timedelta(seconds=seconds)
        return Photo(number, f"{number}.jpg", camera, time)

    taken = [photo(0, 200), photo(1, 0), photo(2, 60), photo(3, 120), photo(4, None), photo(5, 0, "B"), photo(6, None)]
    groups = {event.name: [one.image for one in event.photos] for event in group_events(taken, 60)}
    assert groups == {"A#1": [1, 2, 3], "A#2": [0], "A#3": [4], "A#4": [6], "B#1": [5]}
    (first, *_) = group_events(taken, 60)
    assert (first.start, first.end) == (NOON, NOON + timedelta(seconds=120))
    assert len(group_events(taken, 0)) == 7


def test_the_events_of_the_season_are_found_from_the_times_in_its_images(classified, season):
    _, _, events, report = classified
    with (season / "truth.csv").open(newline="") as lines:
        truth = {row["event"]: row for row in csv.DictReader(lines)}
    assert len(events) == len(truth) == 60
    assert report["without_time"] == 0
    assert report["cameras"] == len(CAMERAS)
    assert sum(int(event["images"]) for event in events) == report["images"]
    empty = [event for event in events if event["boxes"] == "0"]
    assert len(empty) == sum(row["shows"] in ("person", "vehicle", "nothing") for row in truth.values())
    assert {event["label"] + event["p_unknown"] for event in empty} == {""}


def test_an_event_of_one_image_has_the_decision_of_its_only_box(classified):
    _, after, events, _ = classified
    names = after["classification_categories"]
    tops = {}
    for file, box in boxes(after):
        if "classifications" in box:
            tops[file] = names[box["classifications"][0][0]]
    single = [event for event in events if (event["images"], event["boxes"]) == ("1", "1")]
    assert len(single) > 3
    for event in single:
        file = f"{event['camera']}/{datetime.fromisoformat(event['start']):%Y%m%d-%H%M%S}.jpg"
        assert tops[file] == (event["label"] or "unknown")


def test_times_of_the_file_replace_those_of_the_images(season, tmp_path):
    results = json.loads((season / "results.json").read_text())
    for image in results["images"]:
        image["datetime"] = "2025:06:01 00:00:00"
    (tmp_path / "results.json").write_text(json.dumps(results))
    shutil.copy(season / "species.txt", tmp_path)
    assert classify(tmp_path, "--images", season).exit_code == 0
    with (tmp_path / "species.events.csv").open(newline="") as lines:
        assert [row["start"] for row in csv.DictReader(lines)] == ["2025-06-01T00:00:00"] * len(CAMERAS)


@pytest.mark.parametrize("text", ["2025:05:01 12:00:00", "2025-05-01 12:00:00", "2025-05-01T12:00:00.250"])
def test_times_are_read_in_all_usual_forms(text):
    assert parse_time(text) == NOON


@pytest.mark.parametrize("text", ["", "0000:00:00 00:00:00", "    :  :     :  :  ", "yesterday"])
def test_other_texts_are_no_times(text):
    assert parse_time(text) is None


def photograph(time=None, order="II"):
    exif = Image.Exif()
    exif.endian = "<" if order == "II" else ">"
    exif[0x010F] = "Maker"
    if time is not None:
        exif.get_ifd(0x8769)[0x9003] = time
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG", exif=exif)
    return file.getvalue()


def test_the_time_of_an_image_is_that_of_its_exif_block(tmp_path):
    file = tmp_path / "a.jpg"
    for order in ("II", "MM"):
        file.write_bytes(photograph("2025:05:01 12:00:00", order))
        assert capture_time(file) == NOON
    for content in (photograph(), photograph("    :  :     :  :  "), b"", b"\xff\xd8\xff", b"no image"):
        file.write_bytes(content)
        assert capture_time(file) is None
    assert capture_time(tmp_path / "missing.jpg") is None


def test_damaged_exif_blocks_give_no_error(tmp_path):
    whole, file = photograph("2025:05:01 12:00:00"), tmp_path / "a.jpg"
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(500):
        content = bytearray(whole[: rng.integers(1, len(whole))])
        for place in rng.integers(len(content), size=3):
            content[place] = rng.integers(256)
        file.write_bytes(content)
        found += capture_time(file) is not None
    assert 0 < found < 500


# Crops.


def numbered(height, width):
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows, columns, rows * 0], axis=2).astype(np.uint8)


@pytest.mark.parametrize(
    ("box", "rows", "columns"),
    [
        (Box(0.4, 0.4, 0.2, 0.2), (20, 80), (70, 130)),
        (Box(0, 0, 0.1, 0.1), (0, 30), (0, 30)),
        (Box(0.95, 0.9, 0.05, 0.1), (85, 100), (185, 200)),
        (Box(0, 0, 1, 1), (0, 100), (0, 200)),
        (Box(0.5, 0.5, 0, 0), (49, 51), (99, 101)),
        (Box(1.2, -0.2, 0.1, 0.1), (0, 30), (170, 200)),
    ],
)
def test_a_crop_is_a_square_with_surroundings_inside_the_image(box, rows, columns):
    crop = crop_around(numbered(100, 200), box)
    assert (crop[0, 0, 0], crop[-1, 0, 0] + 1) == rows
    assert (crop[0, 0, 1], crop[0, -1, 1] + 1) == columns


def test_an_image_with_several_boxes_is_decoded_once(season, monkeypatch):
    from protodcs import encoders

    decoded = []
    original = encoded_files.decode
    monkeypatch.setattr(encoded_files, "decode", lambda file, name: decoded.append(file) or original(file, name))
    first, second = sorted(season.glob("A01/*.jpg"))[:2]
    box, other = Box(0.1, 0.1, 0.3, 0.3), Box(0.5, 0.5, 0.2, 0.2)
    sources = {"a": Crop(first, box), "b": Crop(first, other), "c": first, "d": Crop(second, box)}
    encoded = encoded_files.encode_files(encoders.load("demo"), sources)
    assert encoded.names == ("a", "b", "c", "d")
    assert decoded == [first, second]
    assert len(np.unique(encoded.features, axis=0)) == 4
