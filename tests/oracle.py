"""An independent, slow, float64 reading of the method, to hold the engine against.

Nothing here is taken from the engine: the loss is written down as the paper has it and differentiated by torch, the
step is torch's own AdamW, the mixture is scikit-learn's, quantiles and digamma are numpy's and torch's. The oracle can
run a stream by itself, or take over the engine's state before each sample.
"""

import warnings
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.special import logsumexp
from scipy.stats import norm
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from protodcs import ProtoDCSConfig


@dataclass
class StepResult:
    """What the oracle found for one sample, with the margins of every choice it made."""

    index: int
    known: bool
    trusted: bool
    cached: bool
    evolved: bool
    openness_first: float
    openness: float
    p_unknown: float
    aleatoric: float
    epistemic: float
    text_gradient: torch.Tensor | None
    visual_gradient: dict[int, torch.Tensor]
    text_after: torch.Tensor
    visual_after: dict[int, torch.Tensor]
    margins: dict[str, float] = field(default_factory=dict)
    score: float = 0.0


class Oracle:
    def __init__(self, prototypes: np.ndarray, config: ProtoDCSConfig):
        self.config = config
        self.text = torch.tensor(prototypes, dtype=torch.float64)
        self.queues: dict[int, list[tuple[torch.Tensor, float]]] = {}
        self.gate_window: list[float] = []
        self.mixture_window: list[float] = []
        self.quality_window: list[float] = []
        self.waiting: list[tuple[int, torch.Tensor, float]] = []
        self.mixture: GaussianMixture | None = None
        # With probabilities, 0.7 means that the largest one is 0.3.
        self.cold_threshold = config.cold_threshold
        if config.openness != "cosine":
            self.cold_threshold = -np.log(1 - config.cold_threshold)
        self.evolution_threshold = config.evolution_threshold
        self.sequence = self.known = self.passed = 0

    def take_over(self, engine) -> None:
        """Teacher forcing: continue from exactly the state the engine is in, accumulators excepted."""
        memory = engine._memory
        self.text = torch.tensor(memory.text, dtype=torch.float64)
        self.queues = {
            int(k): [
                (torch.tensor(memory.cache[k, i], dtype=torch.float64), float(memory.quality[k, i]))
                for i in range(memory.counts[k])
            ]
            for k in np.flatnonzero(memory.counts)
        }
        self.gate_window = arrived(memory.gate_window)
        self.mixture_window = arrived(memory.mixture_window)
        self.quality_window = arrived(memory.quality_window)
        self.waiting = [
            (sample.k, torch.tensor(sample.feature, dtype=torch.float64), sample.uncertainty)
            for sample in memory.waiting
        ]
        self.mixture = as_sklearn(memory.mixture) if memory.fitted else None
        self.cold_threshold, self.evolution_threshold = memory.cold_threshold, memory.evolution_threshold
        self.sequence, self.known, self.passed = memory.learned, memory.known, memory.passed

    def step(self, feature: np.ndarray) -> StepResult:
        c, margins = self.config, {}
        f = torch.tensor(feature, dtype=torch.float64)
        z = normed(self.text) @ f
        predicted = int(z.argmax())
        openness_first = self.openness(z)
        push(self.gate_window, openness_first, c.gate_window)
        low, high = np.quantile(self.gate_window, [c.cache_quantile, c.trust_quantile])
        confident = trusted = True
        if c.first_check:
            confident, trusted = openness_first < low, openness_first < high
            margins["confident"], margins["trusted"] = abs(openness_first - low), abs(openness_first - high)
        if len(z) > 1:
            top = z.topk(2).values
            margins["predicted"] = float(top[0] - top[1])
        confident = bool(confident) and c.visual_prototypes
        quality = self.quality(z)

        cached = False
        if confident and c.cache_admission == "immediate":
            cached = self.offer(predicted, f, quality, margins)

        text_gradient, visual_gradient = None, {}
        text_after, visual_after = self.text, {k: normed(v) for k, v in self.means().items()}
        if trusted:
            text_gradient, visual_gradient, text_after, visual_after = self.optimise(f)
        after = normed(text_after) @ f
        openness = self.openness(after)
        push(self.mixture_window, openness, c.mixture_window)

        p_unknown, known = self.verify(trusted, openness, margins)

        affinity = torch.zeros(len(z), dtype=torch.float64)
        for k, v in visual_after.items():
            affinity[k] = c.affinity_weight * torch.exp(-c.affinity_sharpness * (1 - v @ f))
        probabilities = torch.softmax(after / c.temperature, 0)
        final = probabilities if c.prediction_scale == "probability" else after / c.temperature
        if not c.text_prototypes and visual_after:
            final = torch.zeros_like(final)
        final = final + affinity
        if len(final) > 1:
            top = final.topk(2).values
            margins["index"] = float(top[0] - top[1])
        evidence = c.evidence_scale * after
        aleatoric, epistemic = uncertainty(evidence + affinity if c.evidence_logits == "fused" else evidence)

        evolved = False
        predicting = after / c.temperature
        if c.evidence_logits == "fused" or c.prediction_scale == "logit":
            predicting = predicting + affinity
        passed = known and self.passes(float(aleatoric), predicting, margins)
        if passed:
            self.passed += 1
            n = self.passed if c.evolution_count == "passed" else self.known + 1
            if trusted:
                evolved = True
                share = 1 / (n + c.evolution_prior)
                mean = (1 - share) * self.text + share * text_after
                self.text = normed(mean) if c.evolution_norm == "unit" else mean
        if c.cache_admission == "verified" and confident and known:
            cached = self.offer(predicted, f, quality, margins)
        held = passed if c.cache_admission == "gated" else confident and known
        if c.cache_admission in ("buffered", "gated") and held and c.visual_prototypes:
            self.waiting.append((predicted, f, quality))
        if c.cache_admission in ("buffered", "gated") and self.refit_due():
            cached = self.flush(margins)
        self.sequence += 1
        self.known += known
        return StepResult(
            int(final.argmax()), known, bool(trusted), cached, evolved, openness_first, openness, p_unknown,
            float(aleatoric), float(epistemic), text_gradient, visual_gradient, self.text, visual_after, margins,
            {"openness": 1 - openness, "openness_first": 1 - openness_first, "posterior": 1 - p_unknown,
             "prediction": float(final.max())}[c.score],
        )  # fmt: skip

    def openness(self, z: torch.Tensor) -> float:
        if self.config.openness == "cosine":
            return float(1 - z.max())
        scale = self.config.temperature if self.config.openness == "softmax" else 1.0
        return float(-torch.log_softmax(z / scale, 0).max())

    def quality(self, z: torch.Tensor) -> float:
        if self.config.cache_quality == "aleatoric":
            return float(uncertainty(self.config.evidence_scale * z)[0])
        return float(torch.distributions.Categorical(logits=z / self.config.temperature).entropy())

    def offer(self, k: int, f: torch.Tensor, quality: float, margins: dict[str, float]) -> bool:
        queue = self.queues.setdefault(k, [])
        cosines = [float(f @ g) for g, _ in queue]
        best = int(np.argmax(cosines)) if queue else -1
        if queue:
            margins["similar"] = abs(cosines[best] - self.config.cache_similarity)
        if queue and cosines[best] > self.config.cache_similarity:
            margins["quality"] = abs(quality - queue[best][1])
            if quality >= queue[best][1]:
                return False
            queue[best] = (f, quality)
        elif len(queue) < self.config.cache_size:
            queue.append((f, quality))
        else:
            queue[int(np.argmax([q for _, q in queue]))] = (f, quality)
        return True

    def flush(self, margins: dict[str, float]) -> bool:
        changed, offered = False, {}
        for k, f, quality in sorted(self.waiting, key=lambda item: item[2]):
            offered[k] = offered.get(k, 0) + 1
            if offered[k] <= self.config.cache_size:
                changed |= self.offer(k, f, quality, margins)
        self.waiting = []
        return changed

    def means(self) -> dict[int, torch.Tensor]:
        return {k: torch.stack([f for f, _ in queue]).mean(0) for k, queue in sorted(self.queues.items()) if queue}

    def optimise(self, f: torch.Tensor):
        """One AdamW step from zero residuals on the loss, as the paper writes it."""
        c = self.config
        means = self.means()
        opened = list(means)
        base = torch.stack([means[k] for k in opened]) if opened else torch.zeros((0, len(f)), dtype=torch.float64)
        d_text = torch.zeros_like(self.text, requires_grad=True)
        d_visual = torch.zeros_like(base, requires_grad=True)
        text, visual = normed(self.text + d_text), normed(base + d_visual)
        z = text @ f
        affinity = torch.zeros_like(z)
        if opened:
            affinity = affinity.index_put(
                (torch.tensor(opened),), c.affinity_weight * torch.exp(-c.affinity_sharpness * (1 - visual @ f))
            )
        if c.uncertainty == "evidence":
            evidence = c.evidence_scale * z
            aleatoric, epistemic = uncertainty(evidence + affinity if c.evidence_logits == "fused" else evidence)
            loss = c.aleatoric_weight * aleatoric + c.epistemic_weight * epistemic
        else:
            logits = z / c.temperature + (affinity if c.evidence_logits == "fused" else 0)
            loss = torch.distributions.Categorical(logits=logits, validate_args=False).entropy()
        if opened and c.alignment_weight:
            loss = loss + c.alignment_weight * self.info_nce(text, visual, opened)
        rates = (c.text_rate if c.text_prototypes else 0.0, c.visual_rate)
        optimiser = torch.optim.AdamW(
            [{"params": [d_text], "lr": rates[0]}, {"params": [d_visual], "lr": rates[1]}], eps=c.step_epsilon
        )
        loss.backward()
        text_gradient = d_text.grad.clone()
        visual_gradient = torch.zeros_like(base) if d_visual.grad is None else d_visual.grad.clone()
        optimiser.step()
        moved = normed(base + d_visual.detach())
        text_after = normed(self.text + d_text.detach())
        return (
            text_gradient,
            dict(zip(opened, visual_gradient, strict=True)),
            text_after,
            dict(zip(opened, moved, strict=True)),
        )

    def info_nce(self, text: torch.Tensor, visual: torch.Tensor, opened: list[int]) -> torch.Tensor:
        c = self.config
        if c.alignment_direction == "text-to-visual":
            logits, targets = text[opened] @ visual.T, torch.arange(len(opened))
        elif c.alignment_keys == "all":
            logits, targets = visual @ text.T, torch.tensor(opened)
        else:
            logits, targets = visual @ text[opened].T, torch.arange(len(opened))
        return torch.nn.functional.cross_entropy(logits / c.alignment_temperature, targets)

    def refit_due(self) -> bool:
        since = self.sequence + 1 - self.config.mixture_start
        return since >= 0 and since % self.config.mixture_period == 0

    def verify(self, trusted: bool, openness: float, margins: dict[str, float]) -> tuple[float, bool]:
        c = self.config
        if not c.verification:
            return float(not trusted), bool(trusted)
        if self.refit_due():
            self.mixture = self.fit(np.array(self.mixture_window), margins)
        if self.mixture is None:
            margins["cold"] = abs(openness - self.cold_threshold)
            return float(openness >= self.cold_threshold), bool(openness < self.cold_threshold)
        p_unknown = float(self.mixture.predict_proba([[openness]])[0, int(self.mixture.means_.argmax())])
        if c.target_false_reject is not None:
            known = int(self.mixture.means_.argmin())
            spread = float(np.sqrt(self.mixture.covariances_[known, 0, 0]))
            limit = norm.isf(c.target_false_reject, float(self.mixture.means_[known, 0]), spread)
            margins["known"] = abs(openness - limit)
            return p_unknown, bool(openness < limit)
        margins["known"] = abs(p_unknown - c.unknown_threshold)
        return p_unknown, p_unknown < c.unknown_threshold

    def fit(self, values: np.ndarray, margins: dict[str, float]) -> GaussianMixture | None:
        c = self.config
        parts = best_split(np.sort(values))
        floor = c.mixture_floor if c.openness == "cosine" else c.mixture_relative_floor * values.var()
        variances = [max(part.var(), floor) for part in parts]
        model = GaussianMixture(
            2,
            tol=c.mixture_tolerance,
            max_iter=c.mixture_iterations,
            reg_covar=0,
            weights_init=[len(part) / len(values) for part in parts],
            means_init=[[part.mean()] for part in parts],
            precisions_init=[[[1 / variance]] for variance in variances],
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            try:
                model.fit(values[:, None])
            except ValueError:  # A component has shrunk to a point: the engine's variance floor is in charge there.
                margins["mixture"] = 0.0
                return None
        if model.covariances_.min() <= floor:
            model = floored(np.sort(values), parts, floor, c)
        bounds = np.diff(model.lower_bounds_) if hasattr(model, "lower_bounds_") else np.array([])
        # The engine stops where sklearn does, unless the gain lies on the edge of the tolerance.
        if len(bounds):
            margins["tolerance"] = float(np.abs(np.abs(bounds) - c.mixture_tolerance).min())
        if not model.converged_ or model.weights_.min() < c.mixture_weight:
            margins["mixture"] = abs(model.weights_.min() - c.mixture_weight)
            return None
        self.cold_threshold = crossing(model)
        return model

    def passes(self, aleatoric: float, logits: torch.Tensor, margins: dict[str, float]) -> bool:
        c = self.config
        if c.evolution_gate == "off" or not c.text_prototypes:
            return False
        if c.evolution_gate == "quantile":
            push(self.quality_window, aleatoric, c.gate_window)
            gate = np.quantile(self.quality_window, c.evolution_quantile)
            margins["evolved"] = abs(aleatoric - gate)
            return bool(aleatoric < gate)
        value = aleatoric
        if c.evolution_gate == "entropy":
            # The rule of DPE: nats over log2 K.
            entropy = float(torch.distributions.Categorical(logits=logits, validate_args=False).entropy())
            value = entropy / np.log2(len(logits)) if len(logits) > 1 else 0.0
        margins["evolved"] = abs(value - self.evolution_threshold)
        if value >= self.evolution_threshold:
            return False
        self.evolution_threshold = (1 - c.evolution_momentum) * self.evolution_threshold + c.evolution_momentum * value
        return True


def normed(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)


def uncertainty(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.relu(logits) + 1
    total = a.sum()
    aleatoric = -(a / total * (torch.digamma(a + 1) - torch.digamma(total + 1))).sum()
    return aleatoric, len(a) / total


def push(window: list[float], value: float, capacity: int) -> None:
    window.append(value)
    if len(window) > capacity:
        del window[0]


def arrived(window) -> list[float]:
    size, capacity = window.size, len(window.arrivals)
    if size < capacity:
        return window.arrivals[:size].tolist()
    return np.roll(window.arrivals, -(window.pushed % capacity)).tolist()


def best_split(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    def scatter(cut: int) -> float:
        return sum(((part - part.mean()) ** 2).sum() for part in (ordered[:cut], ordered[cut:]))

    cut = min(range(1, len(ordered)), key=scatter)
    return ordered[:cut], ordered[cut:]


def crossing(model: GaussianMixture) -> float:
    """Where the posterior crosses one half between the means, by ever finer grids; the midpoint if it does not."""
    low, high = sorted(model.means_.ravel())
    unknown = int(model.means_.argmax())
    middle = 0.5 * (low + high)
    for _ in range(4):  # Each round looks a hundred times closer.
        grid = np.linspace(low, high, 101)
        above = model.predict_proba(grid[:, None])[:, unknown] >= 0.5
        if above[0] or not above[-1]:
            return float(middle)
        low, high = grid[above.argmax() - 1], grid[above.argmax()]
    return float(high)


def floored(values: np.ndarray, parts, floor: float, c: ProtoDCSConfig) -> GaussianMixture:
    """Expectation and maximisation with a smallest variance, which sklearn does not have."""
    weights = np.array([len(part) / len(values) for part in parts])
    means = np.array([part.mean() for part in parts])
    variances = np.array([max(part.var(), floor) for part in parts])
    before, converged = -np.inf, False
    for _ in range(c.mixture_iterations):
        log_densities = np.log(weights) + norm.logpdf(values[:, None], means, np.sqrt(variances))
        likelihood = logsumexp(log_densities, axis=1)
        share = np.exp(log_densities - likelihood[:, None])
        weights = share.mean(axis=0)
        means = (share * values[:, None]).sum(axis=0) / share.sum(axis=0)
        variances = (share * (values[:, None] - means) ** 2).sum(axis=0) / share.sum(axis=0)
        variances = np.maximum(variances, floor)
        if likelihood.mean() - before < c.mixture_tolerance:
            converged = True
            break
        before = likelihood.mean()
    model = as_sklearn(np.array([weights[0], means[0], variances[0], weights[1], means[1], variances[1]]))
    model.converged_ = converged
    return model


def as_sklearn(parameters: np.ndarray) -> GaussianMixture:
    model = GaussianMixture(2)
    model.weights_ = parameters[[0, 3]]
    model.means_ = parameters[[1, 4], None]
    model.covariances_ = parameters[[2, 5], None, None]
    model.precisions_cholesky_ = 1 / np.sqrt(model.covariances_)
    model.converged_ = True
    return model
