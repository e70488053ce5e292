"""What every registered image method must do, selected by what it adapts."""

import copy
import gc

import numpy as np
import pytest

from protodcs import encoders
from protodcs.errors import ConfigError, InputError, UsageError
from protodcs.methods import images as image_methods

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

METHODS = image_methods.names()
TOWER_METHODS = [name for name in METHODS if image_methods.REGISTER[name].kind == "images"]
# Small, and open to every sample: a random tower is sure of nothing.
OPTIONS = {
    "tent": {"batch_size": 8},
    "eta": {"batch_size": 8, "margin": 1.0, "redundancy": 1.0},
    "sar": {"batch_size": 8, "margin": 1.0, "restart": 0.0},
    "unient": {"batch_size": 8},
    "clipartt": {"batch_size": 8, "steps": 3},
    "stamp": {"batch_size": 8, "margin": 1.0, "views": 2, "memory_size": 8},
    "rosita": {"batch_size": 8, "neighbours": 1},
    "tpt": {"views": 8},
    "ctpt": {"views": 8},
    "unient_tpt": {"batch_size": 8},
}
BESIDE = {"clip": {}, "mini": {"clipartt": {"joined": "mean"}}}
CLASSES = ["cat", "dog", "deer", "frog"]
COLUMNS = (
    "known", "index", "p_unknown", "openness", "openness_first", "score", "aleatoric", "epistemic", "trusted",
    "cached", "evolved", "sequence", "scores",
)  # fmt: skip

every_method = pytest.mark.parametrize("name", METHODS)
every_tower_method = pytest.mark.parametrize("name", TOWER_METHODS)
# The mini encoder has no text tower that could be adapted.
every_pair = pytest.mark.parametrize(
    ("name", "kind"), [(name, "clip") for name in METHODS] + [(name, "mini") for name in TOWER_METHODS]
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.tiny_clip(folder / "clip")
    return folder / "clip"


@pytest.fixture
def load(tiny_folder, tmp_path, monkeypatch, request):
    """`load(kind)`: a new encoder; mini has batch norms, the small CLIP has layer norms."""
    monkeypatch.setenv("PROTODCS_CACHE", str(tmp_path / "cache"))

    def loaded(kind):
        if kind == "clip":
            return encoders.load(tiny_folder, device="cpu")
        request.getfixturevalue("data_folder")
        return encoders.load("mini", device="cpu")

    return loaded


def make(name, kind, encoder, **options):
    given = {**OPTIONS.get(name, {}), **BESIDE[kind].get(name, {}), **options}
    return image_methods.create(name, encoder, CLASSES, **given)


def pictures(count, seed=0):
    """Coarse patterns of colour under a little noise, of odd sizes."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, size=(count, 4, 4, 3))
    return [
        np.clip(np.kron(picture, np.ones((9, 8, 1))) + rng.normal(0, 9, (36, 32, 3)), 0, 255).astype(np.uint8)
        for picture in coarse
    ]


def batches(method, count, seed=0):
    size = method.batch_size
    stream = pictures(count * size, seed)
    return [stream[start : start + size] for start in range(0, len(stream), size)]


def modules(encoder):
    """Every torch module behind an encoder."""
    found = [encoder.image_tower.module]
    texts = getattr(getattr(encoder.text_tower, "sentences", None), "model", None)
    return found + ([texts] if isinstance(texts, torch.nn.Module) else [])


def picture_of(encoder):
    """All values, flags and modes of an encoder."""
    values, about = {}, {}
    for number, module in enumerate(modules(encoder)):
        for key, tensor in module.state_dict().items():
            values[number, key] = tensor.detach().clone()
        for key, parameter in module.named_parameters():
            about[number, key] = (parameter.requires_grad, parameter.grad is None)
        for key, part in module.named_modules():
            about[number, key, "module"] = (part.training, getattr(part, "track_running_stats", None))
    return values, about


def changed(before, after):
    assert before[1] == after[1]
    assert before[0].keys() == after[0].keys()
    return {key for key, value in before[0].items() if not torch.equal(value, after[0][key])}


def norm_parameters(encoder):
    types = (torch.nn.LayerNorm, torch.nn.BatchNorm2d)
    return {
        (number, f"{path}.{which}")
        for number, module in enumerate(modules(encoder))
        for path, part in module.named_modules()
        if isinstance(part, types) and not (number == 1 and "text" in path)
        for which in ("weight", "bias")
    }


def assert_same(first, second):
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(first, column), getattr(second, column), err_msg=column)


def assert_sound(decisions, count, sequence):
    assert len(decisions) == count
    np.testing.assert_array_equal(decisions.sequence, np.arange(sequence, sequence + count))
    for column in COLUMNS:
        values = getattr(decisions, column)
        assert len(values) == count
        assert np.isfinite(values).all(), column
    assert decisions.scores.dtype == np.float32
    assert ((decisions.p_unknown >= 0) & (decisions.p_unknown <= 1)).all()
    assert ((decisions.openness > -1e-5) & (decisions.openness < 2 + 1e-5)).all()


@every_pair
def test_only_the_intended_parameters_change_and_they_do(name, kind, load):
    encoder = load(kind)
    before = picture_of(encoder)
    method = make(name, kind, encoder)
    assert not changed(before, picture_of(encoder))
    for batch in batches(method, 2):
        method.observe_batch(batch)
    different = changed(before, picture_of(encoder))
    if method.kind == "images":
        assert different
        assert different <= norm_parameters(encoder)
    else:
        assert not different


@every_pair
def test_reset_gives_back_every_bit_and_flag(name, kind, load):
    encoder = load(kind)
    before = picture_of(encoder)
    method = make(name, kind, encoder)
    for batch in batches(method, 2):
        method.observe_batch(batch)
    method.reset()
    assert not changed(before, picture_of(encoder))


@every_pair
def test_a_stream_repeats_to_the_bit_after_reset_and_in_a_second_method(name, kind, load):
    encoder = load(kind)
    method = make(name, kind, encoder)
    # Another stream first: nothing of it may be left.
    for batch in batches(method, 1, seed=9):
        method.observe_batch(batch)
    method.reset()
    first = [method.observe_batch(batch) for batch in batches(method, 2)]
    method.reset()
    second = [method.observe_batch(batch) for batch in batches(method, 2)]
    other = make(name, kind, load(kind))
    third = [other.observe_batch(batch) for batch in batches(other, 2)]
    for a, b, c in zip(first, second, third, strict=True):
        assert_same(a, b)
        assert_same(a, c)


@every_pair
def test_every_image_has_a_row_and_the_sequence_goes_on(name, kind, load):
    method = make(name, kind, load(kind))
    sequence = 0
    for batch in [*batches(method, 2), pictures(1, seed=3)]:
        decisions = method.observe_batch(batch)
        assert_sound(decisions, len(batch), sequence)
        probabilities = method.probabilities(decisions.scores)
        np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
        np.testing.assert_array_equal(probabilities.argmax(axis=1), decisions.index)
        sequence += len(batch)
    assert decisions.classes == tuple(CLASSES)
    assert method.score_name
    method.reset()
    assert method.observe_batch(pictures(1)).sequence[0] == 0


@every_pair
def test_batches_that_invite_nan_are_survived(name, kind, load):
    method = make(name, kind, load(kind), temperature=0.002)
    size = method.batch_size
    black, white = np.zeros((32, 32, 3), dtype=np.uint8), np.full((32, 32, 3), 255, dtype=np.uint8)
    hostile = [
        [black],
        [pictures(1)[0]],
        [black] * size,
        [white] * size,
        [pictures(1)[0]] * size,
        # All alike but one: a mixture of one side.
        [*[black] * (size - 1), white],
        pictures(size),
        [np.zeros((1, 1, 3), dtype=np.uint8)] * min(size, 2),
        pictures(min(size, 3)),
    ]
    sequence = 0
    for batch in hostile:
        assert_sound(method.observe_batch(batch), len(batch), sequence)
        sequence += len(batch)


@pytest.mark.parametrize("kind", ["clip", "mini"])
@every_tower_method
def test_the_loss_falls_on_a_repeated_batch(name, kind, load):
    encoder = load(kind)
    if name == "clipartt":  # Starts anew for every batch: what falls is the loss within it.
        losses = []
        for steps in (1, 6):
            method = make(name, kind, encoder, steps=steps)
            method.observe_batch(pictures(8))
            losses.append(method.stats()["loss"])
            method.close()
    else:
        own = {
            "sar": {"rate": 0.01},
            # Without views the memory is the batch itself, over and over.
            "stamp": {"rate": 0.01, "views": 0, "memory_size": 48},
            # Without banks the loss is the same sum from the first batch on.
            "rosita": {"rate": 0.2, "contrast_weight": 0.0},
        }
        method = make(name, kind, encoder, **own.get(name, {"rate": 1e-3}))
        losses = []
        for _ in range(6):
            method.observe_batch(pictures(8))
            losses.append(method.stats()["loss"])
    assert losses[-1] < losses[0]


@every_method
def test_chance_comes_from_no_global_generator(name, load):
    method = make(name, "clip", load("clip"))
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    for batch in batches(method, 2):
        method.observe_batch(batch)
    assert torch.equal(torch_before, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


@every_method
def test_an_encoder_without_torch_is_refused_in_words(name, load):
    encoder = load("clip")
    exported = copy.copy(encoder)
    exported.back_end = "onnx"
    exported.image_tower = encoder.image_tower.__call__
    exported.text_tower = copy.copy(encoder.text_tower)
    object.__setattr__(exported.text_tower, "sentences", encoder.text_tower.sentences.__call__)
    with pytest.raises(UsageError, match=r"transformers"):
        make(name, "clip", exported)


@every_method
def test_a_wrong_option_is_told_in_words(name, load):
    encoder = load("clip")
    with pytest.raises(ConfigError, match="no_such_option"):
        make(name, "clip", encoder, no_such_option=1)
    with pytest.raises(ConfigError, match="batch_size"):
        make(name, "clip", encoder, batch_size=0)
    other = next(image_methods.REGISTER[known] for known in METHODS if known != name)
    with pytest.raises(ConfigError, match="Config"):
        image_methods.REGISTER[name](encoder, CLASSES, other.config_type())


@every_method
def test_a_batch_that_cannot_be_used_is_refused_and_changes_nothing(name, load):
    encoder = load("clip")
    method = make(name, "clip", encoder)
    before = picture_of(encoder)
    for batch, words in (
        (pictures(method.batch_size + 1), "batch_size"),
        ([], "images"),
        ([np.zeros((8, 8, 3))], "uint8"),
        ([np.zeros((8, 8), dtype=np.uint8)], "uint8"),
    ):
        with pytest.raises(InputError, match=words):
            method.observe_batch(batch)
    assert not changed(before, picture_of(encoder))
    assert method.observe_batch(pictures(1)).sequence[0] == 0


@every_method
def test_a_threshold_on_the_score_decides_what_is_known(name, load):
    scores = make(name, "clip", load("clip")).observe_batch(batches_of_one_kind(name)).score
    middle = float(np.median(scores))
    decisions = make(name, "clip", load("clip"), threshold=middle).observe_batch(batches_of_one_kind(name))
    np.testing.assert_array_equal(decisions.known, decisions.score >= middle)
    np.testing.assert_array_equal(decisions.p_unknown >= 0.5, ~decisions.known)


def batches_of_one_kind(name):
    return pictures(OPTIONS.get(name, {}).get("batch_size", 1), seed=5)


@every_tower_method
def test_an_encoder_belongs_to_one_method_until_it_is_closed_or_gone(name, load):
    encoder = load("clip")
    before = picture_of(encoder)
    method = make(name, "clip", encoder)
    with pytest.raises(UsageError, match=r"close\(\)"):
        make(name, "clip", encoder)
    method.observe_batch(pictures(8))
    method.reset()
    with pytest.raises(UsageError, match=r"close\(\)"):
        make(name, "clip", encoder)
    method.observe_batch(pictures(8))
    method.close()
    assert not changed(before, picture_of(encoder))
    for call in (method.reset, lambda: method.observe_batch(pictures(1))):
        with pytest.raises(UsageError, match="closed"):
            call()
    second = make(name, "clip", encoder)
    second.observe_batch(pictures(8))
    del second
    gc.collect()
    assert not changed(before, picture_of(encoder))
    make(name, "clip", encoder).close()


@every_tower_method
def test_an_interruption_leaves_flags_as_they_were_and_asks_for_a_reset(name, load, monkeypatch):
    encoder = load("clip")
    before = picture_of(encoder)
    plain = encoder.image_tower.forward
    calls = []

    def interrupted(pixels):
        calls.append(len(pixels))
        if len(calls) == stop:
            raise KeyboardInterrupt
        return plain(pixels)

    encoder.image_tower.forward = interrupted
    stop = 0
    method = make(name, "clip", encoder)
    calls.clear()
    method.observe_batch(pictures(8))
    # Interrupted at the last pass of a batch, where a sharpness-aware step is at its edge.
    stop = len(calls)
    method.reset()
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        method.observe_batch(pictures(8))
    assert picture_of(encoder)[1] == before[1]
    with pytest.raises(UsageError, match="reset"):
        method.observe_batch(pictures(8))
    method.reset()
    assert not changed(before, picture_of(encoder))
    method.observe_batch(pictures(8))


@every_tower_method
def test_parameters_that_are_lost_start_again_from_the_source(name, load):
    encoder = load("clip")
    method = make(name, "clip", encoder)
    method.observe_batch(pictures(8))
    with torch.no_grad():
        for parameter in method._tower.parameters:
            parameter.fill_(float("nan"))
    assert_sound(method.observe_batch(pictures(8)), 8, 8)
    assert_sound(method.observe_batch(pictures(8)), 8, 16)
    assert all(torch.isfinite(parameter).all() for parameter in method._tower.parameters)
