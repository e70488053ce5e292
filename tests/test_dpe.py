"""DPE against a slow reference that lets torch find the gradients and take the step."""

import math

import numpy as np
import pytest

from conftest import random_stream, unit
from protodcs import methods
from protodcs.core import state
from protodcs.errors import ConfigError, StateError

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Such small steps are fastest on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Reference:
    """DPE as its equations read: float64, autograd, torch's own AdamW with the published weight decay."""

    def __init__(self, prototypes, config):
        self.config = config
        self.text = torch.tensor(unit(unit(prototypes).astype(np.float32)))
        self.queues = [[] for _ in prototypes]
        self.evolved = 0

    def logits(self, feature, text, visual, opened):
        text = torch.nn.functional.normalize(text, dim=1)
        logits = text @ feature / self.config.temperature
        if opened:
            visual = torch.nn.functional.normalize(visual, dim=1)
            affinity = torch.exp(-self.config.affinity_sharpness * (1 - visual @ feature))
            logits = logits.index_add(0, torch.tensor(opened), self.config.affinity_weight * affinity)
        return logits

    def alignment(self, text, visual, opened):
        text = torch.nn.functional.normalize(text[opened], dim=1)
        visual = torch.nn.functional.normalize(visual, dim=1)
        table = visual @ text.T / self.config.alignment_temperature
        return torch.nn.functional.cross_entropy(table, torch.arange(len(opened)))

    def observe(self, feature):
        config, feature = self.config, torch.tensor(feature)
        first = self.logits(feature, self.text, None, [])
        cached = self.offer(int(first.argmax()), feature, float(entropy(first)))
        opened = [k for k, queue in enumerate(self.queues) if queue]
        visual = torch.stack([torch.stack([item for _, item in self.queues[k]]).mean(dim=0) for k in opened])
        text_shift = torch.zeros_like(self.text, requires_grad=True)
        visual_shift = torch.zeros_like(visual, requires_grad=True)
        loss = entropy(self.logits(feature, self.text + text_shift, visual + visual_shift, opened))
        loss = loss + config.alignment_weight * self.alignment(self.text + text_shift, visual + visual_shift, opened)
        groups = [
            {"params": [text_shift], "lr": config.text_rate},
            {"params": [visual_shift], "lr": config.visual_rate},
        ]
        step = torch.optim.AdamW(groups, eps=config.step_epsilon, weight_decay=0.1)
        loss.backward()
        step.step()
        with torch.no_grad():
            moved = torch.nn.functional.normalize(self.text + text_shift, dim=1)
            final = self.logits(feature, moved, visual + visual_shift, opened)
            base = math.log2 if config.entropy_base == "log2" else math.log
            largest = base(len(self.text)) if len(self.text) > 1 else 1.0
            evolved = float(entropy(final)) / largest < config.evolution_threshold
            if evolved:
                self.evolved += 1
                self.text = (self.evolved * self.text + moved) / (self.evolved + 1)
        return final.numpy(), float((moved @ feature).max()), cached, evolved

    def offer(self, k, feature, uncertainty):
        queue = self.queues[k]
        if len(queue) == self.config.cache_size:
            worst = max(range(len(queue)), key=lambda slot: queue[slot][0])
            if uncertainty >= queue[worst][0]:
                return False
            queue[worst] = (uncertainty, feature)
        else:
            queue.append((uncertainty, feature))
        return True


def entropy(logits):
    logs = torch.log_softmax(logits, dim=0)
    return -(logs.exp() * logs).sum()


OPTIONS = {
    "published": {},
    "weak logits, fast steps": {"temperature": 0.05, "text_rate": 5e-3, "visual_rate": 2e-2, "alignment_weight": 2.5},
    "sign steps": {"step_epsilon": 1e-6, "cache_size": 1, "alignment_weight": 0.0},
    "natural base, warm alignment": {
        "entropy_base": "natural",
        "alignment_temperature": 0.1,
        "affinity_sharpness": 8.0,
    },
    "no evolution": {"evolution_threshold": 0.0, "affinity_weight": 3.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_step_equals_the_one_of_torch(options):
    prototypes, features, _ = random_stream(samples=250, seed=1)
    engine = methods.create("dpe", prototypes, **options)
    reference = Reference(prototypes, engine.config)
    for i, feature in enumerate(unit(features)):
        decision = engine.observe(feature)
        logits, cosine, cached, evolved = reference.observe(feature)
        np.testing.assert_allclose(decision.scores, logits, rtol=1e-4, atol=1e-4 * np.abs(logits).max(), err_msg=str(i))
        assert decision.score == pytest.approx(logits.max(), rel=1e-4)
        assert decision.openness == pytest.approx(1 - cosine, rel=1e-4)
        assert (decision.cached, decision.evolved) == (cached, evolved), i
        top = np.sort(logits)[-2:]
        assert decision.index == logits.argmax() or top[1] - top[0] < 1e-3
    drift = np.abs(engine._memory.text - reference.text.numpy()).max()
    moved = np.abs(reference.text.numpy() - unit(prototypes)).max()
    # Two hundred means are rounded to float32 one after the other.
    assert drift <= 1e-4 * moved + 1e-6
    assert engine.stats()["evolved"] == reference.evolved


def test_the_alignment_moves_texts_towards_their_queues_as_autograd_says():
    """The gradient of InfoNCE alone, in full."""
    prototypes, features, _ = random_stream(samples=60, seed=2)
    engine = methods.create("dpe", prototypes)
    engine.observe_many(features)
    memory = engine._memory
    memory.refresh()
    reference = Reference(prototypes, engine.config)
    text = torch.tensor(memory.text.astype(np.float64), requires_grad=True)
    opened = list(memory.opened)
    means = [memory.cache[k, : memory.counts[k]].astype(np.float64).mean(axis=0) for k in opened]
    visual = torch.tensor(np.array(means), requires_grad=True)
    (engine.config.alignment_weight * reference.alignment(text, visual, opened)).backward()
    by_text = memory.text_alignment
    np.testing.assert_allclose(by_text, text.grad.numpy(), atol=1e-5 * np.abs(text.grad.numpy()).max())
    directions, lengths = memory.visual[opened], memory.lengths[opened, None]
    sums = memory.visual_sum[opened]
    by_visual = memory.alignment_scale * (sums - (sums * directions).sum(axis=1, keepdims=True) * directions) / lengths
    np.testing.assert_allclose(by_visual, visual.grad.numpy(), atol=1e-5 * np.abs(visual.grad.numpy()).max())


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 0.02},
        {"cache_size": 1},
        {"affinity_weight": 1.0},
        {"affinity_sharpness": 1.0},
        {"alignment_weight": 5.0},
        {"alignment_temperature": 0.1},
        {"text_rate": 1e-2},
        {"visual_rate": 1e-2},
        {"step_epsilon": 1e-6},
        {"evolution_threshold": 0.0},
        {"entropy_base": "natural"},
        {"score": "softmax"},
        {"score": "max"},
    ],
    ids=str,
)
def test_each_option_has_an_effect(option):
    prototypes, features, _ = random_stream(samples=200, seed=4)
    first = methods.create("dpe", prototypes).observe_many(features)
    second = methods.create("dpe", prototypes, **option).observe_many(features)
    assert np.abs(first.score - second.score).max() > 1e-6


def test_a_threshold_alone_tells_unknown_from_known():
    prototypes, features, _ = random_stream(samples=200, seed=4)
    free = methods.create("dpe", prototypes).observe_many(features)
    assert free.known.all()
    middle = float(np.median(free.score))
    engine = methods.create("dpe", prototypes, threshold=middle)
    held = engine.observe_many(features)
    np.testing.assert_array_equal(held.known, free.score >= middle)
    np.testing.assert_array_equal(held.score, free.score)
    assert engine.stats()["unknown"] == 200 - held.known.sum()


def test_with_everything_switched_off_it_is_zero_shot():
    prototypes, features, _ = random_stream(samples=200, seed=5)
    off = methods.create(
        "dpe", prototypes, text_rate=0.0, visual_rate=0.0, affinity_weight=0.0, evolution_threshold=0.0, score="max"
    ).observe_many(features)
    plain = methods.create("zero_shot", prototypes).observe_many(features)
    np.testing.assert_array_equal(off.index, plain.index)
    np.testing.assert_allclose(off.score, plain.score, atol=1e-6)


def test_a_single_class_has_nothing_to_learn():
    prototypes, features, _ = random_stream(classes=1, samples=60)
    engine = methods.create("dpe", prototypes)
    decisions = engine.observe_many(features)
    assert not decisions.index.any()
    np.testing.assert_allclose(engine._memory.text, engine._memory.initial, atol=1e-6)
    assert engine._memory.counts[0] == engine.config.cache_size


def test_a_full_queue_keeps_the_surest_samples():
    prototypes, features, _ = random_stream(samples=250, unknown=1.0, seed=6)
    engine = methods.create("dpe", prototypes, evolution_threshold=0.0)
    engine.observe_many(features)
    z = unit(features) @ unit(prototypes).T / 0.01
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    h = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=1)
    memory = engine._memory
    for k in range(len(prototypes)):
        surest = np.sort(h[z.argmax(axis=1) == k])[: engine.config.cache_size]
        np.testing.assert_allclose(np.sort(memory.quality[k, : memory.counts[k]]), surest, rtol=1e-3, atol=1e-9)


def test_evolved_prototypes_never_grow_longer_and_the_state_stays_small():
    prototypes, features, _ = random_stream(samples=300, seed=7)
    engine = methods.create("dpe", prototypes, text_rate=0.01)
    engine.observe_many(features)
    assert engine.stats()["evolved"] > 10
    assert np.linalg.norm(engine._memory.text, axis=1).max() < 1 + 1e-6
    full = len(engine.snapshot())
    for _ in range(3):
        engine.observe_many(features)
    width = prototypes.shape[1]
    assert len(engine.snapshot()) <= full + 7 * 3 * (4 * width + 8) + 100
    assert engine._memory.counts.max() <= 3


@pytest.mark.parametrize("option", [{"cache_size": 0}, {"temperature": 0}, {"score": "odd"}, {"nonsense": 1}])
def test_a_bad_option_is_refused(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        methods.create("dpe", np.eye(2, 4), **option)


@pytest.mark.parametrize(
    "breaks",
    [
        lambda header, arrays: arrays.update(cache=arrays["cache"][:-1]),
        lambda header, arrays: arrays.update(cache=arrays["cache"] * np.float32(2)),
        lambda header, arrays: arrays.update(text=arrays["text"] * np.float32(2)),
        lambda header, arrays: arrays.update(text=arrays["text"] * np.float32(0)),
        lambda header, arrays: arrays.update(initial_prototypes=arrays["initial_prototypes"] * np.float32(2)),
        lambda header, arrays: arrays.update(quality=arrays["quality"] - 100),
        lambda header, arrays: arrays.update(quality=arrays["quality"] * np.nan),
        lambda header, arrays: arrays.update(counts=arrays["counts"] + 7),
        lambda header, arrays: arrays.update(counts=-arrays["counts"]),
        lambda header, arrays: arrays.update(more=arrays["initial_prototypes"]),
        lambda header, arrays: header.counters.update(known=header.counters["known"] - 1),
        lambda header, arrays: header.counters.update(sequence=header.counters["sequence"] + 1),
        lambda header, arrays: arrays.pop("text"),
        lambda header, arrays: header.counters.update(evolved=0),
        lambda header, arrays: header.counters.update(cached=1),
        lambda header, arrays: header.counters.update(learned=201),
        lambda header, arrays: header.counters.update(known=2**70),
        lambda header, arrays: header.counters.pop("cached"),
        lambda header, arrays: header.config.update(cache_size=1),
        lambda header, arrays: header.config.update(cache_size=2**40),
    ],
)
def test_a_state_broken_in_meaning_is_refused(breaks):
    prototypes, features, _ = random_stream(samples=200)
    engine = methods.create("dpe", prototypes)
    engine.observe_many(features)
    header, arrays = state.unpack(engine.snapshot())
    header, arrays = header.model_copy(update={"content_hash": "0" * 64}, deep=True), dict(arrays)
    assert methods.restore(state.pack(header, arrays)).snapshot() == engine.snapshot()
    breaks(header, arrays)
    with pytest.raises(StateError):
        methods.restore(state.pack(header, arrays))


def test_on_real_features_it_follows_the_reference(clip_stream):
    prototypes, features, _ = clip_stream("dtd")
    engine = methods.create("dpe", prototypes)
    reference = Reference(prototypes, engine.config)
    for feature in unit(features[:60]):
        decision = engine.observe(feature)
        logits, _, cached, evolved = reference.observe(feature)
        np.testing.assert_allclose(decision.scores, logits, rtol=1e-4, atol=1e-3)
        assert (decision.cached, decision.evolved) == (cached, evolved)
