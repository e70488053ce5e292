"""Streams as data: the same bytes everywhere, layouts as promised, damaged files refused in words."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from fractions import Fraction
from itertools import permutations
from math import comb, lgamma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protodcs.data.source import ImageSource
from protodcs.data.streams import Manifest, Origin, Segment, build, header, listing, order, protocols, summary
from protodcs.data.streams.protocols import bursty, correlated
from protodcs.data.streams.summary import run_lengths
from protodcs.errors import ConfigError, DataError

ANIMALS = ("cat", "dog", "owl", "fish", "horse")


class Images:
    """Labels without images: all that a manifest looks at."""

    def __init__(self, name, labels, classes=()):
        self.name = name
        self.classes = tuple(classes)
        self._labels = np.asarray(labels, dtype=np.int64)

    def __len__(self):
        return len(self._labels)

    @property
    def labels(self):
        return self._labels

    @property
    def fingerprint(self):
        return hashlib.sha256(f"{self.name} {self._labels.tolist()}".encode()).hexdigest()

    def read(self, indices):
        raise AssertionError("a manifest is made without looking at an image")


KNOWN = Images("animals", [7 * i * i % 5 for i in range(60)], ANIMALS)
UNKNOWN = Images("digits", [i % 10 for i in range(90)], "0123456789")
MORE = Images("textures", [-1] * 30)
TWO = ("fog", "snow")


def small(protocol, seed=0, **options):
    options.setdefault("corruptions", TWO)
    return build(protocol, KNOWN, UNKNOWN, seed, **options)


def rows(manifest):
    return np.stack([manifest.source, manifest.index, manifest.label], axis=1)


def rebuilt(manifest, **changes):
    """The same manifest with other content, past the builder."""
    fields = ("protocol", "options", "seed", "classes", "sources", "segments", "source", "index", "label")
    return Manifest(**{name: getattr(manifest, name) for name in fields} | changes)


# ---- the same bytes on any machine

CASES = {
    "continual": {},
    "reset": {"ratio": "1/3", "total": 30},
    "unient": {"batch": 20},
    "stamp-4to1": {},
    "correlated": {"concentration": "1/100"},
    "bursty": {"mean_burst": "9/2"},
    "no-unknown": {"severity": 0, "corruptions": None},
    "all-unknown": {"unknown_count": 25, "family": "cifar", "variant": "fixed", "severity": 3},
    "whole": {},
}
# SHA-256 of whole manifests. A change here means that every stream ever published has changed.
GOLDEN = {
    "continual": "78c750d5cedbc4b74e3197f28c6ed4786773e805362d29e1369817dad3b310a5",
    "reset": "4f089d6f38140d002ab6719cb29f9c4bfcbc347d4b3ecfbcbae660c6e858484b",
    "unient": "cf5da5e676248e9ea4931ac6c9e94d89f5c0c3964913acf346f248d4832a5f09",
    "stamp-4to1": "97456b6270a59045c84fe3d3c14f6662f1f1e9a4ee792b8f979d6fa60d467e0e",
    "correlated": "6012dbd958770cc282e117b80d81604bd8773845c2ade8936033c4440ccfa240",
    "bursty": "867937aa1a92d6f31f08a47a75d60c199273387ed663274ffdf9e78f6548dd50",
    "no-unknown": "e3e1eba8c0c572369c7744494a5a8767bacf89dd6614c4b25ab35aa081869040",
    "all-unknown": "6096a3064e24269b2c1cf1b895f703d5c940d1de8187f1fe821f57033517504e",
    "whole": "35fc45236b9079c5e4514b763b42ad466208c9bcb311f79926573a9b2e7c824b",
}


NOTHING_DRAWN = {"unient", "whole"}


def golden_hashes():
    return {protocol: small(protocol, seed=7, **options).hash for protocol, options in CASES.items()}


def test_every_protocol_has_a_golden_manifest():
    assert sorted(CASES) == sorted(protocols())


@pytest.mark.parametrize("protocol", CASES)
def test_the_bytes_of_a_manifest_are_the_same_on_any_machine(protocol):
    manifest = small(protocol, seed=7, **CASES[protocol])
    assert manifest.hash == hashlib.sha256(manifest.to_bytes()).hexdigest()
    assert manifest.hash == GOLDEN[protocol]


def test_the_order_of_python_s_sets_does_not_reach_the_bytes():
    program = "import json, test_streams; print(json.dumps(test_streams.golden_hashes()))"
    paths = [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    for hash_seed in ("0", "1", "4294967295"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        assert json.loads(done.stdout) == GOLDEN


def test_importing_streams_loads_no_image_or_learning_package():
    program = (
        "import sys, protodcs.data.streams;"
        "print([name for name in ('torch', 'PIL', 'cv2', 'scipy', 'pyarrow', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"


def philox_words(key, count):
    """Philox4x64-10 by its definition, in Python's own integers; the counter goes up before each block."""
    words, mask = [], 2**64 - 1
    for block in range(1, -(-count // 4) + 1):
        counter, (low_key, high_key) = [block, 0, 0, 0], key
        for _ in range(10):
            first, second = counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157
            counter = [
                (second >> 64) ^ counter[1] ^ low_key,
                second & mask,
                (first >> 64) ^ counter[3] ^ high_key,
                first & mask,
            ]
            low_key, high_key = (low_key + 0x9E3779B97F4A7C15) & mask, (high_key + 0xBB67AE8584CAA73B) & mask
        words += counter
    return words[:count]


def test_the_words_of_chance_are_philox_under_a_key_from_sha256():
    digest = hashlib.sha256(b"protodcs-stream\nbursty\n12\norder fog 0").digest()
    key = [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")]
    draw = order.drawing("bursty", 12, "order fog 0")
    assert draw(5).tolist() + draw(6).tolist() == philox_words(key, 11)


@pytest.mark.parametrize("protocol", protocols())
def test_another_seed_gives_another_stream_except_where_nothing_is_drawn(protocol):
    one, two = small(protocol, seed=0), small(protocol, seed=1)
    assert one.hash != two.hash
    assert small(protocol, seed=0) == one
    assert np.array_equal(rows(one), rows(two)) == (protocol in NOTHING_DRAWN)


# ---- chance


@given(st.integers(0, 2**53 - 1), st.text(max_size=20), st.integers(0, 300))
def test_a_permutation_holds_every_number_once(seed, purpose, count):
    draw = order.drawing("test", seed, purpose)
    assert sorted(order.permutation(draw, count).tolist()) == list(range(count))


def chi_square(observed, expected):
    observed, expected = np.asarray(observed, dtype=float), np.asarray(expected, dtype=float)
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_permutation_of_a_few_is_equally_likely(count):
    draw, times = order.drawing("test", count, "chi-square"), 1000
    orders = list(permutations(range(count)))
    seen = Counter(tuple(order.permutation(draw, count).tolist()) for _ in range(times * len(orders)))
    # The statistic has the mean n - 1 and the variance 2 (n - 1); six deviations are generous.
    freedom = len(orders) - 1
    assert chi_square([seen[o] for o in orders], [times] * len(orders)) < freedom + 6 * (2 * freedom) ** 0.5


def test_every_image_is_equally_likely_at_every_place_of_a_shuffle():
    draw, count, times = order.drawing("test", 0, "places"), 12, 6000
    table = np.zeros((count, count))
    for _ in range(times):
        table[np.arange(count), order.permutation(draw, count)] += 1
    freedom = (count - 1) ** 2
    assert chi_square(table, np.full(table.shape, times / count)) < freedom + 6 * (2 * freedom) ** 0.5


def test_equal_words_are_drawn_anew():
    supply = iter([[5, 9, 5], [3, 1, 2]])
    assert order.permutation(lambda count: np.array(next(supply), dtype=np.uint64), 3).tolist() == [1, 2, 0]


def test_words_that_would_bend_the_odds_are_thrown_back():
    # 2**64 mod 10 is 6: the words 0 to 5 are thrown back, and the second place draws until it has a good one.
    supply = iter([[16, 5, 29], [0], [6]])
    draw = lambda count: np.array(next(supply), dtype=np.uint64)  # noqa: E731
    assert order.below(draw, np.full(3, 10)).tolist() == [6, 6, 9]


def test_numbers_below_a_bound_are_equally_likely_even_where_a_quarter_of_the_words_is_thrown_back():
    draw, third, times = order.drawing("test", 0, "below"), 2**61, 30_000
    numbers = order.below(draw, np.full(times, 3 * third))
    assert chi_square(np.bincount(numbers // third, minlength=3), [times / 3] * 3) < 2 + 6 * 2
    assert order.below(draw, np.ones(5, dtype=np.int64)).tolist() == [0] * 5


@given(st.integers(0, 1000), st.integers(0, 40), st.integers(0, 40))
def test_interleaving_keeps_the_order_of_both_sides(seed, left, right):
    first, second = np.arange(left), 1000 + np.arange(right)
    mixed = order.interleaved(order.drawing("test", seed, "mix"), first, second)
    assert mixed[mixed < 1000].tolist() == first.tolist()
    assert mixed[mixed >= 1000].tolist() == second.tolist()


def test_every_way_of_interleaving_is_equally_likely():
    draw, times = order.drawing("test", 0, "mix"), 20_000
    seen = Counter(tuple(order.interleaved(draw, np.zeros(3, int), np.ones(2, int)).tolist()) for _ in range(times))
    assert len(seen) == comb(5, 2)
    assert chi_square(list(seen.values()), [times / 10] * 10) < 9 + 6 * 18**0.5


@pytest.mark.parametrize("strength", [Fraction(1, 10), Fraction(1), Fraction(7, 2)])
def test_the_urn_gives_the_counts_of_a_dirichlet_distribution(strength):
    images, slots, times = 4, 3, 20_000
    draw, c = order.drawing("test", 0, f"urn {strength}"), float(strength)
    seen = Counter(
        tuple(np.bincount(correlated.spread(draw, images, slots, strength), minlength=slots).tolist())
        for _ in range(times)
    )
    outcomes = [(a, b, images - a - b) for a in range(images + 1) for b in range(images + 1 - a)]

    def log_probability(counts):
        ways = lgamma(images + 1) - sum(lgamma(n + 1) for n in counts)
        whole = lgamma(slots * c) - lgamma(images + slots * c)
        return ways + whole + sum(lgamma(n + c) - lgamma(c) for n in counts)

    expected = times * np.exp([log_probability(counts) for counts in outcomes])
    assert expected.sum() == pytest.approx(times)
    freedom = len(outcomes) - 1
    assert chi_square([seen[counts] for counts in outcomes], expected) < freedom + 6 * (2 * freedom) ** 0.5


def test_the_length_of_a_burst_is_geometric_with_the_mean_asked_for():
    mean = Fraction(5, 2)
    numbers = bursty.burst_numbers(order.drawing("test", 0, "bursts"), 100_000, mean)
    lengths = np.bincount(numbers)[:-1]
    stop = 1 / float(mean)
    expected = [len(lengths) * stop * (1 - stop) ** n for n in range(8)]
    observed = [int((lengths == n + 1).sum()) for n in range(8)]
    assert chi_square(observed + [len(lengths) - sum(observed)], expected + [len(lengths) - sum(expected)]) < 8 + 6 * 4


# ---- what each protocol promises


def test_continual_holds_every_image_once_per_corruption_and_never_resets():
    manifest = small("continual")
    assert [(s.corruption, s.severity, s.reset, s.length) for s in manifest.segments] == [
        ("fog", 5, False, 150),
        ("snow", 5, False, 150),
    ]
    for segment in manifest.segments:
        part = rows(manifest)[segment.rows]
        assert sorted(part[part[:, 0] == 0, 1].tolist()) == list(range(60))
        assert sorted(part[part[:, 0] == 1, 1].tolist()) == list(range(90))
    assert manifest.classes == ANIMALS
    assert (manifest.label == np.where(manifest.source == 0, KNOWN.labels[manifest.index % 60], -1)).all()


def test_the_standard_corruptions_come_in_their_published_order():
    manifest = build("continual", KNOWN, UNKNOWN, 0)
    assert [segment.corruption for segment in manifest.segments] == [
        "gaussian_noise",
        "shot_noise",
        "impulse_noise",
        "defocus_blur",
        "glass_blur",
        "motion_blur",
        "zoom_blur",
        "snow",
        "frost",
        "fog",
        "brightness",
        "contrast",
        "elastic_transform",
        "pixelate",
        "jpeg_compression",
    ]
    assert {(s.severity, s.family, s.variant) for s in manifest.segments} == {(5, None, "published")}


def test_each_segment_has_an_order_of_its_own_that_a_shorter_list_keeps():
    both, alone, twice = small("continual"), small("continual", corruptions=["snow"]), [TWO[1], TWO[1]]
    first, second = (rows(both)[segment.rows] for segment in both.segments)
    assert not np.array_equal(first, second)
    assert np.array_equal(rows(alone), second)
    repeated = small("continual", corruptions=twice)
    assert np.array_equal(rows(repeated)[:150], second)
    assert not np.array_equal(rows(repeated)[150:], second)


def test_reset_has_the_samples_of_continual_and_restarts_before_each_segment():
    once, again = small("continual", seed=3), small("reset", seed=3)
    assert np.array_equal(rows(once), rows(again))
    assert [segment.reset for segment in again.segments] == [True, True]


@pytest.mark.parametrize("protocol", ["continual", "reset", "correlated", "bursty"])
@pytest.mark.parametrize("ratio", ["0", "1/10", "0.3", 0.5, "2/3", "9/10"])
def test_a_share_of_unknown_images_is_exact_and_as_long_as_the_images_last(protocol, ratio):
    manifest = small(protocol, ratio=ratio)
    share = Fraction(str(ratio))
    for segment in manifest.segments:
        unknown = int((manifest.label[segment.rows] == -1).sum())
        assert Fraction(unknown, segment.length) == share
        # One more part of the share would need more images than there are.
        step = share.denominator
        assert unknown + share.numerator > len(UNKNOWN) or segment.length - unknown + step - share.numerator > len(
            KNOWN
        )
    assert manifest.options["ratio"] == str(share)
    assert len({origin.role for origin in manifest.sources}) == (1 if share == 0 else 2)


def test_a_share_can_have_a_total():
    manifest = small("continual", ratio="3/5", total=50)
    assert [(entry["known"], entry["unknown"]) for entry in summary(manifest)["segments"]] == [(20, 30)] * 2


def test_counts_draw_images_without_repetition_and_more_contain_the_fewer():
    few, many = small("continual", known_count=10, unknown_count=20), small("continual", known_count=25)
    assert [(entry["known"], entry["unknown"]) for entry in summary(few)["segments"]] == [(10, 20)] * 2
    chosen = [set(m.index[m.source == 0].tolist()) for m in (few, many)]
    assert len(chosen[0]) == 10
    assert len(chosen[1]) == 25
    assert chosen[0] < chosen[1] != set(range(25))


def test_unient_is_blocks_of_known_then_unknown_in_the_order_of_their_files():
    known, unknown = Images("known", np.arange(1050) % 10, "abcdefghij"), Images("unknown", [0] * 2000, ["x"])
    manifest = build("unient", known, unknown, 1, corruptions=TWO)
    assert manifest.options == {"batch": 200, "known_count": None, "rest": "left-out"}
    for segment in manifest.segments:
        assert not segment.reset
        part = rows(manifest)[segment.rows]
        assert len(part) == 2100
        for block in range(11):
            size = 100 if block < 10 else 50
            batch = part[200 * block : 200 * block + 2 * size]
            place = np.arange(100 * block, 100 * block + size)
            assert np.array_equal(batch[:size], np.stack([0 * place, place, place % 10], axis=1))
            assert np.array_equal(batch[size:], np.stack([0 * place + 1, place, 0 * place - 1], axis=1))


def test_unient_refuses_to_repeat_unknown_images_and_says_what_to_do():
    few = Images("few", [0] * 20, ["x"])
    with pytest.raises(DataError, match="wants 60 unknown images, there are 20: no image is taken twice"):
        build("unient", KNOWN, few, 0)
    assert len(build("unient", KNOWN, few, 0, corruptions=TWO, known_count=20)) == 80


def test_stamp_has_four_known_images_to_one_unknown_shuffled_and_resets():
    manifest = small("stamp-4to1")
    assert manifest.options["batch"] == 64
    for segment, content in zip(manifest.segments, summary(manifest)["segments"], strict=True):
        assert segment.reset
        assert (content["known"], content["unknown"]) == (60, 15)
        assert sorted(manifest.index[segment.rows][manifest.label[segment.rows] >= 0]) == list(range(60))
    assert (manifest.source[:60] == 1).any()
    assert np.array_equal(rows(manifest), rows(small("stamp-4to1", batch=32)))


def test_correlated_keeps_classes_together_and_mixes_unknown_images_in_evenly():
    known = Images("known", np.arange(2000) % 10, "abcdefghij")
    unknown = Images("unknown", [0] * 2000, ["x"])
    strong, weak, none = (
        build(protocol, known, unknown, 0, corruptions=["fog"], **options)
        for protocol, options in (
            ("correlated", {"concentration": "1/100"}),
            ("correlated", {"concentration": "1000", "slots": 200}),
            ("continual", {}),
        )
    )
    repeats = [summary(m)["same_class_as_the_known_before"] for m in (strong, weak, none)]
    assert repeats[0] > 0.9
    assert abs(repeats[2] - 0.1) < 0.05
    assert repeats[0] > repeats[1] > repeats[2] - 0.05
    for manifest in (strong, weak, none):
        assert sorted(manifest.index[manifest.source == 0]) == list(range(2000))
        # Uniformly mixed halves: the mean run is 2, and each quarter holds a quarter of the unknown images.
        assert abs(summary(manifest)["mean_run_of_unknown"] - 2) < 0.2
        quarters = (manifest.label == -1).reshape(4, -1).sum(axis=1)
        assert chi_square(quarters, [500] * 4) < 3 + 6 * 6**0.5


def test_a_class_gathers_in_few_stretches_under_a_small_concentration():
    known = Images("known", np.arange(3000) % 10, "abcdefghij")

    def slots_of_a_class(concentration):
        manifest = build("correlated", known, None, 0, [None], ratio=0, concentration=concentration)
        tenths = manifest.label.reshape(10, -1)
        return np.mean([len(set(np.flatnonzero((tenths == c).sum(axis=1) >= 15))) for c in range(10)])

    assert slots_of_a_class("1/100") < 3 < 8 < slots_of_a_class("100")


def test_bursty_unknown_images_come_in_long_runs_that_a_shuffle_does_not_have():
    known, unknown = Images("known", [0] * 4000, ["a"]), Images("unknown", [0] * 4000, ["x"])
    burst, shuffle = (
        build(protocol, known, unknown, 0, corruptions=["fog"], **options)
        for protocol, options in (("bursty", {"mean_burst": 25}), ("continual", {}))
    )
    runs = [run_lengths(manifest.label == -1) for manifest in (burst, shuffle)]
    assert 18 < runs[0].mean() < 34
    assert runs[0].max() > 60 > 30 > runs[1].max()
    assert abs(runs[1].mean() - 2) < 0.2
    assert [int(lengths.sum()) for lengths in runs] == [4000, 4000]
    for role in (0, 1):
        assert sorted(burst.index[burst.source == role]) == list(range(4000))


def test_bursts_never_touch():
    known, unknown = Images("known", [0] * 300, ["a"]), Images("unknown", [0] * 250, ["x"])
    manifest = build("bursty", known, unknown, 0, [None], mean_burst=1)
    assert (run_lengths(manifest.label == -1) == 1).all()
    with pytest.raises(DataError, match=r"90 bursts .* 61 gaps around 60 known .* longer mean_burst than 1"):
        small("bursty", mean_burst=1)


def test_streams_of_one_kind_hold_nothing_else():
    without, only = small("no-unknown"), small("all-unknown")
    assert (without.label >= 0).all()
    assert [origin.name for origin in without.sources] == ["animals"]
    assert (only.label == -1).all()
    assert len(only) == 180
    # The known source stays listed: the classes are its.
    assert [(origin.name, origin.role) for origin in only.sources] == [("animals", "known"), ("digits", "unknown")]
    assert len(build("no-unknown", KNOWN, None, 0)) == 15 * 60


def test_several_unknown_sources_are_taken_together():
    manifest = build("continual", KNOWN, [UNKNOWN, MORE], 0, corruptions=["fog"])
    assert [(origin.name, origin.size) for origin in manifest.sources] == [
        ("animals", 60),
        ("digits", 90),
        ("textures", 30),
    ]
    assert sorted(manifest.index[manifest.source == 2]) == list(range(30))
    assert (manifest.label[manifest.source > 0] == -1).all()


def test_severity_nought_is_one_clean_segment_and_none_in_the_list_another():
    clean = small("continual", corruptions=None, severity=0)
    assert clean.segments == (Segment(None, 0, None, None, False, 0, 150),)
    mixed = small("continual", corruptions=[None, "fog"], severity=2, family="cifar", variant="fixed")
    assert mixed.segments == (
        Segment(None, 0, None, None, False, 0, 150),
        Segment("fog", 2, "cifar", "fixed", False, 150, 150),
    )
    assert np.array_equal(rows(mixed)[:150], rows(clean))
    assert [mixed.segment_of(place).corruption for place in (0, 149, 150, 299)] == [None, None, "fog", "fog"]
    for place in (-1, 300):
        with pytest.raises(DataError, match=f"the samples 0 to 299; asked for: {place}"):
            mixed.segment_of(place)


# ---- classes and the split inside one source


def test_some_classes_of_a_source_can_be_left_out():
    manifest = build("no-unknown", KNOWN, None, 0, ["fog"], classes=["owl", "cat"])
    assert manifest.classes == ("owl", "cat")
    names = [ANIMALS[KNOWN.labels[i]] for i in manifest.index]
    assert names == [manifest.classes[label] for label in manifest.label]
    assert sorted(manifest.index) == np.flatnonzero(np.isin(KNOWN.labels, [0, 2])).tolist()
    manifest.verify({"animals": KNOWN})


def test_the_rest_of_a_source_can_be_its_unknown_images():
    manifest = build("continual", KNOWN, MORE, 0, ["fog"], classes=["dog", "owl"], rest="unknown")
    assert [(o.name, o.role) for o in manifest.sources] == [
        ("animals", "known"),
        ("animals", "unknown"),
        ("textures", "unknown"),
    ]
    known = np.isin(KNOWN.labels, [1, 2])
    assert sorted(manifest.index[manifest.source == 0]) == np.flatnonzero(known).tolist()
    assert sorted(manifest.index[manifest.source == 1]) == np.flatnonzero(~known).tolist()
    assert len(manifest) == 90
    manifest.verify({"animals": KNOWN, "textures": MORE})
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_naming_all_classes_is_naming_none():
    assert small("continual", classes=list(ANIMALS)) == small("continual")


# ---- what the builder refuses

REFUSED = {
    "protocol": ({"protocol": "bursting"}, ConfigError, "no protocol 'bursting'; choose one of continual, reset,"),
    "protocol's type": ({"protocol": ["x"]}, ConfigError, "no protocol"),
    "option": ({"batch": 3}, ConfigError, "'continual' has no option 'batch'; its options: known_count, ratio"),
    "negative seed": ({"seed": -1}, ConfigError, "seed is -1; wanted: a whole number from 0"),
    "seed of another type": ({"seed": True}, ConfigError, "seed is True"),
    "huge seed": ({"seed": 2**53}, ConfigError, "wanted: a whole number from 0 to 2"),
    "corruption": ({"corruptions": ["fog", "dust"]}, ConfigError, "no corruption 'dust'; choose from gaussian_noise"),
    "bare corruption": ({"corruptions": "fog"}, ConfigError, "wanted: a list"),
    "no corruption": ({"corruptions": []}, ConfigError, "at least one name"),
    "severity": ({"severity": 6}, ConfigError, "severity is 6; wanted: 0 for clean images, or 1 to 5"),
    "clean corruption": ({"severity": 0}, ConfigError, "severity 0 means clean images, but the corruption 'fog'"),
    "family": ({"family": "mnist"}, ConfigError, "family is 'mnist'; choose one of None, 'cifar'"),
    "variant": ({"variant": "new"}, ConfigError, "variant is 'new'; choose one of 'published'"),
    "share too high": ({"ratio": 0.95}, ConfigError, "ratio is 0.95; wanted: a number from 0 to 9/10"),
    "share below nought": ({"ratio": "-1/2"}, ConfigError, "ratio is '-1/2'"),
    "share in words": ({"ratio": "half"}, ConfigError, "ratio is 'half'"),
    "share over nought": ({"ratio": "1/0"}, ConfigError, "ratio is '1/0'"),
    "share not a number": ({"ratio": float("nan")}, ConfigError, "ratio is nan"),
    "share with noise": ({"ratio": 0.1 + 0.2}, ConfigError, "write it as a shorter number"),
    "share and count": ({"ratio": 0.5, "known_count": 5}, ConfigError, "not both"),
    "share out of reach": ({"ratio": "91/200"}, DataError, "too few for a share of 91/200: it takes 109 known and 91"),
    "total without share": ({"total": 50}, ConfigError, "total needs a ratio"),
    "total that does not divide": ({"ratio": "3/7", "total": 20}, ConfigError, "nearest that can are 14 and 21"),
    "total too large": ({"ratio": "1/2", "total": 200}, DataError, "wants 100 known images, there are 60"),
    "too many known": ({"known_count": 61}, DataError, "wants 61 known images, there are 60"),
    "too many unknown": ({"unknown_count": 91}, DataError, "wants 91 unknown images, there are 90"),
    "count": ({"known_count": 1.5}, ConfigError, "known_count is 1.5; wanted: a whole number from 0 up"),
    "nothing": ({"known_count": 0, "unknown_count": 0}, DataError, "would have 0 samples"),
    "odd batch": ({"protocol": "unient", "batch": 3}, ConfigError, "batch is 3; wanted: an even number"),
    "too many slots": ({"protocol": "correlated", "slots": 2**40}, ConfigError, "at most 1000000"),
    "concentration": ({"protocol": "correlated", "concentration": 0}, ConfigError, "concentration is 0"),
    "mean burst": ({"protocol": "bursty", "mean_burst": "1/2"}, ConfigError, "number from 1 to"),
    "no unknown": ({"unknown": None}, DataError, "there are none: give a source of them"),
    "no unknown for a share": ({"unknown": (), "ratio": 0.5}, DataError, "there are none"),
    "no unknown for stamp": ({"unknown": None, "protocol": "stamp-4to1"}, DataError, "there are none"),
    "no unknown at all": ({"unknown": None, "protocol": "all-unknown"}, DataError, "there are none"),
    "same source": ({"unknown": KNOWN}, DataError, "given as known and as unknown: .* rest='unknown'"),
    "same unknown": ({"unknown": [UNKNOWN, UNKNOWN]}, DataError, "two unknown sources have the same name"),
    "empty known": ({"known": Images("void", [], ["a"])}, DataError, "'void' has no images"),
    "empty unknown": ({"unknown": Images("void", [])}, DataError, "'void' has no images"),
    "no source": ({"unknown": "svhn"}, DataError, "a source of images is wanted; given: 's'"),
    "no classes": ({"known": Images("plain", [0, 0])}, DataError, "'plain' has no class names"),
    "twin classes": ({"known": Images("twins", [0, 1], ["a", "a"])}, DataError, "two classes of the same name"),
    "unlabelled": ({"known": Images("gaps", [0, -1], ["a"])}, DataError, "'gaps' has 1 images without a label"),
    "labels beyond": ({"known": Images("beyond", [0, 3], ["a"])}, DataError, "labels outside its 1 classes"),
    "bad class name": ({"known": Images("lines", [0], ["a\nb"])}, DataError, "none of them a control character"),
    "strange class": ({"classes": ["cat", "cow"]}, ConfigError, "classes of 'animals', each once, from cat, dog"),
    "class twice": ({"classes": ["cat", "cat"]}, ConfigError, "each once"),
    "bare class": ({"classes": "cat"}, ConfigError, "each once"),
    "no class chosen": ({"classes": []}, ConfigError, "each once"),
    "rest": ({"rest": "known"}, ConfigError, "rest is 'known'; wanted: 'left-out' or 'unknown'"),
    "no rest": ({"rest": "unknown"}, ConfigError, "leave some class over"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_built_is_refused_in_words(case):
    changes, error, message = REFUSED[case]
    arguments = {"protocol": "continual", "known": KNOWN, "unknown": UNKNOWN, "seed": 0, "corruptions": TWO} | changes
    with pytest.raises(error, match=message):
        build(**arguments)


def test_two_names_for_the_same_images_are_refused():
    class Renamed(Images):
        fingerprint = UNKNOWN.fingerprint

    with pytest.raises(DataError, match="different names have the same content"):
        build("continual", KNOWN, [UNKNOWN, Renamed("copy", [0] * 5, ["x"])], 0, TWO)


def test_a_stream_beyond_all_measure_is_refused_before_it_is_made():
    huge = Images("huge", np.zeros(2_000_000, dtype=np.int64), ["a"])
    with pytest.raises(DataError, match="would have 30000000 samples; wanted: 1 to 10000000"):
        build("no-unknown", huge, None, 0)


@settings(max_examples=60)
@given(st.data())
def test_any_stream_is_valid_repeats_nothing_and_survives_its_file(data):
    protocol = data.draw(st.sampled_from(protocols()))
    labels = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=40))
    known = Images("known", labels, "abcd")
    unknown = Images("unknown", [-1] * data.draw(st.integers(len(labels), 60)))
    seed = data.draw(st.integers(0, 2**53 - 1))
    extra = {"mean_burst": 50} if protocol == "bursty" else {}
    try:
        manifest = build(protocol, known, unknown, seed, [None, "fog"], **extra)
    except DataError as problem:
        assert "bursts" in str(problem)  # noqa: PT017
        return
    for segment in manifest.segments:
        part = rows(manifest)[segment.rows]
        assert len(np.unique(part, axis=0)) == len(part)
        if protocol != "all-unknown":
            assert sorted(part[part[:, 0] == 0, 1].tolist()) == list(range(len(labels)))
    manifest.verify({"known": known, "unknown": unknown})
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again == manifest
    assert np.array_equal(rows(again), rows(manifest))


# ---- the file


def test_a_manifest_is_a_json_line_and_one_line_per_sample(tmp_path):
    manifest = build("unient", KNOWN, UNKNOWN, 5, ["fog"], 3, batch=2, known_count=2)
    manifest.save(tmp_path / "stream.txt")
    first, *rest = (tmp_path / "stream.txt").read_bytes().split(b"\n")
    listed = b"0 0 0\n1 0 -1\n0 1 2\n1 1 -1\n"
    assert b"\n".join(rest) == listed
    assert json.loads(first) == {
        "classes": list(ANIMALS),
        "format": "protodcs-manifest",
        "options": {"batch": 2, "known_count": 2, "rest": "left-out"},
        "protocol": "unient",
        "samples": 4,
        "schema": 1,
        "seed": 5,
        "segments": [
            {
                "corruption": "fog",
                "family": None,
                "length": 4,
                "reset": False,
                "severity": 3,
                "start": 0,
                "variant": "published",
            }
        ],
        "sha256": hashlib.sha256(listed).hexdigest(),
        "sources": [
            {"fingerprint": KNOWN.fingerprint, "name": "animals", "role": "known", "size": 60},
            {"fingerprint": UNKNOWN.fingerprint, "name": "digits", "role": "unknown", "size": 90},
        ],
    }
    assert manifest.hash == hashlib.sha256((tmp_path / "stream.txt").read_bytes()).hexdigest()


@pytest.mark.parametrize("protocol", protocols())
def test_a_saved_manifest_comes_back_equal(protocol, tmp_path):
    manifest = small(protocol)
    manifest.save(tmp_path / "stream.txt")
    again = Manifest.load(str(tmp_path / "stream.txt"))
    assert again == manifest == pickle.loads(pickle.dumps(manifest))
    assert len({again, manifest}) == 1
    assert (again.protocol, again.options, again.seed) == (manifest.protocol, manifest.options, manifest.seed)
    assert (again.classes, again.sources, again.segments) == (manifest.classes, manifest.sources, manifest.segments)
    assert np.array_equal(rows(again), rows(manifest))
    assert [file.name for file in tmp_path.iterdir()] == ["stream.txt"]


def test_a_class_name_in_any_script_survives_and_the_file_stays_ascii():
    manifest = build("no-unknown", Images("names", [0, 1], ["h\u00e9ron", "\U0001f989 \u732b"]), None, 0)
    assert manifest.to_bytes().isascii()
    assert Manifest.from_bytes(manifest.to_bytes()).classes == ("h\u00e9ron", "\U0001f989 \u732b")


def test_the_columns_of_a_manifest_cannot_be_changed():
    manifest = small("continual")
    with pytest.raises(ValueError, match="read-only"):
        manifest.label[0] = 1
    with pytest.raises(AttributeError):
        manifest.seed = 1


@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()])
def test_a_failed_save_leaves_the_old_file_whole(tmp_path, monkeypatch, failure):
    path = tmp_path / "stream.txt"
    small("continual").save(path)
    before = path.read_bytes()

    def fail(handle):
        raise failure

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DataError if isinstance(failure, OSError) else KeyboardInterrupt):
        small("continual", seed=1).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["stream.txt"]


def test_a_path_that_is_no_file_is_refused_in_words(tmp_path):
    with pytest.raises(DataError, match="cannot read the manifest"):
        Manifest.load(tmp_path / "absent")
    with pytest.raises(DataError, match="not a regular file"):
        Manifest.load(tmp_path)
    with pytest.raises(DataError, match="cannot read"):
        Manifest.load("\0")
    with pytest.raises(DataError, match="cannot write"):
        small("continual").save(tmp_path / "absent" / "stream.txt")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(DataError, match="not a regular file"):
            Manifest.load(tmp_path / "pipe")


def spelled(content, text=None):
    """The bytes of a file with this header, its hash put right."""
    text = small("continual").to_bytes().split(b"\n", 1)[1] if text is None else text
    content = {**content, "sha256": hashlib.sha256(text).hexdigest()} if "sha256" in content else content
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n" + text


def good_header():
    return json.loads(small("continual").to_bytes().split(b"\n", 1)[0])


def change(*path, to):
    content = good_header()
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return spelled(content)


def with_rows(change_rows):
    table = rows(small("continual")).copy()
    change_rows(table)
    return spelled(good_header(), listing.write(table))


def set_cell(row, column, value):
    return lambda table: table.__setitem__((row, column), value)


def without(key):
    return spelled({name: value for name, value in good_header().items() if name != key})


def respaced():
    first, text = small("continual").to_bytes().split(b"\n", 1)
    return first.replace(b",", b", ", 1) + b"\n" + text


def list_with(old, new):
    text = small("continual").to_bytes().split(b"\n", 1)[1]
    assert old in text
    return spelled(good_header(), text.replace(old, new, 1))


WHOLE = small("continual").to_bytes()
FIRST_LINE = WHOLE.split(b"\n")[1]
DAMAGED = {
    "nothing": (b"", "not a manifest"),
    "no line": (b"x" * 100, "not a manifest"),
    "endless first line": (b'"' + b"x" * (1 << 23) + b'"\n', "no first line of a manifest's length"),
    "another text": (b"hello\nworld\n", "not the header of a manifest"),
    "another JSON": (b"[1]\n", "no format 'protodcs-manifest'"),
    "utf-16": ('{"format":1}\n'.encode("utf-16"), "not the header of a manifest"),
    "deep brackets": (b"[" * 100_000 + b"\n", "not the header of a manifest"),
    "long number": (b'{"format":' + b"9" * 10_000 + b"}\n", "not the header of a manifest"),
    "a later schema": (change("schema", to=2), "schema 2, this protodcs reads up to 1: upgrade it"),
    "schema of another type": (change("schema", to=True), "schema True"),
    "a key too few": (without("seed"), "has the keys"),
    "a key too many": (change("host", to="here"), "has the keys"),
    "a float": (change("seed", to=1.5), "1.5 is not a whole number"),
    "not a number": (change("seed", to=float("nan")), "NaN is not a whole number"),
    "spaces": (respaced(), "not in its one spelling"),
    "cut off": (WHOLE[:-40], "the list has the hash"),
    "cut at a line": (WHOLE[: WHOLE.rindex(b"\n", 0, -1) + 1], "the list has the hash"),
    "one line more": (spelled(good_header(), WHOLE.split(b"\n", 1)[1] + b"0 0 0\n"), "has 301 lines"),
    "one sample more": (change("samples", to=301), "announces 301 samples, its list has 300 lines"),
    "short lines": (spelled({**good_header(), "samples": 4}, b"\n" * 4), "4 lines in 4 bytes"),
    "too many samples": (change("samples", to=10**15), "wanted: 1 to 10000000"),
    "no samples": (change("samples", to=0), "wanted: 1 to"),
    "samples in words": (change("samples", to="300"), "announces '300' samples"),
    "hash of another kind": (WHOLE.replace(b'"sha256":"', b'"sha256":"0', 1), "not 64 digits"),
    "seed": (change("seed", to=-1), "seed is -1"),
    "protocol": (change("protocol", to=""), "protocol's name is ''"),
    "long protocol": (change("protocol", to="x" * 201), "1 to 200 characters"),
    "options": (change("options", to=[]), "options are"),
    "an option": (change("options", "ratio", to=[1]), "option 'ratio' is"),
    "an option's name": (change("options", "", to=1), "an option named ''"),
    "nested option": (change("options", "ratio", to=[[[[[]]]]]), "option 'ratio' is"),
    "classes": (change("classes", to="cat"), "not a list"),
    "no classes": (change("classes", to=[]), "names no known class"),
    "class twice": (change("classes", to=["a"] * 5), "names a known class twice"),
    "class of another type": (change("classes", to=[1, 2, 3, 4, 5]), "known class is named 1"),
    "half a character": (change("classes", 0, to="\ud800"), "control character"),
    "sources": (change("sources", to={}), "not a list"),
    "no sources": (change("sources", to=[]), "1 to 1000 sources"),
    "many sources": (change("sources", to=good_header()["sources"] * 501), "1 to 1000 sources"),
    "half a source": (change("sources", 0, to={"name": "x"}), "an entry of 'sources'"),
    "source's name": (change("sources", 0, "name", to=None), "a source is named None"),
    "fingerprint": (change("sources", 0, "fingerprint", to="ab"), "not a SHA-256"),
    "size": (change("sources", 0, "size", to=0), "size 0"),
    "role": (change("sources", 0, "role", to="maybe"), "role 'maybe'"),
    "source twice": (change("sources", to=[good_header()["sources"][0]] * 2), "listed twice"),
    "segments": (change("segments", to=None), "not a list"),
    "no segments": (change("segments", to=[]), "1 to 10000 segments"),
    "overlap": (change("segments", 1, "start", to=149), "lie end to end"),
    "gap": (change("segments", 0, "length", to=149), "this one starts at 149"),
    "too short": (change("segments", 1, "length", to=149), "segments hold 299 samples, the manifest 300"),
    "empty segment": (change("segments", 1, "length", to=0), "none is empty"),
    "true as a start": (change("segments", 0, "start", to=False), "segment 0 starts at False"),
    "severity": (change("segments", 0, "severity", to=6), "severity 6"),
    "clean with severity": (change("segments", 0, "corruption", to=None), "segment 0 is clean"),
    "corruption": (change("segments", 0, "corruption", to=3), "corruption 3"),
    "variant": (change("segments", 0, "variant", to=None), "variant None"),
    "family": (change("segments", 0, "family", to=7), "family 7"),
    "reset": (change("segments", 0, "reset", to=1), "reset 1"),
    "source out of range": (with_rows(set_cell(3, 0, 2)), "not one of the 2 listed"),
    "negative source": (with_rows(set_cell(3, 0, -1)), "not one of the 2 listed"),
    "index out of range": (with_rows(set_cell(3, 1, 90)), "sample 3 has an index that lies outside its source: 90"),
    "negative index": (with_rows(set_cell(3, 1, -1)), "outside its source"),
    "label out of range": (with_rows(set_cell(slice(None), 2, 5)), "sample 0 has a label"),
    "all unknown": (with_rows(set_cell(slice(None), 2, -1)), "has a label that does not fit the role"),
    "leading nought": (list_with(b"\n0 ", b"\n00 "), "not in its one spelling"),
    "plus sign": (list_with(b"\n0 ", b"\n+0 "), "not in its one spelling"),
    "two spaces": (list_with(b"\n0 ", b"\n0  "), "not in its one spelling"),
    "carriage return": (list_with(b"\n0 ", b"\r\n0 "), "not in its one spelling"),
    "underscore": (list_with(b" 59 ", b" 5_9 "), "not in its one spelling"),
    "letters": (list_with(b" 59 ", b" x "), "not in its one spelling"),
    "other digits": (list_with(b" 5 ", " \u0665 ".encode()), "not in its one spelling"),
    "nought byte": (list_with(b" 5 ", b" \0 "), "not in its one spelling"),
    "column missing": (list_with(FIRST_LINE, FIRST_LINE.rsplit(b" ", 1)[0]), "not in its one spelling"),
    "number too long": (list_with(b" 59 ", b" " + b"9" * 30 + b" "), "not in its one spelling"),
    "number far too long": (list_with(b" 59 ", b" " + b"9" * 9000 + b" "), "not in its one spelling"),
    "blank line": (list_with(FIRST_LINE + b"\n", b"\n"), "not in its one spelling"),
    "no last newline": (spelled({**good_header(), "samples": 299}, WHOLE.split(b"\n", 1)[1][:-1]), "one spelling"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_in_words(case, tmp_path):
    data, message = DAMAGED[case]
    path = tmp_path / "stream.txt"
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        Manifest.load(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 600 + len(str(path))


def test_from_bytes_takes_bytes_only():
    with pytest.raises(DataError, match="a manifest is bytes"):
        Manifest.from_bytes("text")


def test_a_manifest_made_by_hand_is_checked_too():
    good = small("continual")
    assert rebuilt(good) == good
    with pytest.raises(DataError, match="one-dimensional array of whole numbers"):
        rebuilt(good, label=good.label.astype(float))
    with pytest.raises(DataError, match="segments hold 300 samples, the manifest 299"):
        rebuilt(good, source=good.source[1:], index=good.index[1:], label=good.label[1:])


def mutated(rng, data):
    """One to three random changes: bytes overwritten, cut out, doubled, put in, swapped; or the end cut off."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        start, length = int(rng.integers(len(data))), int(rng.integers(1, 20))
        piece = data[start : start + length]
        kind = rng.integers(6)
        if kind == 0:
            data[start] = rng.integers(256)
        elif kind == 1:
            del data[start : start + length]
        elif kind == 2:
            data[start:start] = piece
        elif kind == 3:
            data[start:start] = bytes(rng.choice(np.frombuffer(b'0123456789 -\n",:{}[]e.', dtype=np.uint8), length))
        elif kind == 4:
            data[start : start + length] = piece[::-1]
        else:
            del data[max(1, len(data) - length) :]
    return bytes(data)


def try_to_read(data):
    """Whether the bytes are a manifest; any exception but a `DataError` is a failure."""
    try:
        manifest = Manifest.from_bytes(data)
    except DataError as problem:
        assert str(problem)  # noqa: PT017
        return False
    assert manifest.to_bytes() == data
    return True


@pytest.mark.parametrize("seed", range(5))
def test_five_hundred_random_mutations_are_refused_or_are_manifests(seed):
    rng = np.random.default_rng(seed)
    whole = small("continual", corruptions=["fog"]).to_bytes()
    assert try_to_read(whole)
    for _ in range(100):
        damaged = mutated(rng, whole)
        # A change in the seed or a class name gives another, valid manifest; one in the list never does.
        assert not try_to_read(damaged) or damaged.split(b"\n", 1)[1] == whole.split(b"\n", 1)[1]


@pytest.mark.parametrize("seed", range(5))
def test_mutations_behind_a_right_hash_are_refused_or_are_manifests(seed):
    rng = np.random.default_rng(seed)
    whole = small("continual", corruptions=["fog"]).to_bytes()
    first, text = whole.split(b"\n", 1)
    accepted = 0
    for _ in range(100):
        damaged = mutated(rng, text)
        head = re_hashed(first, damaged)
        accepted += try_to_read(head + b"\n" + damaged)
    assert accepted < 100


def re_hashed(first, text):
    content = json.loads(first)
    content["sha256"] = hashlib.sha256(text).hexdigest()
    content["samples"] = max(text.count(b"\n"), 1)
    content["segments"][-1]["length"] = content["samples"] - content["segments"][-1]["start"]
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(st.data())
def test_any_value_anywhere_in_the_header_is_refused_or_fits(data):
    content = good_header()
    place, key = content, data.draw(st.sampled_from(sorted(content)))
    while isinstance(place[key], list | dict) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(HOSTILE)
    try_to_read(spelled(content, WHOLE.split(b"\n", 1)[1]))


def peak_memory(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_hostile_file_costs_no_more_memory_than_a_few_times_its_size(tmp_path):
    texts = {
        "one endless line": b"1" * 1_000_000 + b"\n",
        "many short tokens": b"1 " * 500_000 + b"\n",
        "only newlines": b"\n" * 1_000_000,
        "valid lines": b"0 0 0\n" * 175_000,
    }
    for name, text in texts.items():
        content = {**good_header(), "samples": text.count(b"\n")}
        data = spelled(content, text)
        assert peak_memory(lambda data=data: try_to_read(data)) < 25 * len(data), name
    brackets = spelled({**good_header(), "classes": [[]] * 325_000})
    assert peak_memory(lambda: try_to_read(brackets)) < 60 * len(brackets)


def test_a_file_too_large_to_be_a_manifest_is_refused_without_being_read(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 31)

    def load():
        with pytest.raises(DataError, match="it is not a manifest"):
            Manifest.load(path)

    assert peak_memory(load) < 1_000_000


# ---- verify

SOURCES = {"animals": KNOWN, "digits": UNKNOWN}


def test_the_sources_of_a_stream_verify():
    for protocol in protocols():
        small(protocol).verify(SOURCES)
    small("no-unknown").verify({"animals": KNOWN})
    assert isinstance(KNOWN, ImageSource)


def faked(source, **changes):
    """A source with some of its answers replaced."""
    kind = type("Faked", (Images,), {"fingerprint": changes.pop("fingerprint", source.fingerprint)})
    return kind(
        changes.pop("name", source.name), changes.pop("labels", source.labels), changes.pop("classes", source.classes)
    )


MISMATCHES = {
    "absent": ({"animals": KNOWN}, "needs the source 'digits'; given: animals"),
    "none": ({}, "needs the source 'animals'; given: none"),
    "another name": ({**SOURCES, "digits": faked(UNKNOWN, name="svhn")}, "calls itself 'svhn'"),
    "another size": (
        {**SOURCES, "digits": faked(UNKNOWN, labels=[0] * 91)},
        "'digits' has 91 images, the stream was made from 90",
    ),
    "another content": (
        {**SOURCES, "digits": faked(UNKNOWN, fingerprint="0" * 64)},
        "same name and size, other images or labels",
    ),
    "other labels": ({**SOURCES, "animals": faked(KNOWN, labels=(KNOWN.labels + 1) % 5)}, "120 samples differ"),
    "other classes": ({**SOURCES, "animals": faked(KNOWN, classes=ANIMALS[::-1])}, "in the manifest and"),
    "no labels": ({**SOURCES, "animals": faked(KNOWN, labels=[-1] * 60)}, "120 samples differ"),
    "labels beyond": ({**SOURCES, "animals": faked(KNOWN, labels=[9] * 60)}, "outside its 5 classes"),
    "too few labels": ({**SOURCES, "animals": faked(KNOWN, labels=KNOWN.labels[:, None])}, r"shape \(60, 1\)"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_other_sources_do_not_verify(case):
    sources, message = MISMATCHES[case]
    with pytest.raises(DataError, match=message):
        small("continual").verify(sources)


def test_a_known_image_listed_as_unknown_does_not_verify():
    split = build("continual", KNOWN, None, 0, ["fog"], classes=["cat"], rest="unknown")
    split.verify(SOURCES)
    index = split.index.copy()
    index[split.source == 1] = np.flatnonzero(KNOWN.labels == 0)[0]
    with pytest.raises(DataError, match="has the label -1 in the manifest and 0 in the source"):
        rebuilt(split, index=index).verify(SOURCES)


# ---- summary


def test_a_summary_counts_what_the_stream_holds_and_is_ready_for_json():
    manifest = build("unient", KNOWN, UNKNOWN, 5, ["fog", None], 3, batch=6, known_count=6)
    report = json.loads(json.dumps(summary(manifest)))
    assert report["hash"] == manifest.hash
    assert (report["protocol"], report["seed"], report["options"]) == ("unient", 5, dict(manifest.options))
    assert (report["samples"], report["known"], report["unknown"]) == (24, 12, 12)
    assert report["share_of_unknown"] == 0.5
    assert [(entry["name"], entry["samples"]) for entry in report["sources"]] == [("animals", 12), ("digits", 12)]
    assert [(e["corruption"], e["start"], e["known"], e["unknown"]) for e in report["segments"]] == [
        ("fog", 0, 6, 6),
        (None, 12, 6, 6),
    ]
    assert (report["mean_run_of_unknown"], report["longest_run_of_unknown"]) == (3.0, 3)
    assert report["classes"] == list(ANIMALS)
    assert summary(small("no-unknown"))["mean_run_of_unknown"] == 0.0


# ---- the paper's size


def test_building_saving_and_loading_the_paper_stream_takes_seconds_of_cpu(tmp_path):
    known = Images("cifar10-test", np.arange(10_000) % 10, [f"class {n}" for n in range(10)])
    unknown = Images("svhn-test", np.arange(26_032) % 10, "0123456789")
    started = time.thread_time()
    manifest = build("continual", known, unknown, 0)
    built = time.thread_time()
    manifest.save(tmp_path / "stream.txt")
    saved = time.thread_time()
    again = Manifest.load(tmp_path / "stream.txt")
    loaded = time.thread_time()
    print(
        f"{len(manifest)} samples, {(tmp_path / 'stream.txt').stat().st_size} bytes: built in {built - started:.2f} s,"
        f" saved in {saved - built:.2f} s, loaded in {loaded - saved:.2f} s"
    )
    assert len(manifest) == 15 * 36_032
    assert loaded - started < 30
    assert np.array_equal(rows(again), rows(manifest))


def test_the_paper_s_stream_of_the_real_sets_holds_each_image_once_per_corruption(data_folder):
    parquet = pytest.importorskip("pyarrow.parquet")

    def real(name, file, classes):
        labels = parquet.read_table(data_folder / file, columns=["label"])["label"].to_numpy()
        return Images(name, labels, classes)

    cifar = real("cifar10-test", "cifar10_test.parquet", [f"class {n}" for n in range(10)])
    svhn = real("svhn-test", "svhn_test.parquet", "0123456789")
    manifest = build("continual", cifar, svhn, 0)
    assert [(e["known"], e["unknown"]) for e in summary(manifest)["segments"]] == [(10_000, 26_032)] * 15
    for segment in manifest.segments:
        for number, size in enumerate((10_000, 26_032)):
            inside = manifest.index[segment.rows][manifest.source[segment.rows] == number]
            assert np.array_equal(np.sort(inside), np.arange(size))
    manifest.verify({"cifar10-test": cifar, "svhn-test": svhn})
    legacy = build("unient", cifar, svhn, 0)
    assert len(legacy) == 15 * 20_000
    assert legacy.index[legacy.source == 1].max() == 9_999
    stamp = build("stamp-4to1", cifar, svhn, 0)
    assert {(e["known"], e["unknown"]) for e in summary(stamp)["segments"]} == {(10_000, 2_500)}


def test_limits_leave_room_for_the_largest_streams_in_use():
    # 50,000 ImageNet images with as many unknown ones under 15 corruptions.
    assert header.MOST_SAMPLES >= 15 * 100_000
    longest = listing.write(np.array([[header.MOST_SOURCES - 1, header.LARGEST_NUMBER, 9_999_999]]))
    assert len(longest) <= listing.LONGEST_LINE
    assert Origin("x", "0" * 64, header.LARGEST_NUMBER, "known").size == header.LARGEST_NUMBER


# ---- the command


def command(*arguments):
    given = [sys.executable, "-m", "protodcs", "bench", "manifest", *arguments]
    return subprocess.run(given, capture_output=True, text=True, check=False)


def test_the_command_writes_the_manifest_that_build_gives(tmp_path, data_folder):
    from protodcs.data import open_source

    file = tmp_path / "stream.txt"
    done = command(
        *("bursty", str(file), "--known", "cifar10-test", "--unknown", "svhn-test", "--corruptions", "clean,fog"),
        *("--seed", "3", "--option", "mean_burst=7", "--option", "ratio=1/5", "--json"),
    )
    assert done.returncode == 0, done.stderr
    sources = open_source("cifar10-test"), [open_source("svhn-test")]
    expected = build("bursty", *sources, 3, [None, "fog"], mean_burst="7", ratio="1/5")
    assert Manifest.load(file) == expected
    assert json.loads(done.stdout)["hash"] == expected.hash


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quantum", "x", "--known", "cifar10-test"], "there is no protocol"),
        (["reset", "x", "--known", "cifar10-test", "--option", "ratio"], "name=value"),
        (["reset", "x", "--known", "cifar10-test", "--option", "seed=1"], "name=value"),
        (["reset", "x", "--known", "mars-test"], "mars-test"),
        (["reset", "x", "--known", "cifar10-test", "--corruptions", "rain"], "rain"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(arguments, words, data_folder):
    done = command(*arguments)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
