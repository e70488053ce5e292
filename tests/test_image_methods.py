"""The maths of the methods that train an image tower, each against a slow and separate way to the same numbers."""

import math
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protodcs.errors import ConfigError, InputError, UsageError

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from protodcs.methods.images import create  # noqa: E402
from protodcs.methods.images.answer import log_scores, softmax  # noqa: E402
from protodcs.methods.images.clipartt import target_matrix  # noqa: E402
from protodcs.methods.images.rosita import Bank  # noqa: E402
from protodcs.methods.images.stamp import BalancedMemory, self_weighted  # noqa: E402
from protodcs.methods.images.tower import AdaptedTower, climbed, entropies, entropy_of_mean  # noqa: E402
from protodcs.methods.images.unient import batch_posteriors  # noqa: E402

WIDTH, SIDE, CLASSES = 12, 8, [f"class {k}" for k in range(5)]


class Norms(nn.Module):
    """Norm layers of all kinds, none named so, registered in another order than they run; one of them never runs."""

    def __init__(self):
        super().__init__()
        self.last = nn.LayerNorm(WIDTH)
        self.idle_norm = nn.LayerNorm(WIDTH)
        self.a = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.b = nn.BatchNorm2d(8)
        self.c = nn.GroupNorm(2, 8)
        self.d = nn.Linear(8 * 16, WIDTH)
        self.e = nn.RMSNorm(WIDTH)
        self.norm_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, pixels):
        x = torch.relu(self.c(self.b(self.a(pixels))))
        return self.norm_out(self.last(torch.tanh(self.e(self.d(x.flatten(1))))))


class Layered(nn.Module):
    """Eight layer norms in a row."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(3 * SIDE * SIDE, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(8))

    def forward(self, pixels):
        x = self.enter(pixels.flatten(1))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


class StandIn:
    """As much of a dual encoder as a tower method uses, with texts that are plain random directions."""

    name, back_end = "stand-in", "torch"

    def __init__(self, module, logit_scale=20.0):
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.6)
        module.eval().requires_grad_(False)
        self.logit_scale = logit_scale
        self.image_tower = SimpleNamespace(
            module=module, forward=module.__call__, device=torch.device("cpu"), dtype=torch.float32
        )
        self.preprocessing = SimpleNamespace(fitted=self._fitted, normalised=self._normalised)
        self.sentences = []

    def _fitted(self, images):
        return np.stack([np.resize(image, (SIDE, SIDE, 3)) for image in images])

    def _normalised(self, batch):
        return np.ascontiguousarray((batch.astype(np.float32) / 127.5 - 1).transpose(0, 3, 1, 2))

    def prototypes(self, classes):
        return directions(len(classes), seed=1)

    def encode_texts(self, sentences):
        self.sentences.extend(sentences)
        return np.stack([directions(1, seed=len(sentence) + sum(sentence.encode()))[0] for sentence in sentences])


def directions(count, seed):
    rows = np.random.default_rng(seed).normal(size=(count, WIDTH))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def pictures(count, seed=0):
    return list(np.random.default_rng(seed).integers(0, 256, size=(count, SIDE, SIDE, 3), dtype=np.uint8))


def reference_logits(encoder, images, scale):
    """(N, K) logits of the tower as it is now, by the module's own forward pass."""
    features = encoder.image_tower.module(torch.from_numpy(encoder._normalised(np.stack(images))))
    unit = features / features.norm(dim=1, keepdim=True)
    return unit @ torch.from_numpy(encoder.prototypes(CLASSES)).T * scale


def slow_entropies(logits):
    """One sample at a time, in float64."""
    found = []
    for row in np.asarray(logits, dtype=np.float64):
        grown = [math.exp(value - row.max()) for value in row]
        found.append(-sum(g / sum(grown) * math.log(g / sum(grown)) for g in grown))
    return np.array(found)


def values(parameters):
    return [parameter.detach().clone() for parameter in parameters]


def slopes_of(loss, parameters):
    return torch.autograd.grad(loss, parameters)


# What they share.


def test_entropies_equal_those_counted_one_by_one():
    logits = torch.from_numpy(np.random.default_rng(0).normal(scale=5, size=(20, 7)))
    np.testing.assert_allclose(entropies(logits), slow_entropies(logits), rtol=1e-10)
    mean = np.mean([np.exp(row) / np.exp(row).sum() for row in logits.numpy()], axis=0)
    np.testing.assert_allclose(entropy_of_mean(logits), -(mean * np.log(mean)).sum(), rtol=1e-10)


def test_entropies_and_their_slopes_stay_finite_where_probabilities_vanish():
    logits = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]], requires_grad=True)
    (entropies(logits).sum() + entropy_of_mean(logits)).backward()
    assert torch.isfinite(logits.grad).all()
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    entropy_of_mean(logits).backward()
    assert torch.isfinite(logits.grad).all()


def test_norm_layers_are_found_by_type_in_the_order_in_which_images_meet_them():
    module = Norms()
    tower = AdaptedTower(StandIn(module), CLASSES)
    assert tower.layers == [module.b, module.c, module.e, module.last]
    expected = [
        module.b.weight, module.b.bias, module.c.weight, module.c.bias, module.e.weight,
        module.last.weight, module.last.bias,
    ]  # fmt: skip
    assert [id(parameter) for parameter in tower.parameters] == [id(parameter) for parameter in expected]


@pytest.mark.parametrize(("share", "trained"), [(0.0, 8), (0.25, 6), (0.26, 5), (0.99, 1)])
def test_the_top_is_skipped_by_depth(share, trained):
    module = Layered()
    tower = AdaptedTower(StandIn(module), CLASSES, share)
    assert tower.trained == [block[0] for block in module.blocks[:trained]]


def test_a_tower_without_norms_and_one_in_half_precision_are_refused():
    with pytest.raises(UsageError, match="norm layers"):
        create("tent", StandIn(nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, WIDTH))), CLASSES)
    coarse = StandIn(Layered())
    coarse.image_tower.dtype = torch.float16
    with pytest.raises(UsageError, match="float32"):
        create("tent", coarse, CLASSES)


def test_batch_norms_see_their_batch_and_a_single_image_sees_the_running_statistics():
    module = Norms()
    encoder = StandIn(module)
    module.b.running_mean.normal_()
    module.b.running_var.uniform_(0.5, 2)
    running = values([module.b.running_mean, module.b.running_var])
    tower = AdaptedTower(encoder, CLASSES)
    pixels = tower.pixels(np.stack(pictures(6)))
    expected = nn.functional.normalize(module(pixels[:1]), dim=1)
    torch.testing.assert_close(tower.features(pixels[:1]), expected)
    module.b.train()
    expected = nn.functional.normalize(module(pixels), dim=1)
    module.b.eval()
    module.b.running_mean.copy_(running[0])
    module.b.running_var.copy_(running[1])
    torch.testing.assert_close(tower.features(pixels), expected)
    assert torch.equal(module.b.running_mean, running[0])
    assert torch.equal(module.b.running_var, running[1])


def test_climbing_goes_uphill_by_the_radius_and_comes_back_to_the_bit():
    parameters = [torch.randn(4), torch.randn(3, 2)]
    slopes = [torch.randn(4), torch.randn(3, 2)]
    before = values(parameters)
    with climbed(parameters, slopes, 0.05):
        moves = torch.cat([(now - then).flatten() for now, then in zip(parameters, before, strict=True)])
        assert float(moves.norm()) == pytest.approx(0.05, rel=1e-4)
        direction = torch.cat([slope.flatten() for slope in slopes])
        assert float(moves @ direction / moves.norm() / direction.norm()) == pytest.approx(1.0, abs=1e-5)
    assert all(torch.equal(now, then) for now, then in zip(parameters, before, strict=True))


def test_the_temperature_is_the_encoders_unless_told():
    assert create("tent", StandIn(Layered(), 25.0), CLASSES).temperature == pytest.approx(0.04)
    assert create("tent", StandIn(Layered(), 25.0), CLASSES, temperature=0.5).temperature == 0.5


def test_log_scores_give_their_probabilities_back():
    probabilities = np.random.default_rng(0).dirichlet(np.ones(5), size=4)
    np.testing.assert_allclose(softmax(log_scores(probabilities, 0.03), 0.03), probabilities, rtol=1e-9)
    np.testing.assert_allclose(softmax(log_scores(np.eye(3), 0.03), 0.03), np.eye(3), atol=1e-12)


# TENT.


def test_tent_makes_the_step_of_adam_and_answers_as_it_was_before():
    encoder = StandIn(Layered())
    method = create("tent", encoder, CLASSES, rate=0.01, batch_size=6)
    parameters = method._tower.parameters
    for parameter in parameters:
        parameter.requires_grad_(True)
    logits = reference_logits(encoder, pictures(6), 20.0)
    probabilities = logits.softmax(dim=1)
    loss = -(probabilities * probabilities.log()).sum(dim=1).mean()
    slopes, before = slopes_of(loss, parameters), values(parameters)
    decisions = method.observe_batch(pictures(6))
    np.testing.assert_allclose(decisions.scores, logits.detach() / 20, atol=1e-5)
    np.testing.assert_allclose(decisions.score, torch.logsumexp(logits, dim=1).detach(), rtol=1e-4)
    assert method.stats()["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    for parameter, slope, then in zip(parameters, slopes, before, strict=True):
        # The first step of Adam is the slope over its own size.
        torch.testing.assert_close(parameter.detach(), then - 0.01 * slope / (slope.abs() + 1e-8), atol=1e-4, rtol=0)


def test_an_episodic_tent_forgets_between_batches_and_answers_after_its_steps():
    first = create("tent", StandIn(Layered()), CLASSES, rate=0.01, episodic=True, steps=3)
    first.observe_batch(pictures(6, seed=1))
    later = first.observe_batch(pictures(6))
    fresh = create("tent", StandIn(Layered()), CLASSES, rate=0.01, episodic=True, steps=3).observe_batch(pictures(6))
    np.testing.assert_array_equal(later.scores, fresh.scores)
    frozen = create("tent", StandIn(Layered()), CLASSES).observe_batch(pictures(6))
    np.testing.assert_allclose(fresh.openness_first, frozen.openness, atol=1e-6)
    assert not np.allclose(fresh.openness, frozen.openness, atol=1e-4)
    with pytest.raises(ConfigError, match="frozen"):
        create("tent", StandIn(Layered()), CLASSES, episodic=True, answer="before")


# ETA.


def test_eta_keeps_what_is_sure_and_new_and_follows_what_it_kept():
    method = create("eta", StandIn(Layered()), CLASSES, margin=0.6, redundancy=0.7, momentum=0.8)
    rng = np.random.default_rng(3)
    running, bound = None, 0.6 * math.log(5)
    for _ in range(4):
        logits = rng.normal(scale=2.5, size=(30, 5))
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        expected = []
        for entropy, row in zip(slow_entropies(logits), probabilities, strict=True):
            new = running is None or abs(row @ running / np.linalg.norm(row) / np.linalg.norm(running)) < 0.7
            expected.append(entropy < bound and new)
        assert 0 < sum(expected) < 30
        mean = probabilities[expected].mean(axis=0)
        running = mean if running is None else 0.8 * running + 0.2 * mean
        tensors = torch.from_numpy(logits)
        kept = method._keep(entropies(tensors), tensors.softmax(dim=1))
        assert kept.tolist() == expected
        np.testing.assert_allclose(method._running, running)


def test_eta_weighs_sure_samples_more_and_learns_from_no_other():
    encoder = StandIn(Layered())
    method = create("eta", encoder, CLASSES, margin=0.5)
    entropy = slow_entropies(reference_logits(encoder, pictures(20), 20.0).numpy())
    bound = 0.5 * math.log(5)
    kept = entropy < bound
    assert 0 < kept.sum() < 20
    decisions = method.observe_batch(pictures(20))
    np.testing.assert_array_equal(decisions.trusted, kept)
    expected = (np.exp(bound - entropy[kept]) * entropy[kept]).mean()
    assert method.stats()["loss"] == pytest.approx(expected, rel=1e-4)


def test_eta_and_sar_make_no_step_where_no_sample_is_kept():
    for name in ("eta", "sar"):
        method = create(name, StandIn(Layered()), CLASSES, margin=1e-9)
        before = values(method._tower.parameters)
        decisions = method.observe_batch(pictures(9))
        assert not decisions.trusted.any()
        assert method.stats()["steps"] == 0
        assert all(torch.equal(a, b) for a, b in zip(before, method._tower.parameters, strict=True))


def test_the_redundancy_of_eta_follows_the_number_of_classes():
    found = []
    for count in (10, 11, 100, 101):
        found.append(create("eta", StandIn(Layered()), [str(k) for k in range(count)])._redundancy())
    assert found == [0.4, 0.1, 0.1, 0.05]


# SAR.


def test_sar_descends_the_slope_that_it_finds_uphill():
    encoder = StandIn(Layered())
    method = create("sar", encoder, CLASSES, margin=0.3, rate=0.05, radius=0.5, restart=0.0)
    parameters = method._tower.parameters
    for parameter in parameters:
        parameter.requires_grad_(True)
    before, bound = values(parameters), 0.3 * math.log(5)

    def slow_loss(kept):
        logits = reference_logits(encoder, pictures(20), 20.0)
        entropy = -(logits.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1)
        kept = kept & (entropy.detach() < bound)
        return entropy[kept].mean(), kept

    loss, kept_first = slow_loss(torch.ones(20, dtype=torch.bool))
    uphill = slopes_of(loss, parameters)
    length = math.sqrt(sum(float((slope**2).sum()) for slope in uphill))
    with torch.no_grad():
        for parameter, slope in zip(parameters, uphill, strict=True):
            parameter += 0.5 * slope / length
    loss, kept = slow_loss(kept_first)
    slopes = slopes_of(loss, parameters)
    assert 0 < kept.sum() < kept_first.sum() < 20
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
    decisions = method.observe_batch(pictures(20))
    np.testing.assert_array_equal(decisions.trusted, kept)
    assert method.stats()["loss"] == pytest.approx(float(loss.detach()), rel=1e-3)
    for parameter, slope, then in zip(parameters, slopes, before, strict=True):
        torch.testing.assert_close(parameter.detach(), then - 0.05 * slope, atol=1e-5, rtol=1e-3)


def test_sar_starts_again_once_the_running_loss_is_too_low():
    method = create("sar", StandIn(Layered()), CLASSES, restart=0.5, loss_momentum=0.9)
    before = values(method._tower.parameters)
    with torch.no_grad():
        method._tower.parameters[0].add_(1.0)
    for loss, running in ((1.0, 1.0), (0.0, 0.9), (0.0, 0.81), (0.0, 0.729), (0.0, 0.6561), (0.0, 0.59049)):
        method._follow(loss)
        assert method._running == pytest.approx(running)
    method._follow(0.0)
    assert method._running == pytest.approx(0.531441)
    assert not torch.equal(before[0], method._tower.parameters[0])
    method._follow(0.0)
    assert method._running is None
    assert method.stats()["restarts"] == 1
    assert torch.equal(before[0], method._tower.parameters[0])


def test_sar_scales_its_rate_with_the_batch():
    method = create("sar", StandIn(Layered()), CLASSES, batch_size=128)
    assert method._optimizer.param_groups[0]["lr"] == pytest.approx(0.002)


# UniEnt.


def test_the_posteriors_of_a_batch_equal_those_of_scikit_learn():
    mixtures = pytest.importorskip("sklearn.mixture")
    rng = np.random.default_rng(0)
    openness = np.concatenate([rng.normal(0.68, 0.02, 100), rng.normal(0.8, 0.03, 60)])
    scaled = (openness - openness.min()) / (openness.max() - openness.min())
    theirs = mixtures.GaussianMixture(2, random_state=0, tol=1e-3).fit(scaled[:, None])
    posterior = theirs.predict_proba(scaled[:, None])[:, int(theirs.means_.argmax())]
    ours = batch_posteriors(openness, 0.02)
    assert np.abs(ours - posterior).mean() < 0.01
    assert ((ours >= 0.5) == (posterior >= 0.5)).mean() > 0.98


@pytest.mark.parametrize(
    "openness",
    [np.full(50, 0.7), np.array([0.7]), np.array([0.7, 0.9]), np.array([0.7] * 99 + [0.9])],
    ids=["equal", "one", "two", "one side"],
)
def test_a_batch_without_a_mixture_counts_as_known(openness):
    assert batch_posteriors(openness, 0.02) is None
    method = create("unient", StandIn(Layered()), CLASSES)
    np.testing.assert_array_equal(method._posteriors(openness), np.zeros(len(openness)))
    assert method.stats()["failed_mixtures"] == 1


@pytest.mark.parametrize("weighting", ["split", "posterior"])
@pytest.mark.parametrize("kind", ["mixed", "all known", "all unknown"])
def test_the_loss_of_unient_equals_that_written_out(weighting, kind):
    rng = np.random.default_rng(1)
    logits = rng.normal(scale=2, size=(16, 5))
    unknown = {"mixed": rng.uniform(size=16), "all known": np.zeros(16), "all unknown": np.ones(16)}[kind]
    method = create(
        "unient", StandIn(Layered()), CLASSES, weighting=weighting, unknown_weight=0.3, diversity_weight=0.7
    )
    entropy = slow_entropies(logits)
    mean = np.mean([np.exp(row) / np.exp(row).sum() for row in logits], axis=0)
    if weighting == "posterior":
        known_part = sum((1 - p) * h for p, h in zip(unknown, entropy, strict=True)) / 16
        unknown_part = sum(p * h for p, h in zip(unknown, entropy, strict=True)) / 16
    else:
        known_part = entropy[unknown < 0.5].mean() if (unknown < 0.5).any() else 0.0
        unknown_part = entropy[unknown >= 0.5].mean() if (unknown >= 0.5).any() else 0.0
    expected = known_part - 0.3 * unknown_part + 0.7 * (mean * np.log(mean)).sum()
    assert float(method._objective(torch.from_numpy(logits), unknown)) == pytest.approx(expected, rel=1e-9)


def test_unient_takes_strangeness_from_the_source_tower_also_later_in_the_stream():
    method = create("unient", StandIn(Layered()), CLASSES, rate=0.05)
    first = method.observe_batch(pictures(40))
    method.observe_batch(pictures(40, seed=1))
    again = method.observe_batch(pictures(40))
    np.testing.assert_array_equal(first.openness_first, again.openness_first)
    np.testing.assert_array_equal(first.p_unknown, again.p_unknown)
    assert not np.allclose(first.openness, again.openness)
    np.testing.assert_array_equal(first.known, first.p_unknown < 0.5)
    assert 0 < first.known.sum() < 40


# CLIPArTT.


def test_the_target_matrix_equals_that_written_out():
    images, texts = directions(6, seed=2).astype(np.float64), directions(6, seed=3).astype(np.float64)
    expected = np.empty((6, 6))
    for i in range(6):
        row = [math.exp((images[i] @ images[j] + texts[i] @ texts[j]) / 2 / 0.1) for j in range(6)]
        expected[i] = np.array(row) / sum(row)
    found = target_matrix(torch.from_numpy(images), torch.from_numpy(texts), 0.1)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    method = create("clipartt", StandIn(Layered()), CLASSES, target_temperature=0.1, temperature=0.2)
    loss = 0.0
    for i in range(6):
        row = np.array([math.exp(texts[i] @ images[j] / 0.2) for j in range(6)])
        loss -= expected[i] @ np.log(row / row.sum()) / 6
    found = method._objective(torch.from_numpy(images), torch.from_numpy(texts))
    assert float(found) == pytest.approx(loss, rel=1e-9)


def test_sentences_join_the_likeliest_classes_and_are_encoded_once():
    encoder = StandIn(Layered())
    method = create("clipartt", encoder, CLASSES, steps=1)
    encoder.sentences.clear()
    cosines = torch.tensor([[0.1, 0.5, 0.2, 0.3, 0.0], [0.1, 0.5, 0.2, 0.3, 0.0], [0.9, 0.5, 0.2, 0.1, 0.0]])
    rows = method._joined(cosines)
    method._joined(cosines)
    sentences = [
        "a photo of a class 1 or class 3 or class 2",
        "a photo of a class 0 or class 1 or class 2",
    ]
    assert encoder.sentences == sentences
    np.testing.assert_array_equal(rows, encoder.encode_texts([sentences[0], sentences[0], sentences[1]]))


def test_clipartt_starts_every_batch_from_the_source():
    method = create("clipartt", StandIn(Layered()), CLASSES, steps=3)
    first = method.observe_batch(pictures(9))
    method.observe_batch(pictures(9, seed=4))
    np.testing.assert_array_equal(first.scores, method.observe_batch(pictures(9)).scores)


def test_an_encoder_without_sentences_is_told_what_to_do_and_stays_free():
    encoder = StandIn(Layered())

    def refuse(sentences):
        raise InputError("names only")

    encoder.encode_texts = refuse
    with pytest.raises(UsageError, match="joined='mean'"):
        create("clipartt", encoder, CLASSES)
    method = create("clipartt", encoder, CLASSES, joined="mean")
    assert len(method.observe_batch(pictures(3))) == 3
    with pytest.raises(ConfigError, match="template"):
        create("clipartt", encoder, CLASSES, template="a photo")


# STAMP.


@given(labels=st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12), size=st.integers(1, 7))
def test_the_memory_drops_the_oldest_of_the_class_that_held_most(labels, size):
    memory = BalancedMemory(4, size)
    kept, counts, number = [], np.zeros(4), 0
    for batch in labels:
        images = np.array([[[[number + i] * 3]] for i in range(len(batch))], dtype=np.uint8).reshape(-1, 1, 1, 3)
        memory.take(images, np.array(batch, dtype=np.int64))
        for label in batch:
            if len(kept) == size:
                there = {k for k, _ in kept}
                fullest = max(sorted(there), key=lambda k: (counts[k], -k))
                kept.remove(next(item for item in kept if item[0] == fullest))
            kept.append((label, number))
            number += 1
            counts = 0.9 * counts + 0.1 * np.bincount([k for k, _ in kept], minlength=4)
    ordered = sorted(kept)
    assert memory.labels() == [label for label, _ in ordered]
    np.testing.assert_allclose(memory.counts, counts)
    if kept:
        assert memory.images()[:, 0, 0, 0].tolist() == [number for _, number in ordered]


def test_the_memory_stays_balanced_under_a_stream_that_is_not():
    memory = BalancedMemory(4, 16)
    labels = np.random.default_rng(0).choice(4, size=800, p=[0.85, 0.07, 0.05, 0.03])
    memory.take(np.zeros((800, 1, 1, 3), dtype=np.uint8), labels)
    assert np.bincount(memory.labels(), minlength=4).min() >= 2


def test_sure_samples_weigh_more_and_the_weights_have_mean_one():
    entropy = torch.tensor([0.1, 0.7, 1.5], dtype=torch.float64, requires_grad=True)
    loss = self_weighted(entropy)
    weights = np.exp(-entropy.detach().numpy())
    weights *= 3 / weights.sum()
    assert float(loss.detach()) == pytest.approx((weights * entropy.detach().numpy()).mean())
    np.testing.assert_allclose(torch.autograd.grad(loss, entropy)[0], weights / 3)


def test_stamp_admits_what_is_sure_and_named_as_by_the_source():
    encoder = StandIn(Layered())
    method = create("stamp", encoder, CLASSES, views=0, margin=0.5, rate=0.5, batch_size=30)
    source = reference_logits(encoder, pictures(30), 20.0).argmax(dim=1).numpy()
    for _ in range(8):
        method.observe_batch(pictures(30, seed=7))
    logits = reference_logits(encoder, pictures(30), 20.0)
    sure = slow_entropies(logits.numpy()) < 0.5 * math.log(5)
    agree = logits.argmax(dim=1).numpy() == source
    assert (sure & ~agree).any()
    decisions = method.observe_batch(pictures(30))
    np.testing.assert_array_equal(decisions.trusted, sure & agree)


def test_stamp_answers_with_the_mean_of_all_views():
    method = create("stamp", StandIn(Layered()), CLASSES, views=3, seed=5)
    asked = []
    plain = method._tower.cosines
    method._tower.cosines = lambda pixels: asked.append(plain(pixels)) or asked[-1]
    method._learn = lambda: True
    decisions = method.observe_batch(pictures(4))
    assert len(asked) == 5  # the source, the images, three views
    mean = np.mean([softmax(cosines.double().numpy(), 0.05) for cosines in asked[1:]], axis=0)
    np.testing.assert_allclose(method.probabilities(decisions.scores), mean, atol=1e-5)
    np.testing.assert_allclose(decisions.score, (mean * np.log(mean)).sum(axis=1), atol=1e-6)


def test_the_rate_of_stamp_falls_and_rises_along_a_cosine():
    method = create("stamp", StandIn(Layered()), CLASSES, views=0, margin=1.0, rate=0.1, period=4, batch_size=8)
    rates = []
    for _ in range(9):
        method.observe_batch(pictures(8))
        rates.append(method._optimizer.param_groups[0]["lr"])
    expected = [0.1, 0.0853553, 0.05, 0.0146447, 0.0, 0.0146447, 0.05, 0.0853553, 0.1]
    np.testing.assert_allclose(rates, expected, atol=1e-6)


# ROSITA.


def test_the_threshold_and_the_reliable_samples_equal_those_of_a_search_over_all():
    method = create("rosita", StandIn(Layered()), CLASSES, window=60)
    rng = np.random.default_rng(0)
    recent = deque(maxlen=60)
    seen = []
    for _ in range(120):
        score = float(np.clip(rng.normal(*((0.3, 0.05) if rng.random() < 0.5 else (0.6, 0.08))), 0.0, 0.99))
        recent.append(score)
        known, unknown = method._reliable(np.array([score]))
        values_now = np.array(recent)
        best = None
        for place in range(100):
            low, high = values_now[values_now < place * 0.01], values_now[values_now >= place * 0.01]
            if len(low) and len(high):
                spread = low.var() * len(low) + high.var() * len(high)
                if best is None or spread < best[0] - 1e-12:
                    best = (spread, place * 0.01, low.mean(), high.mean())
        if best is None:
            assert not known[0]
            assert not unknown[0]
            continue
        assert method._threshold == pytest.approx(best[1])
        assert known[0] == (score > best[3] + 1e-12)
        assert unknown[0] == (score < best[2] - 1e-12)
        seen.append((known[0], unknown[0]))
    assert {(True, False), (False, True), (False, False)} == {(bool(a), bool(b)) for a, b in seen}


def test_a_bank_holds_the_most_recent_and_finds_the_nearest():
    bank, kept = Bank(4, torch.zeros((1, WIDTH))), deque(maxlen=4)
    rows, query = directions(11, seed=0), directions(2, seed=1)
    for start in range(0, 11, 3):
        bank.take(torch.from_numpy(rows[start : start + 3]))
        kept.extend(rows[start : start + 3])
        count = min(len(kept), 3)
        assert len(bank) == len(kept)
        expected = np.sort(query @ np.stack(kept).T, axis=1)[:, ::-1][:, :count]
        np.testing.assert_allclose(bank.similarities(torch.from_numpy(query), count), expected, atol=1e-6)


def test_the_contrast_of_rosita_equals_that_written_out():
    method = create("rosita", StandIn(Layered()), CLASSES, neighbours=2, contrast_temperature=0.3)
    own, other = Bank(9, torch.zeros((1, WIDTH))), Bank(9, torch.zeros((1, WIDTH)))
    like, unlike, query = directions(5, seed=0), directions(6, seed=1), directions(3, seed=2)
    own.take(torch.from_numpy(like))
    other.take(torch.from_numpy(unlike))
    found = method._contrast(torch.from_numpy(query), own, other)
    for row, value in zip(query.astype(np.float64), found, strict=True):
        positive, negative = np.sort(like @ row)[-2:], np.sort(unlike @ row)[-2:]
        against = sum(math.exp(b / 0.3) for b in negative)
        expected = -np.mean([math.log(math.exp(a / 0.3) / (math.exp(a / 0.3) + against)) for a in positive])
        assert float(value) == pytest.approx(expected, rel=1e-4)


def test_rosita_pulls_reliable_known_samples_to_their_labels_by_two_views():
    encoder = StandIn(Layered())
    method = create("rosita", encoder, CLASSES, batch_size=12, contrast_weight=0.0, rate=0.3)
    cosines = (reference_logits(encoder, pictures(12), 1.0)).numpy().astype(np.float64)
    decisions = method.observe_batch(pictures(12))
    known = decisions.trusted
    assert 0 < known.sum() < 12
    assert (cosines.max(axis=1)[known].min()) > cosines.max(axis=1)[decisions.known].mean() - 1e-6
    own = np.mean([math.log(np.exp(row).sum()) - row.max() for row in cosines[known]])
    # The other half is that of the views, whose labels are the same and whose cosines are not larger than one.
    assert own < method.stats()["loss"] < own + math.log(5) + 2
    np.testing.assert_allclose(decisions.score, cosines.max(axis=1), atol=1e-5)
    np.testing.assert_allclose(decisions.openness_first, 1 - cosines.max(axis=1), atol=1e-5)
    after = reference_logits(encoder, pictures(12), 1.0)
    np.testing.assert_allclose(decisions.scores, after, atol=1e-5)
    np.testing.assert_array_equal(decisions.known, decisions.score >= method.stats()["threshold"])
    assert method.stats()["known_bank"] == known.sum()


def test_rosita_learns_from_unknown_samples_once_both_banks_are_filled():
    method = create("rosita", StandIn(Layered()), CLASSES, batch_size=30, neighbours=3)
    first = method.observe_batch(pictures(30))
    assert not first.trusted[~first.known].any()
    assert min(method.stats()["known_bank"], method.stats()["unknown_bank"]) > 3
    second = method.observe_batch(pictures(30, seed=1))
    assert second.trusted[~second.known].any()
    assert second.trusted[second.known].any()
