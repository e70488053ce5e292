import asyncio
import gc
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from script_modules import load_file
from small_disk import mount, unmount
from virtual_time import VirtualClock

# Processes that tests start find the helpers in this folder too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("ci")


ROOT = Path(__file__).parent.parent

# CI runs the tests in three lanes, and each can run alone: `pytest --lane core`.
LANES = ("core", "service", "browser-docs")
BROWSER_DOCS = {
    "test_documentation.py",
    "test_documented_figures.py",
    "test_reference_pages.py",
    "test_reproduction.py",
    "test_ui.py",
}
SERVICE = re.compile(
    r"protodcs\.(client|serve)\b|\bClient\b|^from (made_service|service|served_over_http|test_service_app)\b",
    re.MULTILINE,
)


def lane_of(file):
    """Return the lane of a test file or a module with doctests."""
    if file.name in BROWSER_DOCS:
        return "browser-docs"
    folders = file.relative_to(ROOT).parts[:-1]
    return "service" if {"client", "serve"} & {*folders} or SERVICE.search(file.read_text()) else "core"


class OneLane:
    """Ignore the files of other lanes before they are imported."""

    def __init__(self, name):
        self.name = name

    def pytest_ignore_collect(self, collection_path):
        return True if collection_path.suffix == ".py" and lane_of(collection_path) != self.name else None


def pytest_addoption(parser):
    parser.addoption("--lane", choices=LANES, help="run the tests of one lane of CI (default: all)")


def pytest_configure(config):
    if lane := config.getoption("--lane"):
        config.pluginmanager.register(OneLane(lane))


def pytest_collection_modifyitems(items):
    """Put tests that start Ray first, so that two clusters never compete for the machine.

    With `--dist worksteal` the first half of the tests goes to the first worker, and others take from its end.
    """
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import everything without garbage collections, and leave its objects out of later ones.

    Garbage collections would take one or two seconds of the imports, and half a second each later.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def anyio_backend():
    """Run the tests that are coroutines in an event loop of asyncio, each in its own."""
    return "asyncio"


@pytest.fixture
async def store(request, tmp_path):
    """An empty store, for tests that `of_stores` in store_contract.py marks."""
    from store_contract import opened

    async with opened(request.param, tmp_path) as store:
        yield store


def _data() -> Path | None:
    folder = os.environ.get("PROTODCS_DATA")
    return Path(folder) if folder and Path(folder).is_dir() else None


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real test data; tests that need it are skipped where it is absent."""
    folder = _data()
    if folder is None:
        pytest.skip("PROTODCS_DATA does not name the folder of the test data")
    return folder


@pytest.fixture(scope="session")
def clip_stream(data_folder):
    """`clip_stream(name)`: text prototypes, features and labels of a real CLIP stream."""
    return load_file(data_folder.parent / "tools" / "clip_streams.py").stream


@pytest.fixture(scope="session")
def user_stream(data_folder):
    """`user_stream(family)`: text prototypes, features and labels of a real stream with few classes."""
    return load_file(data_folder.parent / "tools" / "user_streams.py").stream


@pytest.fixture
def png_files(data_folder):
    """`png_files(count)`: the first images of the test set of CIFAR-10 as PNG files."""
    from PIL import Image

    from hostile_images import saved
    from protodcs.data import open_source

    def files(count):
        return [saved(Image.fromarray(pixels), "PNG") for pixels in open_source("cifar10-test").read(range(count))]

    return files


@pytest.fixture
def virtual_time(monkeypatch) -> VirtualClock:
    """Run event loops and `time.monotonic` in virtual time, in which sleeping takes no real time.

    Use it for tests without sockets and subprocesses: those take real time, and timers would not wait for them.
    """
    clock = VirtualClock()
    monkeypatch.setattr(asyncio.events, "new_event_loop", clock.new_event_loop)
    monkeypatch.setattr(time, "monotonic", clock.time)
    return clock


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own of 2 MiB, which is soon full."""
    yield from mounted_disk(tmp_path / "small", "2m")


@pytest.fixture
def disk_of_24_mb(tmp_path):
    """A file system of its own of 24 MiB."""
    yield from mounted_disk(tmp_path / "disk", "24m")


def mounted_disk(folder, size):
    """Yield a folder with a file system of its own; skip the test if it cannot be mounted."""
    folder.mkdir()
    mount(folder, size)
    yield folder
    unmount(folder)


def unit(rows):
    """Rows of length one, in float64."""
    rows = np.asarray(rows, dtype=np.float64)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def clusters(classes=10, width=64, samples=1500, unknown=0.5, seed=0, noise=0.15):
    """Return prototypes, features and labels of well separated clusters; label -1 is unknown."""
    rng = np.random.default_rng(seed)
    centres = np.linalg.qr(rng.normal(size=(width, classes + 3)))[0].T
    labels = np.where(rng.random(samples) < unknown, -1, rng.integers(classes, size=samples))
    strange = classes + rng.integers(3, size=samples)
    content = centres[np.where(labels < 0, strange, labels)]
    features = unit(content + noise * rng.normal(size=(samples, width)))
    return centres[:classes], features, labels


def random_stream(classes=7, width=32, samples=300, seed=0, unknown=0.4):
    """A stream shaped like CLIP's: texts in one narrow cone, images in another, classes a little apart in both."""
    rng = np.random.default_rng(seed)

    def directions(count):
        rows = rng.normal(size=(count, width))
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    text_cone, image_cone = directions(2)
    known, strange = directions(classes), directions(5)
    labels = np.where(rng.random(samples) < unknown, -1, rng.integers(classes, size=samples))
    content = np.where(labels[:, None] < 0, strange[rng.integers(5, size=samples)], known[labels])
    prototypes = text_cone + 0.5 * known
    features = image_cone + 0.3 * text_cone + 0.3 * content + 0.3 * directions(samples)
    return prototypes.astype(np.float32), features.astype(np.float32), labels
