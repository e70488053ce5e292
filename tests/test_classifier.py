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

from protodcs import OpenSetClassifier, ProtoDCSConfig, StreamDCS, StreamDCSConfig, encoders
from protodcs.cli import app
from protodcs.data import open_source
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
    return [thread for thread in threading.enumerate() if thread.name == "protodcs-prefetch"]


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
    with pytest.raises(ConfigError, match="The classes are missing"):
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


def test_a_collection_is_classified_without_regard_to_its_order(mini, mixed):
    sorted_by_kind = [*mixed[::2], *mixed[1::2]]
    classifier = OpenSetClassifier.with_encoder(mini, "cifar10")
    known = classifier.classify(mixed).known
    assert classifier.engine.sequence == 200
    again = OpenSetClassifier.with_encoder(mini, "cifar10").classify(iter(sorted_by_kind)).known
    assert np.concatenate([known[::2], known[1::2]]).tolist() == again.tolist()
    assert (~known[1::2]).sum() >= 90
    assert (~known[::2]).sum() <= 10
    assert len(OpenSetClassifier.with_encoder(mini, "cifar10").classify([])) == 0


def test_a_damaged_image_in_a_collection_raises_and_nothing_is_learned(mini, mixed):
    classifier = OpenSetClassifier.with_encoder(mini, "cifar10")
    with pytest.raises(ImageError, match="image 40 of the stream"):
        classifier.classify([*mixed[:40], b"no image", *mixed[41:]])
    assert classifier.engine.sequence == 0


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


def table(file):
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_classify_writes_a_row_for_every_image_and_a_sheet_of_unknown_images(folder, tmp_path, mini):
    out, sheet = tmp_path / "out" / "decisions.csv", tmp_path / "sheet.png"
    arguments = ("classify", folder, "--classes", "cifar10", "--model", "mini", "--out", out, "--json")
    run = command(*arguments, "--sheet", sheet)
    assert run.returncode == 0, run.stderr
    report, rows = json.loads(run.stdout), table(out)
    assert [row["file"] for row in rows] == sorted(row["file"] for row in rows)
    assert len(rows) == report["images"] == 201
    assert report["unreadable"] == 1
    assert report["known"] + report["unknown"] == 200
    assert sum(row["known"] == "False" for row in rows) == report["unknown"] > 20
    assert report["diagnosis"]["two_groups"]
    assert report["diagnosis"]["images"] == 200
    (unreadable,) = (row for row in rows if row["error"])
    assert unreadable["file"] == "005-broken.jpg"
    readable = [row for row in rows if row is not unreadable]
    expected = OpenSetClassifier.with_encoder(mini, "cifar10").classify(folder / row["file"] for row in readable)
    assert [row["known"] == "True" for row in readable] == expected.known.tolist()
    assert [row["nearest_class"] for row in readable] == [expected.classes[index] for index in expected.index]
    with Image.open(sheet) as page:
        assert page.size[0] > 400
    assert {file.name for file in out.parent.iterdir()} == {"decisions.csv", "decisions.csv.state"}
    assert OpenSetClassifier.restored(mini, out.with_suffix(".csv.state")).engine.sequence == 200
    again = command(*arguments)
    assert again.returncode == 1
    assert "exists already" in again.stderr


@pytest.mark.parametrize("sorted_by_kind", [False, True])
def test_classify_finds_digits_among_objects_in_any_order_of_files(sorted_by_kind, data_folder, tmp_path):
    for kind, name in (("object", "cifar10-test"), ("digit", "svhn-test")):
        for number, image in enumerate(open_source(name).read(range(200))):
            file = f"{kind}-{number:03d}.png" if sorted_by_kind else f"{number:03d}-{kind}.png"
            Image.fromarray(image).save(tmp_path / file)
    out = tmp_path / "decisions.csv"
    assert command("classify", tmp_path, "--classes", "cifar10", "--model", "mini", "--out", out).returncode == 0
    unknown = [row["file"] for row in table(out) if row["known"] == "False"]
    assert sum("digit" in file for file in unknown) >= 185
    assert sum("object" in file for file in unknown) <= 5


def test_classify_says_what_it_can_and_cannot_decide(folder, tmp_path):
    out = tmp_path / "decisions.csv"
    run = command("classify", folder, "--classes", "cifar10", "--model", "mini", "--out", out)
    printed = " ".join(run.stdout.split())
    assert "- The scores show two groups" in printed
    assert "If a class were missing from your list, about" in printed
    assert "`protodcs review` asks about the most doubtful decisions." in printed
    two = command("classify", folder, "--classes", "cat,dog", "--vocabulary", "none", "--model", "mini", "--out",
                  tmp_path / "two.csv")  # fmt: skip
    assert "2 classes and no vocabulary" in " ".join(two.stdout.split())


def test_classify_warns_if_there_are_few_images(mixed, tmp_path):
    for number, image in enumerate(mixed[:20]):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    run = command("classify", tmp_path, "--classes", "cifar10", "--model", "mini", "--out", tmp_path / "few.csv")
    assert run.returncode == 0
    assert "only 20 images" in run.stdout
    assert "Too close" not in run.stdout


STOPPED = """
import os, sys
from protodcs.cli import app
from protodcs.encoders.base import Encoder

encode, batches = Encoder.encode_fitted, 0

def stopped(encoder, images):
    global batches
    batches += 1
    if batches == 5:
        os.kill(os.getpid(), {how})
    return encode(encoder, images)

Encoder.encode_fitted = stopped
app()
"""


@pytest.mark.parametrize(
    ("ending", "how", "code"), [("csv", signal.SIGKILL, -signal.SIGKILL), ("jsonl", signal.SIGINT, 130)]
)
def test_classify_stopped_in_its_middle_and_started_again_gives_the_same_files(
    ending, how, code, folder, tmp_path, monkeypatch
):
    arguments = ("classify", folder, "--classes", "cat,dog,ship", "--model", "mini", "--out")
    whole, cut = tmp_path / f"whole.{ending}", tmp_path / f"cut.{ending}"
    assert command(*arguments, whole).returncode == 0
    # Whoever started the tests in the background may have had them ignore Ctrl-C.
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    program = [sys.executable, "-c", STOPPED.format(how=int(how)), *map(str, (*arguments, cut))]
    assert subprocess.run(program, stderr=subprocess.DEVNULL, preexec_fn=heeding).returncode == code
    assert not cut.exists()
    encoded = []
    encode = encoders.Encoder.encode_fitted
    monkeypatch.setattr(
        encoders.Encoder, "encode_fitted", lambda self, images: encoded.append(len(images)) or encode(self, images)
    )
    assert command(*arguments, cut).returncode == 0
    assert 40 <= sum(encoded) <= 168
    for ends in ("", ".state"):
        files = (file.with_name(file.name + ends) for file in (cut, whole))
        assert len({file.read_bytes() for file in files}) == 1
    assert not list(tmp_path.glob("*.features*"))


def test_classify_never_writes_over_a_file_of_someone_else(folder, tmp_path):
    for name in ("mine.csv", "mine.jsonl", "mine.csv.features"):
        (tmp_path / name).write_text("the only copy of my thesis\n")
    for name in ("mine.csv", "mine.jsonl"):
        run = command("classify", folder, "--classes", "cat,dog", "--model", "mini", "--out", tmp_path / name)
        assert run.returncode == 1
    (tmp_path / "mine.csv").unlink()
    run = command("classify", folder, "--classes", "cat,dog", "--model", "mini", "--out", tmp_path / "mine.csv")
    assert run.returncode == 1
    assert "mine.csv.features: the features cannot be stored" in run.stderr
    for name in ("mine.jsonl", "mine.csv.features"):
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "--classes", "a,b"], "There is no folder"),
        (["{images}", "--classes", "cat,cat"], "'cat' occurs 2 times"),
        (["{images}", "--classes", "cat,unicorn"], "no embedding for 'unicorn'"),
        (["{images}", "--classes", "no-such-list"], "no file and no list of class names"),
        (["{images}", "--classes", "cat,dog", "--out", "x.xlsx"], ".csv, .jsonl or .parquet"),
        (["{images}", "--classes", "cat,dog", "--method", "magic"], "There is no method"),
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


def test_pixels_of_the_stream_are_never_changed(mini, mixed):
    before = [image.copy() for image in mixed[:40]]
    list(OpenSetClassifier.with_encoder(mini, "cifar10").stream(mixed[:40]))
    assert all(np.array_equal(a, b) for a, b in zip(before, mixed, strict=False))
