"""Features of whole sets: the same bytes on Ray, in a loop, in two stages and after any number of sudden deaths."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from protodcs import encoders
from protodcs.cli import app
from protodcs.data import open_source
from protodcs.data.corruptions import STANDARD, corrupt
from protodcs.data.streams import build
from protodcs.errors import ConfigError, DataError, EncoderError, ImageError, InputError
from protodcs.features import FeatureStore, run
from protodcs.features.job import Job, shards
from protodcs.features.on_ray import on_ray
from protodcs.features.views import Views

pytest.importorskip("torch")
ray = pytest.importorskip("ray")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def small(data_folder, tmp_path_factory):
    """The first 330 test images of CIFAR-10 and 170 of SVHN, as files of their own."""
    folder = tmp_path_factory.mktemp("small")
    for name, count in (("cifar10_test", 330), ("svhn_test", 170)):
        pq.write_table(pq.read_table(data_folder / f"{name}.parquet").slice(0, count), folder / f"{name}.parquet")
    return folder


@pytest.fixture(scope="module")
def sources(small):
    return [open_source(small / "cifar10_test.parquet"), open_source(small / "svhn_test.parquet")]


@pytest.fixture(scope="module")
def few(small, tmp_path_factory):
    """The first 30 and 20 of them: views take long."""
    folder = tmp_path_factory.mktemp("few")
    for name, count in (("cifar10_test", 30), ("svhn_test", 20)):
        pq.write_table(pq.read_table(small / f"{name}.parquet").slice(0, count), folder / f"{name}.parquet")
    return [open_source(folder / "cifar10_test.parquet"), open_source(folder / "svhn_test.parquet")]


@pytest.fixture(scope="module")
def mini(data_folder):
    return encoders.load("mini", device="cpu")


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def plan(sources, mini, tmp_path):
    """`plan(name)`: an extraction into a folder of that name, two segments with a shorter last shard each."""

    return lambda name, sources=sources, **settings: planned(tmp_path / name, sources, mini, **settings)


def planned(folder, sources, mini, **settings):
    manifest = build("whole", sources[0], [sources[1]], 0, [None, "fog"])
    return run.Extraction.planned(folder, manifest, sources, mini, **{"shard_size": 60, "batch_size": 25, **settings})


@pytest.fixture(scope="module")
def whole_folder(sources, mini, tmp_path_factory):
    """A folder with all features of `plan`, which tests copy."""
    extraction = planned(tmp_path_factory.mktemp("whole"), sources, mini)
    done(extraction)
    return extraction.folder


@pytest.fixture
def extraction(whole_folder, plan, tmp_path):
    """A finished extraction, which a test may change."""
    shutil.copytree(whole_folder, tmp_path / "loop")
    return plan("loop")


def content(folder):
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def done(extraction, how=run.in_a_loop, **options):
    finished = list(how(extraction, extraction.open(), **options))
    assert len({shard.number for shard in finished}) == len(finished)
    return content(extraction.folder)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_ray_writes_the_bytes_that_a_plain_loop_writes(plan, few, mini, cluster):
    in_a_loop = done(plan("loop"))
    assert done(plan("one stage"), on_ray) == in_a_loop
    assert done(plan("two stages"), on_ray, stages=2, workers=2) == in_a_loop
    views = {"views": Views.of(mini, CLASSES, 3)}
    assert done(plan("views, two stages", few, **views), on_ray, stages=2) == done(plan("views, loop", few, **views))
    # 330 and 170 images make 9 shards of 60 in each of the two segments.
    assert len(in_a_loop) == 18 + 2


def test_a_feature_is_that_of_its_image_under_its_corruption(extraction, sources, mini):
    store = FeatureStore(extraction.folder)
    fog = corrupt(np.stack(sources[0].read([7])), "fog", 5, source=sources[0].name, indices=[7])
    assert np.abs(store.segment(0)[7] - mini.encode_pixels(sources[0].read([7]))[0]).max() < 1e-6
    assert np.abs(store.segment(1)[7] - mini.encode_pixels(list(fog))[0]).max() < 1e-6
    assert np.abs(store.segment(1)[330 + 5] - store.segment(0)[330 + 5]).max() > 1e-3


CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def test_a_feature_of_views_is_the_mean_of_those_with_least_entropy(mini):
    views = Views.of(mini, CLASSES, 25)
    rows = np.random.default_rng(0).normal(size=(3 * 25, mini.dimension)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    averaged = views.averaged(rows)
    for image, got in zip(np.split(rows, 3), averaged, strict=True):
        doubts = []
        for row in image:
            powers = np.exp(mini.logit_scale * (mini.prototypes(CLASSES) @ row).astype(np.float64))
            shares = powers / powers.sum()
            doubts.append(-sum(share * np.log(share) for share in shares if share > 0))
        mean = (image[np.argsort(doubts)[0]] + image[np.argsort(doubts)[1]]) / 2
        assert np.abs(got - mean / np.linalg.norm(mean)).max() < 1e-6


def test_features_of_views_do_not_depend_on_batches_and_shards(plan, few, mini):
    views = Views.of(mini, CLASSES, 12)
    first, again = plan("first", few, views=views), plan("again", few, views=views, shard_size=17, batch_size=7)
    done(first)
    done(again)
    found = FeatureStore(first.folder)
    assert np.abs(found.segment(0) - FeatureStore(again.folder).segment(0)).max() < 1e-6
    # By hand, for an image of each source.
    for place, number, index in ((7, 0, 7), (30 + 5, 1, 5)):
        image = few[number].read([index])[0]
        seen = views.fitted(image, mini.preprocessing, (number, index))
        assert seen.shape == (12, *mini.preprocessing.shape)
        assert np.array_equal(seen[0], mini.preprocessing.fit(image))
        assert len({view.tobytes() for view in seen}) > 9
        assert np.abs(found.segment(0)[place] - views.averaged(mini.encode_fitted(seen))[0]).max() < 1e-6
    plain = plan("plain", few)
    done(plain)
    cosines = (found.segment(0) * FeatureStore(plain.folder).segment(0)).sum(axis=1)
    assert 0.5 < np.median(cosines) < 0.999


def test_features_of_views_are_another_job(plan, few, mini):
    jobs = [
        plan("jobs", few, views=views).job
        for views in (None, Views.of(mini, CLASSES, 4), Views.of(mini, CLASSES, 8), Views.of(mini, CLASSES[:5], 8))
    ]
    assert len({job.to_bytes() for job in jobs}) == 4
    assert len({job.encoder for job in jobs}) == 4


def test_any_stream_over_the_same_sources_is_gathered_in_its_own_order(extraction, sources):
    store = FeatureStore(extraction.folder)
    stream = build("continual", sources[0], [sources[1]], 3, ["fog"], ratio="1/4")
    features = store.gather(stream, 0)
    whole = store.segment(1)
    for place in range(0, len(stream), 17):
        own = stream.index[place] + (330 if stream.source[place] == 1 else 0)
        assert np.array_equal(features[place], whole[own])
    with pytest.raises(DataError, match="no features under snow"):
        store.gather(build("continual", sources[0], [sources[1]], 3, ["snow"]), 0)


def test_features_of_other_images_are_not_gathered(extraction, sources, small, tmp_path):
    pq.write_table(pq.read_table(small / "cifar10_test.parquet").slice(1, 329), tmp_path / "cifar10_test.parquet")
    other = build("whole", open_source(tmp_path / "cifar10_test.parquet"), [sources[1]], 0, [None])
    with pytest.raises(DataError, match="no features for 329 of the 499 images"):
        FeatureStore(extraction.folder).gather(other, 0)


def test_a_shard_names_encoder_and_manifest_and_neither_time_nor_host_nor_path(extraction, mini, tmp_path):
    import platform

    file = extraction.folder / "shards" / "000000.parquet"
    about = json.loads(pq.read_metadata(file).metadata[b"protodcs"])
    assert about["encoder"] == mini.fingerprint
    assert about["manifest"] == extraction.manifest.hash
    assert set(about) == {
        *("format", "schema", "encoder", "manifest", "shard", "first", "samples"),
        *("corruption", "severity", "sources"),
    }
    texts = [json.dumps(about), *((extraction.folder / name).read_text() for name in ("job.json", "manifest.txt"))]
    for word in (str(tmp_path), os.environ["PROTODCS_DATA"], platform.node(), time.strftime("%Y-%m-%d")):
        assert not any(word in text for text in texts)


def test_half_precision_takes_half_the_room(extraction, plan):
    whole, half = extraction, plan("half", number_type="float16")
    done(half)
    sizes = [sum(file.stat().st_size for file in (e.folder / "shards").iterdir()) for e in (whole, half)]
    assert sizes[1] < 0.6 * sizes[0]
    assert np.abs(FeatureStore(whole.folder).segment(0) - FeatureStore(half.folder).segment(0)).max() < 1e-3


def test_a_folder_of_another_job_or_a_damaged_shard_is_refused(extraction, plan, tmp_path):
    with pytest.raises(DataError, match="another job"):
        plan("loop", shard_size=61).open()
    shard = extraction.folder / "shards" / "000003.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"000003\.parquet is damaged"):
        extraction.open()
    shard.write_bytes((extraction.folder / "shards" / "000004.parquet").read_bytes())
    with pytest.raises(DataError, match="does not belong to this job"):
        extraction.open()
    shard.unlink()
    with pytest.raises(DataError, match="1 of 18 shards are missing"):
        FeatureStore(extraction.folder)
    assert [part.number for part in extraction.open()] == [3]
    done(extraction)
    assert shard.read_bytes() == whole
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(DataError, match="is not empty"):
        plan("other").open()


def test_an_encoder_that_changed_between_plan_and_work_is_refused(plan):
    extraction = plan("loop")
    forged = run.Extraction(
        extraction.folder,
        Job(**{**extraction.job.model_dump(), "encoder": "weights=0"}),
        *(getattr(extraction, name) for name in ("manifest", "sources", "model", "preprocessing")),
    )
    with pytest.raises(EncoderError, match="another encoder on this worker"):
        next(run.in_a_loop(forged, forged.open()))


def test_memory_is_bounded_by_a_batch_and_not_by_a_shard(plan, few, monkeypatch):
    extraction = plan("loop", few, shard_size=50, batch_size=10)
    largest = []
    read = extraction.sources[0].__class__.read
    monkeypatch.setattr(
        extraction.sources[0].__class__,
        "read",
        lambda self, indices: largest.append(len(indices)) or read(self, indices),
    )
    done(extraction)
    assert 1 < max(largest) <= 10


def test_settings_outside_their_range_are_refused_in_words(extraction, plan):
    for wrong in ({"side": 4}, {"number_type": "float64"}, {"shard_size": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            plan("x", **wrong)
    with pytest.raises(InputError, match="segments 0 to 1"):
        FeatureStore(extraction.folder).segment(9)


def test_a_run_killed_before_its_job_was_written_goes_on(plan):
    extraction = plan("loop")
    extraction.open()
    (extraction.folder / "job.json").unlink()
    (extraction.folder / "shards" / ".draft.tmp").touch()
    assert len(extraction.open()) == 18
    assert not (extraction.folder / "shards" / ".draft.tmp").exists()


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_what_a_worker_refuses_is_told_in_its_own_words(sources, mini, tmp_path, cluster):
    (tmp_path / "set" / "cat").mkdir(parents=True)
    (tmp_path / "set" / "cat" / "broken.png").write_bytes(b"no image")
    broken = open_source(tmp_path / "set")
    manifest = build("whole", broken, [], 0, [None])
    extraction = run.Extraction.planned(tmp_path / "out", manifest, [broken], mini)
    for stages in (1, 2):
        with pytest.raises(ImageError, match=r"broken\.png"):
            list(on_ray(extraction, extraction.open(), stages=stages))


def test_shards_cover_every_sample_once(plan):
    manifest = plan("x").manifest
    for size in (1, 7, 250, 499, 500, 501, 10_000):
        covered = np.concatenate([np.arange(part.first, part.last) for part in shards(manifest, size)])
        assert np.array_equal(covered, np.arange(len(manifest)))


# The command, killed.


def command(folder, known, corruptions, shard_size, *more):
    return [
        *(
            sys.executable,
            "-m",
            "protodcs",
            "features",
            str(folder),
            "--known",
            str(known),
            "--corruptions",
            corruptions,
        ),
        *("--model", "mini", "--shard-size", str(shard_size), "--json", *more),
    ]


def in_this_process(arguments, code=0):
    """Run a command here, where the libraries of the encoder are loaded already."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments[3:]])
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done


def killed_and_resumed(arguments, folder, moments, rng):
    """Kill the command and all it started, each time after it has added one of `moments` shards; then let it end."""
    for moment in moments:
        before = len(list(folder.glob("shards/0*")))
        child = subprocess.Popen(
            arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        while child.poll() is None and len(list(folder.glob("shards/0*"))) < before + moment:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.3)
        assert child.poll() is None, "the command ended before it could be killed"
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    last = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert last.returncode == 0, last.stderr[-2000:]
    return json.loads(last.stdout)


def test_features_killed_twice_and_resumed_are_byte_identical(small, tmp_path):
    known = small / "cifar10_test.parquet"
    # 66 shards.
    settings = (known, "fog,pixelate", 10, "--address", "none")
    in_this_process(command(tmp_path / "whole", *settings))
    arguments = command(tmp_path / "cut", *settings)
    report = killed_and_resumed(arguments, tmp_path / "cut", (1, 20), random.Random(0))
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert 0 < report["extracted"] < 2 * 330


@pytest.mark.ray
@pytest.mark.long
def test_all_of_cifar10_under_15_corruptions_killed_five_times(data_folder, tmp_path):
    rng = random.Random()
    arguments = command(tmp_path / "cut", "cifar10-test", "standard", 500)
    report = killed_and_resumed(arguments, tmp_path / "cut", [rng.randint(1, 50) for _ in range(5)], rng)
    assert report["samples"] == 150_000
    assert subprocess.run(command(tmp_path / "whole", "cifar10-test", "standard", 500), check=False).returncode == 0
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    store = FeatureStore(tmp_path / "cut")
    assert len(store.manifest.segments) == len(STANDARD)


def test_features_says_what_is_missing_in_one_line(tmp_path, data_folder):
    missing = in_this_process(command(tmp_path / "x", "imagenet-val", "clean", 10), code=1)
    assert missing.stderr.startswith("error: ")
    planned = in_this_process(command(tmp_path / "x", "cifar10-test", "standard", 1000, "--dry-run"))
    assert json.loads(planned.stdout)["shards"] == 150
    assert not (tmp_path / "x").exists()


def test_features_of_a_manifest_over_sets_that_have_no_name(small, sources, tmp_path, monkeypatch):
    build("continual", sources[0], [sources[1]], 5, ["fog"], ratio="1/5").save(tmp_path / "stream.txt")
    given = [
        "--manifest",
        str(tmp_path / "stream.txt"),
        "--unknown",
        str(small / "svhn_test.parquet"),
        "--address",
        "none",
    ]
    monkeypatch.chdir(tmp_path)
    in_this_process(command("out", small / "cifar10_test.parquet", "fog", 100, *given))
    assert FeatureStore(tmp_path / "out").manifest.protocol == "continual"
