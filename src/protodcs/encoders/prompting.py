"""Class features as a differentiable function of context vectors put in place of a prompt's first words.

A sentence is made of every class name; where the words would be embedded, the context takes their place. The weights
and the graph of the text tower are not touched: its token embedding is hooked for one call, and never longer. Two
threads must not use one text tower while its prompts are computed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import InputError

WORDS = "a photo of a"
# So many sentences of like length go through the tower at once: padding is work for nothing.
_AT_ONCE = 64
# The activations of so many sentences are kept for the gradient; those of more are made again, part by part.
_KEPT = 256


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """One sentence for each class, with the vectors of its first words left open.

    Attributes:
        initial: (n, width) float32, the vectors of the words themselves.
        parts: tokens (N, length) of the sentences, the short ones first.
        order: (K,), where the sentence of each class is among the parts.
        start: position of the first word in every sentence.
        embedding: the module of the text tower that makes vectors of tokens.
        forward: features (N, dimension) of tokens (N, length), differentiable.
        kept: the activations of so many sentences are kept for the gradient.
    """

    initial: Tensor
    parts: tuple[Tensor, ...]
    order: Tensor
    start: int
    embedding: nn.Module
    forward: Callable[[Tensor], Tensor]
    kept: int = _KEPT

    def features(self, context: Tensor) -> Tensor:
        """(K, dimension) float32 for a context like `initial`; not of unit length."""
        if context.shape != self.initial.shape:
            raise InputError(
                f"the context must have the shape of the words it replaces, {tuple(self.initial.shape)}; given: "
                f"{tuple(context.shape)}"
            )
        return torch.cat([self._features(context, part) for part in self.parts])[self.order]

    def _features(self, context: Tensor, tokens: Tensor) -> Tensor:
        if len(self.order) <= self.kept or not (torch.is_grad_enabled() and context.requires_grad):
            return self._part(context, tokens)
        rows: Tensor = checkpoint(self._part, context, tokens, use_reentrant=False, preserve_rng_state=False)
        return rows

    def _part(self, context: Tensor, tokens: Tensor) -> Tensor:
        with _replaced(self.embedding, self.start, context):
            return self.forward(tokens).float()


def prompts(
    names: Sequence[str],
    words: str,
    tokenise: Callable[[Sequence[str]], Tensor],
    embedding: nn.Module,
    forward: Callable[[Tensor], Tensor],
) -> Prompts:
    """The prompts "`words` NAME." of class names.

    Args:
        names: of the classes.
        words: that the context replaces.
        tokenise: (N, length) tokens of sentences, padded to the longest of them or to a length of its own.
        embedding: the module that makes vectors of tokens.
        forward: features of tokens.
    """
    if isinstance(names, str) or not names:
        raise InputError(f"prompts are made of a list of class names; given: {names!r}")
    if not words.strip():
        raise InputError(f"prompts need words that a context can replace, such as {WORDS!r}; given: {words!r}")
    # Tensors made in a caller's inference mode could never take part in a gradient.
    with torch.inference_mode(False), torch.no_grad():
        return _prompts([f"{words} {name}." for name in names], words, tokenise, embedding, forward)


def _prompts(
    sentences: Sequence[str],
    words: str,
    tokenise: Callable[[Sequence[str]], Tensor],
    embedding: nn.Module,
    forward: Callable[[Tensor], Tensor],
) -> Prompts:
    rows = tokenise(["", words, *sentences])
    # What an empty sentence shares with the words is the mark of the start, if the tokenizer sets one.
    start = _common_prefix(rows[:2])
    stop = _common_prefix(rows[1:])
    if stop <= start:
        raise InputError(f"the tokenizer joins {words!r} with the class names: choose other words")
    initial = embedding(rows[2:3, start:stop])[0].float()
    by_length = sorted(range(len(sentences)), key=lambda place: tokenise([sentences[place]]).shape[1])
    parts = [
        tokenise([sentences[place] for place in by_length[first : first + _AT_ONCE]])
        for first in range(0, len(sentences), _AT_ONCE)
    ]
    order = torch.argsort(torch.tensor(by_length, device=rows.device))
    return Prompts(initial, tuple(parts), order, start, embedding, forward)


def _common_prefix(rows: Tensor) -> int:
    """At how many places, from the left, all rows agree."""
    return int((rows == rows[:1]).all(dim=0).long().cumprod(dim=0).sum())


@contextmanager
def _replaced(embedding: nn.Module, start: int, context: Tensor) -> Iterator[None]:
    stop = start + len(context)

    def replace(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        middle = context.to(output.dtype).expand(len(output), -1, -1)
        return torch.cat([output[:, :start], middle, output[:, stop:]], dim=1)

    handle = embedding.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()
