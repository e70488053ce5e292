"""The demo world: drawn images, shifts, streams, the encoder and the command."""

import signal
import subprocess
import sys
import time
from urllib.parse import parse_qs

import httpx
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from ports import free_port
from protodcs import Client, OpenSetClassifier, encoders, metrics
from protodcs.cli import app
from protodcs.data.prompts import class_names
from protodcs.demo import EXTRA, KNOWN, SHIFTS, UNKNOWN, DemoStream, draw, shifted
from protodcs.demo.comparison import Comparison
from protodcs.demo.terminal import view
from protodcs.encoders.demo import FOLDER
from protodcs.errors import EncoderError, InputError

# Images.


def test_each_kind_is_drawn_and_no_two_lists_share_a_kind():
    kinds = KNOWN + UNKNOWN + EXTRA
    assert len(set(kinds)) == len(kinds) == 46
    images = {draw(kind, np.random.default_rng(3)).tobytes() for kind in kinds}
    assert len(images) == len(kinds)


def test_the_class_list_named_demo_holds_the_known_kinds():
    assert class_names("demo") == KNOWN


def test_an_image_depends_on_kind_and_generator_alone():
    first, again, other = (draw("cat", np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.shape == (96, 96, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_colour_of_an_object_can_be_chosen():
    red, blue = (
        np.mean([draw("heart", np.random.default_rng(seed), colour) for seed in range(20)], axis=(0, 1, 2))
        for colour in ("red", "blue")
    )
    assert red[0] > blue[0]
    assert red[2] < blue[2]


def test_unknown_names_are_errors():
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="'unicorn'"):
        draw("unicorn", rng)
    with pytest.raises(InputError, match="'beige'"):
        draw("cat", rng, "beige")
    with pytest.raises(InputError, match="'rain'"):
        shifted(draw("cat", rng), "rain", rng)


def test_each_shift_changes_the_image_as_its_name_says():
    image = draw("house", np.random.default_rng(0)).astype(float)
    changed = {
        shift: shifted(image.astype(np.uint8), shift, np.random.default_rng(1)).astype(float) for shift in SHIFTS
    }

    def roughness(pixels):
        return np.abs(np.diff(pixels, axis=0)).mean()

    assert np.array_equal(changed["clean"], image)
    assert changed["fog"].std() < 0.7 * image.std()
    assert changed["fog"].mean() > image.mean()
    assert roughness(changed["noise"]) > 2 * roughness(image)
    assert roughness(changed["blur"]) < 0.6 * roughness(image)
    assert changed["darkness"].mean() < 0.5 * image.mean()
    assert np.abs(changed["camera"] - image).mean() > 10


# Streams.


def test_a_stream_is_the_same_each_time_in_any_order():
    options = {"unknown": 0.3, "shifts": ("clean", "noise"), "shift_length": 3, "seed": 5}
    first, second = list(DemoStream(12, **options)), DemoStream(12, **options)
    for place in reversed(range(12)):
        assert np.array_equal(first[place].image, second[place].image)
        assert (first[place].kind, first[place].label) == (second[place].kind, second[place].label)
    assert not np.array_equal(first[0].image, DemoStream(12, **{**options, "seed": 6})[0].image)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_a_stream_has_the_chosen_share_of_unknown_images(share):
    stream = DemoStream(200, unknown=share)
    assert np.mean(stream.labels < 0) == share
    for place in range(0, 200, 40):
        sample = stream[place]
        assert sample.kind in UNKNOWN if sample.label < 0 else sample.kind == KNOWN[sample.label]


def test_unknown_images_come_in_bursts():
    unknown = DemoStream(400, unknown=0.25, burst=20, seed=1).labels < 0
    edges = np.flatnonzero(np.diff(np.concatenate([[0], unknown.astype(int), [0]])))
    lengths = edges[1::2] - edges[::2]
    assert lengths.sum() == 100
    assert set(lengths % 20) == {0}


def test_shifts_recur():
    stream = DemoStream(60, shifts=("clean", "fog"), shift_length=10)
    assert [stream[place].shift for place in range(0, 60, 10)] == ["clean", "fog"] * 3
    assert [DemoStream(60, shifts=("blur", "fog"))[place].shift for place in (29, 30)] == ["blur", "fog"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "at least 1"),
        ({"unknown": 1.5}, "between 0 and 1; given: 1.5"),
        ({"burst": 0}, "at least 1"),
        ({"shift_length": 0}, "at least 1"),
        ({"shifts": ("rain",)}, "rain"),
        ({"shifts": ()}, "some of"),
    ],
)
def test_bad_arguments_of_a_stream_are_errors(options, message):
    with pytest.raises(InputError, match=message):
        DemoStream(**{"length": 10, **options})


def test_a_place_outside_the_stream_is_an_error():
    with pytest.raises(IndexError, match="10 images"):
        DemoStream(10)[10]


# The encoder.


@pytest.fixture(scope="module")
def encoder():
    pytest.importorskip("onnxruntime")
    return encoders.load("demo")


def accuracy(encoder, shift, count=300):
    rng = np.random.default_rng(12)
    labels = np.arange(count) % len(KNOWN)
    images = [shifted(draw(KNOWN[label], rng), shift, rng) for label in labels]
    return np.mean((encoder.encode(images) @ encoder.prototypes(KNOWN).T).argmax(axis=1) == labels)


def test_the_encoder_is_right_on_clean_images_and_less_often_under_shifts(encoder):
    clean = accuracy(encoder, "clean")
    assert clean >= 0.97
    assert max(accuracy(encoder, shift) for shift in SHIFTS if shift != "clean") < clean - 0.02


def test_the_encoder_takes_any_string_as_a_class_name(encoder):
    rows = encoder.prototypes(["cat", "black cat", "émigré 7", "!", "猫"])
    assert np.all(np.isfinite(rows))
    assert rows[0] @ rows[1] > rows[0] @ rows[2]
    assert np.allclose(encoder.encode_texts(["", "a photo of a cat."])[1], rows[0], atol=1e-6)


def test_the_encoder_is_small():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 3_000_000


def test_the_encoder_has_one_name():
    with pytest.raises(EncoderError, match="'demo:other'"):
        encoders.load("demo:other")


def test_the_encoder_finds_some_unknown_images(encoder):
    stream = DemoStream(400, unknown=0.25, seed=9)
    decisions = OpenSetClassifier.with_encoder(encoder, "demo").classify(sample.image for sample in stream)
    assert metrics.auroc(decisions.score[stream.labels >= 0], decisions.score[stream.labels < 0]) > 0.8
    assert metrics.false_reject(stream.labels, decisions.known) < 0.15


# The command.


def test_the_demo_runs_in_the_terminal_and_writes_a_picture(tmp_path):
    out = tmp_path / "new" / "demo.png"
    done = CliRunner().invoke(app, ["demo", "--terminal", "--images", "60", "--out", str(out)])
    assert done.exit_code == 0, done.output
    for text in ("image 60 of 60", "correct decisions", "unknown found", "false rejects", "threshold"):
        assert text in done.output
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_view_fits_into_a_small_terminal():
    comparison = Comparison(DemoStream(60, unknown=0.3))
    last = list(comparison)[-1]
    lines = Console(width=80, height=24).render_lines(view(comparison, last))
    assert len(lines) <= 23
    assert "▀" in "".join(segment.text for line in lines for segment in line)


def test_the_counts_are_those_of_the_decisions():
    comparison = Comparison(DemoStream(80, unknown=0.25))
    steps = list(comparison)
    assert (comparison.counts.known, comparison.counts.unknown) == (60, 20)
    assert comparison.counts.found == sum(step.sample.label < 0 and not step.decision.known for step in steps)
    assert comparison.frozen_counts.false_rejects == sum(
        step.sample.label >= 0 and not step.frozen.known for step in steps
    )
    correct = [step.frozen.label == (step.sample.kind if step.sample.label >= 0 else None) for step in steps]
    assert comparison.frozen_counts.accuracy == np.mean(correct)


def test_the_demo_writes_a_folder_that_can_be_classified_and_evaluated(tmp_path):
    folder, out = tmp_path / "pictures", tmp_path / "decisions.csv"
    assert CliRunner().invoke(app, ["demo", "--folder", str(folder), "--images", "60"]).exit_code == 0
    assert len(list((folder / "unknown").glob("*.png"))) == 18
    given = ["classify", str(folder), "--model", "demo", "--classes", "demo", "--out", str(out)]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert len(out.read_text().splitlines()) == 61
    again = CliRunner().invoke(app, ["demo", "--folder", str(folder)])
    assert again.exit_code == 1
    assert "exists already" in again.output


def test_the_demo_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("protodcs.cli.live.find_spec", lambda name: None if name == "onnxruntime" else object())
    done = CliRunner().invoke(app, ["demo", "--terminal"])
    assert done.exit_code == 1
    assert "this needs onnxruntime: run pip install 'protodcs[demo]'" in done.output


def test_the_demo_serves_a_page_on_which_decisions_appear(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "protodcs", "demo", "--no-browser", "--port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        page = process.stdout.readline().strip()
        service = page.partition("/ui/")[0]
        assert page.endswith("/ui/#/streams/demo/demo")
        assert httpx.get(f"{service}/ui/").status_code == 200
        with Client(service) as client:
            # The page is shown when its stream exists. Otherwise it would say that there is none.
            assert client.streams() == ["demo"]
            while client.stream("demo").status()["sequence"] < 3:
                assert process.poll() is None
                time.sleep(0.05)
            (newest,) = httpx.get(f"{service}/v1/streams/demo/decisions?limit=1").json()["items"]
            told = parse_qs(newest["image_ref"].removeprefix("demo?"), keep_blank_values=True)
            assert told["truth"][0] in KNOWN + UNKNOWN
            assert (told["images"], told["shift"], told["next"]) == (["1200"], ["clean"], ["fog"])
            assert int(told["place"][0]) + int(told["left"][0]) == 400
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    assert not list(tmp_path.iterdir())
