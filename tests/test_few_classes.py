"""StreamDCS on streams like those of users: two to twelve classes, any share of unknown images, real CLIP features."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from protodcs import StreamDCS
from protodcs.bench import user_streams
from protodcs.core.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def vocabulary(data_folder):
    return Vocabulary(load_file(data_folder / "clip_vitb32_negatives.safetensors")["text"])


def decided(stream, vocabulary):
    """Return the fraction of the known images that are rejected, and of the unknown ones that are found."""
    known = StreamDCS(stream.prototypes, vocabulary=vocabulary).observe_many(stream.features).known
    unknown = stream.labels < 0
    return (~known[~unknown]).mean(), (~known[unknown]).mean() if unknown.any() else None


@pytest.mark.parametrize("order", [{}, {"tail": True}, {"run": 8}], ids=["shuffled", "tail", "runs"])
@pytest.mark.parametrize("share", ["1/50", "1/10", "1/2", "9/10"])
@pytest.mark.parametrize(
    ("family", "unknown"), [("catdog", "near"), ("catdog", "sun"), ("pets", "objects"), ("wild", "ucf")]
)
def test_unknown_images_are_found_at_every_share_and_in_every_order(family, unknown, share, order, vocabulary):
    rejected, found = decided(user_streams.stream(family, unknown, share, 0, "tune", **order), vocabulary)
    assert rejected < 0.12
    assert found > 0.75


@pytest.mark.parametrize("named", [True, False], ids=["with a vocabulary", "without"])
@pytest.mark.parametrize("family", ["catdog", "pets", "wild"])
def test_a_stream_without_unknown_images_loses_about_the_target(family, named, vocabulary):
    stream = user_streams.stream(family, "near", "0", 0, "tune")
    rejected, _ = decided(stream, vocabulary if named else None)
    assert 0.01 < rejected < 0.09


@pytest.mark.parametrize("unknown", ["sun", "ucf", "objects"])
@pytest.mark.parametrize("family", ["catdog", "pets", "wild"])
def test_a_stream_of_unknown_images_alone_is_called_unknown(family, unknown, vocabulary):
    stream = user_streams.stream(family, unknown, "1/2", 0, "tune")
    only = stream.features[stream.labels < 0]
    known = StreamDCS(stream.prototypes, vocabulary=vocabulary).observe_many(only).known
    assert (~known).mean() > 0.8


def test_the_first_images_are_decided_by_their_lead_over_the_names(vocabulary):
    stream = user_streams.stream("catdog", "sun", "1/2", 0, "tune")
    known = StreamDCS(stream.prototypes, vocabulary=vocabulary).observe_many(stream.features[:16]).known
    assert (known == (stream.labels[:16] >= 0)).mean() > 0.8


@pytest.mark.parametrize("family", ["catdog", "wild"])
def test_a_burst_of_unknown_images_is_found(family, vocabulary):
    stream = user_streams.stream(family, "sun", "1/2", 0, "tune")
    inside, outside = (stream.features[rows] for rows in (stream.labels >= 0, stream.labels < 0))
    engine = StreamDCS(stream.prototypes, vocabulary=vocabulary)
    engine.observe_many(inside[:300])
    assert (~engine.observe_many(outside[:600]).known).mean() > 0.8
    assert engine.observe_many(inside[300:]).known.mean() > 0.85


@pytest.mark.long
def test_decisions_stay_right_for_100000_images(vocabulary):
    stream = user_streams.stream("catdog", "sun", "1/20", 0, "tune")
    engine, rng = StreamDCS(stream.prototypes, vocabulary=vocabulary), np.random.default_rng(0)
    for _ in range(100_000 // len(stream.labels)):
        order = rng.permutation(len(stream.labels))
        known, unknown = engine.observe_many(stream.features[order]).known, stream.labels[order] < 0
    assert (~known[~unknown]).mean() < 0.09
    assert (~known[unknown]).mean() > 0.9
    restored = StreamDCS.restore(engine.snapshot(), vocabulary=vocabulary)
    assert restored.snapshot() == engine.snapshot()
