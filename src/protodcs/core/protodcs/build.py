"""Build a state from another one: restored from a state file, or with other classes."""

import numpy as np

from ...arrays import Feature, Integers
from ...errors import StateError
from ..prototypes import Prototypes
from ..state import Arrays
from ..state_checks import Counters
from . import alignment
from .config import ProtoDCSConfig
from .residual import queue_means
from .state import NUMBERS, WINDOWS, ProtoDCSState, Waiting
from .state_checks import checked_arrays


def restored(
    prototypes: Prototypes, config: ProtoDCSConfig, counters: Counters, arrays: Arrays, trusted: bool
) -> ProtoDCSState:
    """Return the state that was exported. Raise StateError for anything that `export` cannot have written."""
    found = checked_arrays(prototypes.unit, config, counters, arrays, trusted)
    try:
        state = ProtoDCSState(prototypes, config)
    except MemoryError:
        raise StateError("the state needs more memory than this machine has") from None
    if "text" in found:
        state.replace_text(found["text"].copy())
    for name in NUMBERS:
        setattr(state, name, counters[name])
    filled = np.arange(config.cache_size) < found["counts"][:, None]
    state.counts[:] = found["counts"]
    state.cache[filled], state.quality[filled] = found["cache"], found["quality"]
    _find_visual(state)
    state.text_sum[state.keys], state.visual_sum[state.opened] = found["text_sum"], found["visual_sum"]
    alignment.derive(state, state.opened)
    state.mixture[:] = found["mixture"]
    samples = zip(found["buffer_class"].tolist(), found["buffer"], found["buffer_quality"].tolist(), strict=True)
    state.waiting = [Waiting(k, feature.copy(), uncertainty) for k, feature, uncertainty in samples]
    for name in WINDOWS:
        pushed = counters["confirmed"] if name == "quality_window" else state.learned
        getattr(state, name).restore(found[name], pushed)
    return state


def with_classes(state: ProtoDCSState, kept: Integers, added: Feature) -> ProtoDCSState:
    """Return a state that keeps the classes `kept`, followed by the new unit prototypes `added` (n, d)."""
    edited = ProtoDCSState(Prototypes.of_unit(np.concatenate([state.initial[kept], added])), state.config)
    if state.evolved:
        edited.replace_text(np.concatenate([state.text[kept], added]))
    for name in ("cache", "quality", "counts"):
        getattr(edited, name)[: len(kept)] = getattr(state, name)[kept]
    for name in NUMBERS:
        setattr(edited, name, getattr(state, name))
    for name in WINDOWS:
        window = getattr(state, name)
        getattr(edited, name).restore(window.arrivals[: window.size], window.pushed)
    edited.mixture[:] = state.mixture
    position = {k: at for at, k in enumerate(kept.tolist())}
    edited.waiting = [sample._replace(k=position[sample.k]) for sample in state.waiting if sample.k in position]
    _find_visual(edited)
    alignment.rebuild(edited)
    return edited


def _find_visual(state: ProtoDCSState) -> None:
    """Compute what follows from the queues alone."""
    state.find_opened()
    opened = state.opened
    state.visual[opened], state.lengths[opened] = queue_means(state.cache[opened], state.counts[opened])
