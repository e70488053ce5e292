"""Warnings: a rise of unknown samples and a shift of the images are told once, and stay until they are over."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protodcs.errors import StoreError
from protodcs.serve.log.latest import BLOCK, LATEST, Latest

SHIFT = "possible shift"


class Camera:
    """Decisions about images of one camera, and what the rule said of them."""

    def __init__(self, seed=0, dimension=32):
        self.latest, self.begun, self.seen = Latest(), [], 0
        self._random = np.random.default_rng(seed)
        self._mean = self._random.normal(size=dimension)

    def sees(self, count, share, run=1, fog=0.0, reason=None):
        """Decide on some samples, of which a share is unknown; return the warning that is shown then."""
        left, unknown = 0, False
        for _ in range(count):
            if left == 0:
                left, unknown = run, bool(self._random.random() < share)
            left -= 1
            feature = self._mean + self._random.normal(size=len(self._mean)) + fog * np.eye(len(self._mean))[0]
            unit = (feature / np.linalg.norm(feature)).astype(np.float32)
            self.begun += [
                (self.seen, begun["warning"]) for _, begun in self.latest.add([unknown], [reason], unit[None])
            ]
            self.seen += 1
        return self.latest.warning


@pytest.mark.parametrize("usual", [0.0, 0.01, 0.15])
def test_a_rise_is_told_once_and_stays_until_it_is_over(usual):
    camera = Camera()
    assert camera.latest.unknown_rate is camera.latest.usual_unknown_rate is None
    assert camera.sees(1000, usual) is None
    before = camera.latest.usual_unknown_rate
    assert before == pytest.approx(usual, abs=0.05)
    assert camera.sees(2000, 0.5) == "many_unknown"
    assert camera.latest.usual_unknown_rate == pytest.approx(before, abs=0.02)
    ((position, name),) = camera.begun
    assert (name, position < 1000 + 6 * BLOCK) == ("many_unknown", True)
    assert camera.sees(12 * BLOCK, usual) is None
    assert camera.sees(500, 0.5) == "many_unknown"
    assert len(camera.begun) == 2


def test_a_rise_that_lasts_thousands_of_samples_becomes_usual():
    camera = Camera()
    camera.sees(1000, 0.05)
    camera.sees(5000, 0.5)
    assert camera.latest.warning is None
    assert camera.latest.usual_unknown_rate == pytest.approx(0.5, abs=0.1)
    assert len(camera.begun) == 1


def test_a_rise_that_is_acknowledged_becomes_usual_at_once():
    camera = Camera()
    camera.sees(1000, 0.05)
    camera.sees(500, 0.4)
    camera.latest.take_as_usual()
    assert camera.latest.warning is None
    assert camera.latest.usual_unknown_rate == pytest.approx(0.4, abs=0.1)
    assert camera.sees(2000, 0.4) is None
    assert camera.sees(500, 0.9) == "many_unknown"


def test_100000_usual_samples_give_no_warning():
    camera = Camera()
    camera.sees(100_000, 0.08)
    assert camera.begun == []
    assert camera.latest.usual_unknown_rate == pytest.approx(0.08, abs=0.02)
    assert len(camera.latest.pack()) < 900


def test_unknown_samples_in_short_runs_give_no_warning():
    assert [Camera(seed).sees(5000, 0.05, run=8) for seed in range(10)] == [None] * 10


@pytest.mark.parametrize("run", [1, 3, 8])
def test_a_rise_is_found_in_runs_too_and_stays(run):
    for seed in range(10):
        camera = Camera(seed)
        assert camera.sees(1500, 0.05, run=run) is None
        assert camera.sees(800, 0.5, run=run) == "many_unknown"


def test_a_stream_that_begins_with_mostly_unknown_samples_is_told():
    assert Camera().sees(300, 0.9) == "many_unknown"
    assert Camera().sees(300, 0.3) is None


def test_fog_on_known_images_is_a_shift_until_it_is_gone():
    camera = Camera()
    camera.sees(1000, 0.05)
    assert camera.sees(3 * BLOCK, 0.05, fog=3.0) == "possible_shift"
    assert camera.sees(1000, 0.05, fog=3.0) == "possible_shift"
    assert camera.sees(1000, 0.05) is None
    assert [name for _, name in camera.begun] == ["possible_shift"]


def test_the_engine_says_whether_nearly_all_are_unknown_because_of_a_shift():
    for reason, warning in ((None, "many_unknown"), (SHIFT, "possible_shift")):
        camera = Camera()
        camera.sees(1000, 0.05)
        assert camera.sees(6 * BLOCK, 0.95, reason=reason) == warning
    assert Camera().sees(1000, 0.05, reason=SHIFT) is None


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.sampled_from([0.0, 0.05, 0.9]), st.sampled_from([0.0, 3.0])), max_size=6)
)
def test_a_stream_that_was_unloaded_says_the_same(steps):
    never, unloaded = Camera(), Camera()
    for count, share, fog in steps:
        packed = unloaded.latest.pack()
        unloaded.latest = Latest()
        unloaded.latest.load(packed)
        assert never.sees(count, share, fog=fog) == unloaded.sees(count, share, fog=fog)
        assert never.latest.unknown_rate == unloaded.latest.unknown_rate
    assert never.begun == unloaded.begun
    assert never.latest.pack() == unloaded.latest.pack()


@pytest.mark.parametrize("cut", [0, 10, 100, -1])
def test_damaged_bytes_are_an_error(cut):
    camera = Camera()
    camera.sees(LATEST, 0.5)
    with pytest.raises(StoreError, match="cannot be read"):
        Latest().load(camera.latest.pack()[:cut])


def test_surges_and_fog_are_found_among_cameras(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    scene = importlib.import_module("benchmarks.scene")
    usual, surge, fog, *_ = scene.measure(split="tune", seed=1, cameras={"usual": 12, "surge": 3, "fog": 4})
    assert (usual["before"], usual["after"]) == (0, 0)
    assert surge["at_the_end"] == 3
    assert fog["at_the_end"] >= 3
