"""AdaND against a slow reference: the labels by the plain rule, the head by torch's own linear layer and Adam."""

import numpy as np
import pytest

from conftest import random_stream, unit
from protodcs import methods
from protodcs.core import state
from protodcs.errors import ConfigError, StateError
from protodcs.methods import adand

torch = pytest.importorskip("torch")

QUICK = {"queue_length": 16, "warmup": 3, "rate": 5e-3}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Such small steps are fastest on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Reference:
    """A full two-way head, a list for a queue, and numpy's variance for the threshold."""

    def __init__(self, prototypes, config):
        self.config = config
        self.text = unit(prototypes)
        self.scores = []
        self.queue = []
        self.steps = self.seen = 0
        self.head = torch.nn.Linear(prototypes.shape[1], 2, dtype=torch.float64)
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.bias.zero_()
        self.adam = torch.optim.Adam(self.head.parameters(), lr=config.rate)

    def observe(self, feature):
        config = self.config
        label = self.label(feature)
        with torch.no_grad():
            unknown, known = (float(x) for x in self.head(torch.tensor(config.feature_length * feature)))
        decided = known >= unknown if self.steps >= config.warmup else label
        share = float(torch.sigmoid(torch.tensor(unknown - known, dtype=torch.float64)))
        p_unknown = share if self.steps >= config.warmup else float(not label)
        self.seen += 1
        self.enqueue(feature, label)
        if config.noise_period and self.seen % config.noise_period == 0:
            self.enqueue(adand.noise(config.seed, self.seen, len(feature)).astype(np.float64), False)
        return decided, p_unknown, known

    def label(self, feature):
        z = self.text @ feature
        if self.config.label_score == "max":
            score = z.max()
        else:
            weights = np.exp((z - z.max()) / self.config.temperature)
            score = (weights / weights.sum()).max()
        self.scores = [*self.scores, score][-self.config.window :]
        recent, best, chosen = np.array(self.scores), np.inf, 0.0
        for threshold in np.arange(int(np.ceil(1 / self.config.step))) * self.config.step:
            low, high = recent[recent < threshold], recent[recent >= threshold]
            if len(low) and len(high):
                within = (len(low) * low.var() + len(high) * high.var()) / len(recent)
                if within < best - 1e-15:
                    best, chosen = within, threshold
        return bool(score >= chosen)

    def enqueue(self, feature, label):
        self.queue.append((feature, int(label)))
        if len(self.queue) == self.config.queue_length:
            inputs = torch.tensor(self.config.feature_length * np.array([item for item, _ in self.queue]))
            labels = torch.tensor([label for _, label in self.queue])
            self.adam.zero_grad()
            torch.nn.functional.cross_entropy(self.head(inputs), labels).backward()
            self.adam.step()
            self.queue = []
            self.steps += 1


@pytest.mark.parametrize(
    "options",
    [
        {"warmup": 2},
        QUICK,
        {**QUICK, "label_score": "max", "noise_period": 3, "feature_length": 1.0},
        {**QUICK, "noise_period": 0, "window": 60, "temperature": 0.1, "seed": 5},
        {**QUICK, "queue_length": 1, "step": 0.05, "warmup": 0},
    ],
    ids=str,
)
def test_every_decision_equals_the_one_with_a_head_of_torch(options):
    prototypes, features, _ = random_stream(samples=300, seed=1)
    engine = methods.create("adand", prototypes, **options)
    reference = Reference(prototypes, engine.config)
    for i, feature in enumerate(unit(features)):
        decision = engine.observe(feature)
        known, p_unknown, logit = reference.observe(feature)
        assert decision.score == pytest.approx(logit, rel=1e-4, abs=1e-6), i
        assert decision.p_unknown == pytest.approx(p_unknown, rel=1e-4, abs=1e-6), i
        assert decision.known == known or abs(logit) < 1e-6, i
    memory, head = engine._memory, reference.head
    assert memory.steps == reference.steps > 1
    largest = float(head.weight.detach().abs().max())
    np.testing.assert_allclose(memory.weights[:-1], head.weight.detach().numpy()[1], atol=1e-4 * largest)
    np.testing.assert_allclose(memory.weights[:-1], -head.weight.detach().numpy()[0], atol=1e-4 * largest)
    assert memory.weights[-1] == pytest.approx(float(head.bias.detach()[1]), abs=1e-4 * largest)


def test_the_gradient_is_the_one_of_autograd():
    rng = np.random.default_rng(0)
    weights, queue = rng.normal(size=13), unit(rng.normal(size=(20, 12))).astype(np.float32)
    labels = rng.integers(2, size=20)
    out = np.zeros(13)
    adand.add_gradient(weights, queue, labels, 3.0, out)
    row = torch.tensor(weights, requires_grad=True)
    known = torch.tensor(3.0 * queue.astype(np.float64)) @ row[:-1] + row[-1]
    loss = torch.nn.functional.cross_entropy(torch.stack([-known.detach(), known], dim=1), torch.tensor(labels))
    loss.backward()
    # One row of the head alone has half of the slope that both have together, and it is the row that Adam steps.
    np.testing.assert_allclose(out, row.grad.numpy(), rtol=1e-6, atol=1e-9)


def test_noise_is_a_pure_function_of_its_place():
    first, again, other = adand.noise(0, 8, 64), adand.noise(0, 8, 64), adand.noise(0, 16, 64)
    np.testing.assert_array_equal(first, again)
    assert abs(float(first @ other)) < 0.5
    assert abs(float(first @ adand.noise(1, 8, 64))) < 0.5
    assert np.linalg.norm(first) == pytest.approx(1.0, abs=1e-6)


def test_the_zero_shot_decision_stands_until_the_warm_up_is_over():
    prototypes, features, _ = random_stream(samples=300, seed=2)
    engine = methods.create("adand", prototypes, label_score="max", warmup=2, queue_length=32, noise_period=0)
    gate = methods.create("rosita_gate", prototypes).observe_many(features)
    decisions = engine.observe_many(features)
    np.testing.assert_array_equal(decisions.known[:64], gate.known[:64])
    np.testing.assert_array_equal(decisions.known[64:], decisions.score[64:] >= 0)
    assert set(decisions.p_unknown[:64]) == {0.0, 1.0}
    assert not set(decisions.p_unknown[64:]) & {0.0, 1.0}
    np.testing.assert_array_equal(decisions.index, gate.index)


@pytest.mark.parametrize(
    "option",
    [
        {"label_score": "max"},
        {"temperature": 0.1},
        {"window": 20},
        {"step": 0.2},
        {"queue_length": 24},
        {"warmup": 12},
        {"noise_period": 2},
        {"rate": 1e-3},
        {"feature_length": 2.0},
        {"seed": 1},
    ],
    ids=str,
)
def test_each_option_has_an_effect(option):
    prototypes, features, _ = random_stream(samples=300, seed=4)
    first = methods.create("adand", prototypes, **QUICK).observe_many(features)
    second = methods.create("adand", prototypes, **{**QUICK, **option}).observe_many(features)
    assert np.abs(first.p_unknown - second.p_unknown).max() > 1e-6


def test_two_groups_far_apart_are_learned():
    rng = np.random.default_rng(1)
    known = rng.random(600) < 0.5
    features = np.zeros((600, 16))
    features[np.arange(600), np.where(known, rng.integers(4, size=600), 10)] = 1.0
    features += 0.1 * rng.random(features.shape)
    engine = methods.create("adand", np.eye(4, 16), **QUICK, label_score="max")
    decisions = engine.observe_many(features)
    np.testing.assert_array_equal(decisions.known[400:], known[400:])


@pytest.mark.parametrize(("classes", "unknown"), [(1, 0.4), (7, 1.0), (7, 0.0)])
def test_one_class_or_one_kind_alone_stays_finite_and_can_be_restored_while_the_head_decides(classes, unknown):
    prototypes, features, _ = random_stream(classes=classes, samples=300, unknown=unknown)
    engine = methods.create("adand", prototypes, **QUICK)
    decisions = engine.observe_many(features[:250])
    assert engine.stats()["warm"]
    assert np.isfinite(decisions.score).all()
    twin = methods.restore(engine.snapshot())
    first, second = engine.observe_many(features[250:]), twin.observe_many(features[250:])
    np.testing.assert_array_equal(first.p_unknown, second.p_unknown)
    assert engine.snapshot() == twin.snapshot()


def test_peek_tells_what_observe_says_and_freezing_holds_the_head():
    prototypes, features, _ = random_stream(samples=300, seed=6)
    engine = methods.create("adand", prototypes, **QUICK)
    for feature in features[:150]:
        told = engine.peek(feature)
        assert told.p_unknown == engine.observe(feature).p_unknown
    weights = engine._memory.weights.copy()
    engine.freeze()
    engine.observe_many(features[150:])
    np.testing.assert_array_equal(engine._memory.weights, weights)
    engine.reset()
    assert engine.snapshot() == methods.create("adand", prototypes, **QUICK).snapshot()


def test_the_state_stays_small():
    prototypes, features, _ = random_stream(samples=300, seed=7)
    engine = methods.create("adand", prototypes, **QUICK, window=50)
    sizes = []
    for feature in features:
        engine.observe(feature)
        sizes.append(len(engine.snapshot()))
    assert max(sizes[100:]) <= max(sizes[50:100]) + 200


@pytest.mark.parametrize("option", [{"queue_length": 0}, {"rate": -1}, {"label_score": "odd"}, {"nonsense": 1}])
def test_a_bad_option_is_refused(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        methods.create("adand", np.eye(2, 4), **option)


@pytest.mark.parametrize(
    "breaks",
    [
        lambda header, arrays: arrays.update(queue=arrays["queue"][:-1]),
        lambda header, arrays: arrays.update(queue=arrays["queue"] * np.float32(2)),
        lambda header, arrays: arrays.update(initial_prototypes=arrays["initial_prototypes"] * np.float32(2)),
        lambda header, arrays: arrays.update(labels=arrays["labels"] + 1),
        lambda header, arrays: arrays.update(window=arrays["window"] + 2.0),
        lambda header, arrays: arrays.update(weights=arrays["weights"] * 1e6),
        lambda header, arrays: arrays.update(weights=arrays["weights"] * np.nan),
        lambda header, arrays: arrays.update(first=arrays["first"] + 1e3),
        lambda header, arrays: arrays.update(second=-arrays["second"]),
        lambda header, arrays: arrays.update(more=arrays["initial_prototypes"]),
        lambda header, arrays: header.counters.update(known=header.counters["known"] - 1),
        lambda header, arrays: header.counters.update(sequence=header.counters["sequence"] + 1),
        lambda header, arrays: arrays.pop("second"),
        lambda header, arrays: header.counters.update(learned=99),
        lambda header, arrays: header.counters.update(sequence=99),
        lambda header, arrays: header.counters.update(known=101),
        lambda header, arrays: header.counters.pop("known"),
        lambda header, arrays: header.config.update(queue_length=7),
        lambda header, arrays: header.config.update(queue_length=2**40),
    ],
)
def test_a_state_broken_in_meaning_is_refused(breaks):
    prototypes, features, _ = random_stream(samples=100)
    engine = methods.create("adand", prototypes, **QUICK, noise_period=0)
    engine.observe_many(features)
    header, arrays = state.unpack(engine.snapshot())
    header, arrays = header.model_copy(update={"content_hash": "0" * 64}, deep=True), dict(arrays)
    assert methods.restore(state.pack(header, arrays)).snapshot() == engine.snapshot()
    assert len(arrays["queue"]) > 1
    assert arrays["labels"].any()
    breaks(header, arrays)
    with pytest.raises(StateError):
        methods.restore(state.pack(header, arrays))


def test_on_real_features_the_head_follows_the_reference(clip_stream):
    prototypes, features, _ = clip_stream("dtd")
    engine = methods.create("adand", prototypes, warmup=3)
    reference = Reference(prototypes, engine.config)
    for i, feature in enumerate(unit(features[:400])):
        decision = engine.observe(feature)
        known, p_unknown, logit = reference.observe(feature)
        assert decision.score == pytest.approx(logit, rel=1e-3, abs=1e-4), i
        assert decision.known == known or abs(logit) < 1e-4, i
        assert decision.p_unknown == pytest.approx(p_unknown, abs=1e-4), i
