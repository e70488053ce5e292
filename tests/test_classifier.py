"""The whole way from images to decisions, in a program and on the command line."""

import csv
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import chdir, nullcontext
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from interrupting import interrupting
from protodcs import OpenSetClassifier, ProtoDCSConfig, StreamDCS, StreamDCSConfig, encoders
from protodcs.cli import app
from protodcs.data import decode, open_source
from protodcs.errors import ConfigError, EncoderError, ImageError, InputError, StateError

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PROTODCS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def mini(data_folder):
    return encoders.load("mini", batch_size=32)


@pytest.fixture(scope="module")
def mixed(data_folder):
    """200 images, every second one a digit that belongs to no CIFAR-10 class."""
    known, strange = open_source("cifar10-test").read(range(100)), open_source("svhn-test").read(range(100))
    return [image for pair in zip(known, strange, strict=True) for image in pair]


def test_a_stream_gives_what_its_images_give_one_by_one(mini, mixed):
    together = list(OpenSetClassifier.with_encoder(mini, "cifar10").stream(mixed))
    alone = OpenSetClassifier.with_encoder(mini, "cifar10")
    for decision in together:
        single = alone(mixed[decision.sequence])
        assert single.known == decision.known
        assert single.index == decision.index
        assert abs(single.openness - decision.openness) < 1e-5
    assert [decision.sequence for decision in together] == list(range(200))


# Running ahead.


def one_after_the_other(classifier, images):
    """What a stream must give: each batch encoded, then decided on, in one thread."""
    size = classifier.encoder.batch_size
    for first in range(0, len(images), size):
        for feature in classifier.encoder.encode_pixels(images[first : first + size]):
            yield classifier.engine.observe(feature)


def told(decision):
    """All that a decision says, comparable to the bit."""
    fields = dataclasses.asdict(decision)
    return {**fields, "scores": decision.scores.tobytes()}


def workers():
    return [thread for thread in threading.enumerate() if thread.name == "protodcs-ahead"]


class Light:
    """An encoder that costs nothing: the feature of an image is its first pixels; a black image breaks it."""

    fingerprint = "light"

    def __init__(self, batch_size):
        self.batch_size = batch_size

    def encode_pixels(self, images):
        rows = np.stack([image.reshape(-1)[:24] for image in images]).astype(np.float32)
        if not rows.any(axis=1).all():
            raise EncoderError("black")
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def light(batch_size):
    prototypes = np.random.default_rng(1).normal(size=(3, 24)).astype(np.float32)
    return OpenSetClassifier(Light(batch_size), StreamDCS(prototypes))


def small_images(count):
    return list(np.random.default_rng(2).integers(1, 255, size=(count, 4, 4, 3), dtype=np.uint8))


@pytest.mark.parametrize("method", ["streamdcs", "protodcs"])
def test_a_stream_decides_to_the_bit_as_one_thread_would(method, mini, mixed):
    ahead, plain = (OpenSetClassifier.with_encoder(mini, "cifar10", method=method) for _ in range(2))
    assert [*map(told, ahead.stream(mixed))] == [*map(told, one_after_the_other(plain, mixed))]
    assert ahead.engine.snapshot() == plain.engine.snapshot()


@given(
    count=st.integers(0, 30),
    batch_size=st.integers(1, 9),
    damaged=st.none() | st.integers(0, 30),
    black=st.none() | st.integers(0, 30),
    broken_off=st.none() | st.integers(0, 30),
    stops=st.none() | st.integers(0, 32),
)
def test_errors_and_early_ends_are_where_they_belong(count, batch_size, damaged, black, broken_off, stops):
    images = small_images(count)
    if black is not None and black < count:
        images[black] = np.zeros_like(images[black])
    if damaged is not None and damaged < count:
        images[damaged] = b"no image"

    def source():
        for number, image in enumerate(images):
            if number == broken_off:
                raise OSError("unplugged")
            yield image

    # How many decisions there must be, and what ends them.
    end, error = count, None
    if damaged is not None and damaged < end:
        end, error = damaged, ImageError
    if broken_off is not None and broken_off < min(end + 1, count):
        end, error = broken_off, OSError
    if black is not None and black < end:
        end, error = black - black % batch_size, EncoderError
    if stops is not None and stops <= end:
        end, error = stops, None

    classifier, decisions = light(batch_size), []
    stream = classifier.stream(source())
    with pytest.raises(error) if error else nullcontext():
        decisions.extend(itertools.islice(stream, stops))
    del stream
    assert not workers()
    plain = light(batch_size)
    expected = list(one_after_the_other(plain, images[:end]))
    assert [*map(told, decisions)] == [*map(told, expected)]
    assert classifier.engine.snapshot() == plain.engine.snapshot()


def test_between_two_decisions_the_engine_has_seen_what_was_decided_and_no_more(mini, mixed):
    classifier, plain = (OpenSetClassifier.with_encoder(mini, "cifar10") for _ in range(2))
    expected = one_after_the_other(plain, mixed)
    for number, decision in enumerate(classifier.stream(mixed)):
        assert told(decision) == told(next(expected))
        assert classifier.engine.snapshot() == plain.engine.snapshot()
        for either in (classifier, plain):
            if number == 50:
                either.add_class("digit zero")
            elif number == 70:
                either.engine.freeze()
            elif number == 80:
                either.engine.unfreeze()
                either(mixed[0])
            elif number == 100:
                either.remove_class("cat")
        if number == 130:
            break
    assert classifier.engine.sequence == plain.engine.sequence == 132


def test_a_stream_is_lazy_and_reads_no_more_than_two_batches_ahead():
    taken = []
    images = small_images(1)

    def source():
        while True:
            taken.append(1)
            yield images[0]

    stream = light(32).stream(source())
    assert taken == []
    assert workers() == []
    for number in range(1, 100):
        next(stream)
        assert len(taken) <= 32 * ((number + 31) // 32 + 2)
    end = time.monotonic() + 300
    while len(taken) <= 128:
        assert time.monotonic() < end, "it does not read ahead"
        time.sleep(0.002)
    assert len(taken) <= 32 * (4 + 2)
    stream.close()
    assert workers() == []


def test_with_a_batch_of_one_an_image_is_read_when_its_decision_is_asked_for():
    classifier, image = light(1), small_images(1)[0]

    def source():
        while True:
            # The next image may depend on what was decided so far: this is read by nobody but the caller.
            assert threading.current_thread() is threading.main_thread()
            assert classifier.engine.sequence == len(decisions)
            yield image

    decisions = []
    for decision in classifier.stream(source()):
        decisions.append(decision)
        assert workers() == []
        if len(decisions) == 5:
            break


def test_a_live_stream_gets_its_decisions_before_the_next_image_comes():
    images, gate = small_images(8), threading.Event()

    def source():
        yield from images
        gate.wait()

    stream = light(4).stream(source())
    assert [next(stream).sequence for _ in images] == list(range(8))
    gate.set()
    assert list(stream) == []


def test_the_buffer_of_an_image_may_be_used_again_for_the_next():
    images, classifier, plain = small_images(20), light(8), light(8)

    def source():
        buffer = np.empty_like(images[0])
        for image in images:
            buffer[:] = image
            yield buffer

    assert [*map(told, classifier.stream(source()))] == [*map(told, one_after_the_other(plain, images))]


def test_a_caller_that_fails_leaves_no_thread_and_has_learned_from_nothing_more():
    classifier = light(4)

    def run():
        for decision in classifier.stream(itertools.cycle(small_images(3))):
            if decision.sequence == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert workers() == []
    assert classifier.engine.sequence == 6


def test_an_engine_that_fails_ends_the_stream_and_its_thread():
    classifier = light(4)
    stream = classifier.stream(itertools.cycle(small_images(3)))
    next(stream)
    classifier.engine = StreamDCS(np.eye(5, dtype=np.float32))
    with pytest.raises(InputError, match="shape") as kept:
        next(stream)
    # Also while somebody keeps the error, and with it the frames.
    assert kept.value.__traceback__ is not None
    assert workers() == []


def test_digits_are_called_unknown_more_often_than_objects(mini, mixed):
    decisions = list(OpenSetClassifier.with_encoder(mini, "cifar10").stream(mixed))[100:]
    objects, digits = decisions[::2], decisions[1::2]
    assert sum(d.known for d in objects) > sum(d.known for d in digits) + 20
    assert all(d.label in open_source("cifar10-test").classes for d in decisions if d.known)


def test_the_temperature_is_that_of_the_encoder_unless_a_config_is_given(mini):
    own = OpenSetClassifier.with_encoder(mini, ["cat", "dog"])
    assert own.engine.name == "streamdcs"
    assert own.engine.config.temperature == pytest.approx(1 / 21.936, rel=1e-3)
    paper = OpenSetClassifier.with_encoder(mini, ["cat", "dog"], method="protodcs", cache_size=3)
    assert paper.engine.config == ProtoDCSConfig(temperature=1 / mini.logit_scale, cache_size=3)
    given = OpenSetClassifier.with_encoder(mini, ["cat", "dog"], config=StreamDCSConfig())
    assert given.engine.config.temperature == 0.01
    with pytest.raises(ConfigError, match="config must be a ZeroShotConfig; given: StreamDCSConfig"):
        OpenSetClassifier.with_encoder(mini, ["cat"], config=StreamDCSConfig(), method="zero_shot")
    with pytest.raises(ConfigError, match="config and history are both given"):
        OpenSetClassifier.with_encoder(mini, ["cat"], config=StreamDCSConfig(), history=1000)
    with pytest.raises(ConfigError, match="name the classes"):
        OpenSetClassifier.with_encoder(mini, None)


def test_any_registered_method_can_be_chosen(data_folder, mixed):
    classifier = OpenSetClassifier.from_pretrained("mini", classes="cifar10", method="zero_shot", score="mcm")
    assert classifier(mixed[0]).label is not None


def test_a_damaged_image_raises_at_its_place_and_nothing_before_it_is_lost(mini, mixed):
    classifier = OpenSetClassifier.with_encoder(mini, "cifar10")
    decided = []
    with pytest.raises(ImageError, match="image 40 of the stream"):
        decided.extend(classifier.stream([*mixed[:40], b"no image", *mixed[41:]]))
    assert len(decided) == classifier.engine.sequence == 40


def test_a_saved_classifier_goes_on_and_refuses_another_encoder(mini, mixed, tmp_path):
    classifier = OpenSetClassifier.with_encoder(mini, "cifar10")
    list(classifier.stream(mixed[:120]))
    classifier.save(tmp_path / "state")
    twin = OpenSetClassifier.restored(mini, tmp_path / "state")
    assert [d.openness for d in twin.stream(mixed[120:])] == [d.openness for d in classifier.stream(mixed[120:])]
    with pytest.raises(StateError, match="encoder"):
        OpenSetClassifier.restored(encoders.load("mini", dtype="bfloat16"), tmp_path / "state")


def test_classes_are_edited_by_name(mini, mixed):
    classifier = OpenSetClassifier.with_encoder(mini, ["cat", "dog"])
    classifier.add_class("ship")
    classifier.remove_class("cat")
    assert classifier.classes == ("dog", "ship")
    ship = open_source("cifar10-test").labels.tolist().index(8)
    assert classifier.engine.classes[classifier(open_source("cifar10-test").read([ship])[0]).index] == "ship"


# The command.


@pytest.fixture
def folder(mixed, tmp_path):
    place = tmp_path / "images"
    (place / "more").mkdir(parents=True)
    for number, image in enumerate(mixed):
        Image.fromarray(image).save(place / ("more" if number % 3 else ".") / f"{number:03d}.png")
    (place / "005-broken.jpg").write_bytes(b"<html>not found</html>")
    (place / "notes.txt").write_text("no image")
    return place


def command(*arguments, cwd="."):
    """Run the command in this process, where the encoder's libraries are loaded already."""
    with chdir(cwd):
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def test_classify_writes_a_row_for_every_image_and_a_sheet_of_strangers(folder, tmp_path, mini):
    out, sheet = tmp_path / "out" / "decisions.csv", tmp_path / "sheet.png"
    run = command(
        "classify", folder, "--classes", "cifar10", "--model", "mini", "--out", out, "--sheet", sheet, "--json"
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    with out.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [row["file"] for row in rows] == sorted(row["file"] for row in rows)
    assert len(rows) == report["images"] == 201
    assert report["refused"] == 1
    assert report["known"] + report["unknown"] == 200
    assert sum(row["known"] == "False" for row in rows) == report["unknown"] > 20
    (refused,) = (row for row in rows if row["problem"])
    assert refused["file"] == "005-broken.jpg"
    plain = OpenSetClassifier.with_encoder(mini, "cifar10")
    pixels = [decode(folder / row["file"]) for row in rows if row is not refused]
    expected = [f"{round(decision.p_unknown, 6)}" for decision in one_after_the_other(plain, pixels)]
    assert [row["p_unknown"] for row in rows if row is not refused] == expected
    with Image.open(sheet) as page:
        assert page.size[0] > 400
    again = command("classify", folder, "--classes", "cifar10", "--model", "mini", "--out", out)
    assert again.returncode == 1
    assert "--resume" in again.stderr


def test_classify_warns_once_of_a_possible_shift(folder, tmp_path, monkeypatch):
    arguments = ("classify", folder, "--classes", "cifar10", "--model", "mini", "--json", "--out")
    steady = command(*arguments, tmp_path / "steady.csv")
    assert json.loads(steady.stdout)["possibly_shifted"] == 0
    assert "warning" not in steady.stderr
    stream = OpenSetClassifier.stream

    def shifted(classifier, images):
        for number, decision in enumerate(stream(classifier, images)):
            yield dataclasses.replace(decision, reason="possible shift" if number >= 150 else None)

    monkeypatch.setattr(OpenSetClassifier, "stream", shifted)
    run = command(*arguments, tmp_path / "shifted.csv")
    assert json.loads(run.stdout)["possibly_shifted"] == 50
    assert run.stderr.count("warning: 50 images came after a possible shift") == 1
    with (tmp_path / "shifted.csv").open(newline="") as opened:
        assert sum(row["reason"] == "possible shift" for row in csv.DictReader(opened)) == 50


def many(folder, mixed):
    """400 more images, some of which cannot be read: among them the last ones of the first checkpoint."""
    for number in range(400):
        Image.fromarray(mixed[number % 200]).save(folder / f"0{number:04d}.png", compress_level=0)
    for number in (3, 253, 254, 255, 256, 350):
        (folder / f"0{number:04d}.png").write_bytes(b"broken")


def stopped_in_the_second_checkpoint(arguments, folder, how):
    """Run the command, and stop it when it replaces its first checkpoint by the second."""
    # Whoever started the tests in the background may have had them ignore Ctrl-C.
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-m", "protodcs", *map(str, arguments)]
    environment = interrupting(folder, ".state", 2, how)
    return subprocess.run(
        command, env=environment, stderr=subprocess.DEVNULL, preexec_fn=heeding, start_new_session=True
    ).returncode


@pytest.mark.parametrize(
    ("ending", "how", "code"), [("csv", signal.SIGKILL, -signal.SIGKILL), ("jsonl", signal.SIGINT, 130)]
)
def test_classify_stopped_in_its_middle_and_resumed_gives_the_same_files(ending, how, code, folder, tmp_path, mixed):
    many(folder, mixed)
    arguments = ("classify", folder, "--classes", "cat,dog,ship", "--model", "mini")
    whole, cut = tmp_path / f"whole.{ending}", tmp_path / f"cut.{ending}"
    assert command(*arguments, "--out", whole).returncode == 0
    state = cut.with_suffix(f".{ending}.state")
    assert stopped_in_the_second_checkpoint((*arguments, "--out", cut), tmp_path, how) == code
    assert state.exists()
    assert cut.read_bytes() != whole.read_bytes()
    # A row that was being written when the lights went out, in the middle of a letter.
    with cut.open("ab") as torn:
        torn.write("half a r\u00f6w".encode()[:-2])
    other = command("classify", folder, "--classes", "cat,dog", "--model", "mini", "--out", cut, "--resume")
    assert other.returncode == 1
    assert "other classes" in other.stderr
    resumed = command(*arguments, "--out", cut, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert cut.read_bytes() == whole.read_bytes()
    assert state.read_bytes() == whole.with_suffix(f".{ending}.state").read_bytes()


def test_a_state_that_was_left_behind_is_not_taken_for_one_of_a_new_run(folder, tmp_path):
    out = tmp_path / "decisions.csv"
    arguments = ("classify", folder, "--classes", "cat,dog,ship", "--model", "mini", "--out", out)
    assert command(*arguments).returncode == 0
    first = out.read_bytes()
    out.unlink()
    assert command(*arguments, "--resume").returncode == 0
    assert out.read_bytes() == first


def test_classify_never_writes_over_a_file_of_someone_else(folder, tmp_path):
    for name in ("mine.csv", "mine.jsonl"):
        (tmp_path / name).write_text("the only copy of my thesis\n")
        run = command(
            "classify", folder, "--classes", "cat,dog", "--model", "mini", "--out", tmp_path / name, "--resume"
        )
        assert run.returncode == 1
        assert (tmp_path / name).read_text() == "the only copy of my thesis\n"


def test_file_names_that_are_no_text_are_written_on_one_line(mixed, tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    for name in (b"a\rb.png", b"n\xff.png", b'x,y"z.png', "\u00fc.png".encode(), b"=1+1.png"):
        Image.fromarray(mixed[0]).save(os.fsencode(folder) + b"/" + name, format="PNG")
    out = tmp_path / "decisions.csv"
    arguments = (
        "classify",
        folder,
        "--classes",
        "cat,dog",
        "--model",
        "mini",
        "--out",
        out,
        "--sheet",
        tmp_path / "s.png",
    )
    assert command(*arguments).returncode == 0
    assert len(out.read_text().splitlines()) == 1 + 5
    assert command(*arguments, "--resume").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "--classes", "a,b"], "no such folder"),
        (["{images}", "--classes", "cat,cat"], "'cat' stands there 2 times"),
        (["{images}", "--classes", "cat,unicorn"], "no embedding for 'unicorn'"),
        (["{images}", "--classes", "no-such-list"], "there are no names"),
        (["{images}", "--classes", "cat,dog", "--out", "x.xlsx"], "csv or .jsonl"),
        (["{images}", "--classes", "cat,dog", "--method", "magic"], "there is no method"),
        (["{images}", "--classes", "cat,dog", "--device", "cuda:7"], "cannot be used"),
        (["{images}", "--classes", "cat,dog", "--out", "{images}/notes.txt/x.csv"], "notes.txt"),
    ],
)
def test_classify_says_what_is_wrong_in_one_line(arguments, words, folder, tmp_path):
    given = [argument.format(images=folder) for argument in arguments]
    run = command("classify", *given, "--model", "mini", cwd=tmp_path)
    assert run.returncode == 1
    assert words in run.stderr
    assert "Traceback" not in run.stderr


def test_export_prints_its_proof(data_folder, tmp_path):
    pytest.importorskip("onnxruntime")
    run = command("export", "mini", tmp_path / "exported", "--classes", "cifar10", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["largest_difference"]["images"] <= 1e-4
    refused = command("export", "mini", tmp_path / "other")
    assert refused.returncode == 1
    assert "name the classes" in refused.stderr


def test_pixels_of_the_stream_are_never_changed(mini, mixed):
    before = [image.copy() for image in mixed[:40]]
    list(OpenSetClassifier.with_encoder(mini, "cifar10").stream(mixed[:40]))
    assert all(np.array_equal(a, b) for a, b in zip(before, mixed, strict=False))
