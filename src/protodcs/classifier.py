"""OpenSetClassifier: an encoder and a method together, images in and decisions out.

The encoder is stateless and works in batches. The method is stateful and sees one feature after another. It must never
learn from an image whose decision the caller has not received.
"""

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from html import escape
from pathlib import Path
from typing import Any, Self

import numpy as np

from . import encoders, methods
from .arrays import Features, Pixels
from .core import state
from .core.decision import Decision, Decisions
from .core.protodcs.engine import ProtoDCS
from .core.protodcs.explain import ProtoDCSExplanation
from .core.settings import Settings
from .core.state_checks import check_same_encoder
from .core.streamdcs.engine import StreamDCS
from .core.streamdcs.explain import StreamDCSExplanation
from .data.image import decode
from .data.prompts import class_names
from .encoders import Encoder
from .encoders.base import GENERAL
from .errors import ConfigError, ImageError, UsageError
from .method import FeatureMethod
from .prefetch import Prefetcher

# One batch of features waits while the next is computed, so that the encoder never waits.
BATCHES_AHEAD = 2


class OpenSetClassifier:
    """Classify images by class names, adapt to the stream, and answer "unknown" if no class fits.

        classifier = OpenSetClassifier.from_pretrained("openai/clip-vit-base-patch16", classes=["cat", "dog"])
        decision = classifier("image.jpg")

    Attributes:
        encoder: images and class names to unit features.
        engine: the method, with all it has learned; snapshots, statistics and explanations are its own.
    """

    def __init__(self, encoder: Encoder, engine: FeatureMethod):
        self.encoder = encoder
        self.engine = engine

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        classes: str | Sequence[str] | None = None,
        *,
        device: str = "auto",
        dtype: str | None = None,
        batch_size: int = 32,
        revision: str | None = None,
        templates: str | Sequence[str] | None = None,
        method: str = "streamdcs",
        config: Settings | None = None,
        vocabulary: str | Path | Sequence[str] | None = GENERAL,
        **options: Any,
    ) -> Self:
        """Load an encoder and start a method on its prototypes of `classes`.

        Args:
            name: an encoder, as `protodcs.encoders.load` takes it.
            classes: class names, a name of `protodcs.data.prompts` such as "cifar10", or a text file.
            device: "auto" uses a GPU if there is one.
            dtype: number type of the encoder; None is float32.
            batch_size: number of images that `stream` encodes at once.
            revision: revision of a model id.
            templates: sentences for the class names; None uses those of the encoder.
            method: a registered method. The default is the recommended one.
            config: the settings of the method, used as they are.
            vocabulary: names of other things, with which StreamDCS compares the classes: "general" for a list of 4,400
                names, your own names, a text file, or None. They are encoded once for each encoder, which can take
                minutes on a CPU, and stored on disk.
            options: single settings, if you give no `config`. The temperature is that of the encoder unless you set
                another.
        """
        encoder = encoders.load(
            name, device=device, dtype=dtype, batch_size=batch_size, revision=revision, templates=templates
        )
        return cls.with_encoder(encoder, classes, method=method, config=config, vocabulary=vocabulary, **options)

    @classmethod
    def with_encoder(
        cls,
        encoder: Encoder,
        classes: str | Sequence[str] | None,
        *,
        method: str = "streamdcs",
        config: Settings | None = None,
        vocabulary: str | Path | Sequence[str] | None = GENERAL,
        **options: Any,
    ) -> Self:
        """Do the same as `from_pretrained` with a loaded encoder. Several classifiers may share one."""
        if classes is None:
            raise ConfigError("The classes are missing. Pass classes=['cat', 'dog'], or a list such as 'cifar10'.")
        names = class_names(classes)
        kind = methods.REGISTER[method]
        if config is None:
            if "temperature" in kind.config_type.model_fields:
                options.setdefault("temperature", 1 / encoder.logit_scale)
            config = kind.config_type(**options)
        elif options:
            raise ConfigError(f"config and {', '.join(sorted(options))} are both given: put all options into config")
        if vocabulary == GENERAL and not kind.uses_vocabulary:
            vocabulary = None
        # First, because an error in the classes must not wait for thousands of other names.
        prototypes = encoder.prototypes(names)
        others = None if vocabulary is None else encoder.vocabulary(vocabulary, names)
        return cls(encoder, kind(prototypes, names, config, encoder.fingerprint, others))

    @classmethod
    def restored(
        cls,
        encoder: Encoder,
        file: str | os.PathLike[str],
        *,
        vocabulary: str | Path | Sequence[str] | None = GENERAL,
    ) -> Self:
        """Continue from a saved state. Raises StateError if it belongs to another encoder or vocabulary.

        A state that was learned without a vocabulary continues without one.
        """
        data = state.read(file)
        header, _ = state.unpack(data)
        check_same_encoder(header.encoder, encoder.fingerprint, "stream")
        others = None if vocabulary is None or header.vocabulary is None else encoder.vocabulary(vocabulary)
        return cls(encoder, methods.restore(data, encoder.fingerprint, vocabulary=others))

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in order."""
        return self.engine.classes

    def __call__(self, image: Any) -> Decision:
        """Decide on one image (path, bytes, PIL image or array) and learn from it."""
        return self.engine.observe(self.encoder.encode([image])[0])

    def peek(self, image: Any) -> Decision:
        """Return what the next call with this image would return. Nothing changes."""
        return self.engine.peek(self.encoder.encode([image])[0])

    def explain(self, image: Any) -> StreamDCSExplanation | ProtoDCSExplanation:
        """Return how the method would decide on one image, and why. `print` it for sentences. Nothing changes.

        Raises:
            UsageError: the method has no explanations. StreamDCS and ProtoDCS have them.
        """
        if not isinstance(self.engine, StreamDCS | ProtoDCS):
            raise UsageError(f"the method {self.engine.name!r} has no explanations; 'streamdcs' and 'protodcs' do")
        return self.engine.explain(self.encoder.encode([image])[0])

    def stream(self, images: Iterable[Any]) -> Iterator[Decision]:
        """Yield a decision for each image, in order. The encoder takes `batch_size` images at once.

        A background thread reads, decodes and encodes, up to two batches beyond the one that is being decided. The
        engine runs in the thread of the caller. Between two decisions it has seen exactly the images decided so far,
        and all its functions can be used. With `batch_size` 1 there is no thread, and an image is read when you ask for
        its decision. Closing or dropping the iterator stops the thread.

        An image that cannot be used raises ImageError after the decisions on all images before it, and so does an error
        of `images` itself. If a stream has to survive such images, decode them first with `protodcs.data.decode`.
        """
        live = self.encoder.batch_size == 1
        batches = self._encoded(iter(images)) if live else Prefetcher(self._encoded, images, BATCHES_AHEAD)
        with closing(batches):
            for features in batches:
                for feature in features:
                    yield self.engine.observe(feature)

    def classify(self, images: Iterable[Any]) -> Decisions:
        """Decide on a whole collection of images; their order does not matter.

        The engine learns from all images first, and then decides on each of them. Use it for a folder or a data set,
        and `stream` if images arrive one after another. An image that cannot be used raises ImageError, and the engine
        then learns nothing. Memory holds the features of all images.
        """
        with closing(Prefetcher(self._encoded, images, BATCHES_AHEAD)) as batches:
            rows = list(batches)
        features = np.concatenate(rows) if rows else np.empty((0, self.encoder.dimension), dtype=np.float32)
        return self.engine.observe_many(features, two_pass=True)

    def _encoded(self, images: Iterator[Any]) -> Generator[Features, None, None]:
        """Yield the features of the images, batch by batch."""
        for batch in _batches(_decoded(images), self.encoder.batch_size):
            yield self.encoder.encode_pixels(batch)

    def add_class(self, name: str) -> None:
        """Append a class by its name while the stream runs."""
        self.engine.add_class(name, self.encoder.prototypes([name])[0])

    def remove_class(self, name: str) -> None:
        """Remove a class."""
        self.engine.remove_class(name)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Save the state; `restored` continues from it."""
        self.engine.save(file)

    def _repr_html_(self) -> str:
        """Return encoder and statistics, for notebooks."""
        return f"<p>{escape(repr(self))}</p>{self.engine._repr_html_()}"

    def __repr__(self) -> str:
        return f"OpenSetClassifier({self.encoder.name!r}, {self.engine.name!r}, {len(self.classes)} classes)"


def _decoded(images: Iterator[Any]) -> Iterator[Pixels]:
    """Yield the pixels of each image. An error names the number of the image."""
    for number, image in enumerate(images):
        try:
            yield decode(image)
        except ImageError as problem:
            raise ImageError(f"image {number} of the stream: {problem}") from None


def _batches(images: Iterator[Pixels], size: int) -> Iterator[list[Pixels]]:
    """Yield the images in lists of `size`. If reading one fails, those before it come first."""
    batch: list[Pixels] = []
    failure: Exception | None = None
    try:
        for image in images:
            batch.append(image)
            if len(batch) == size:
                yield batch
                batch = []
    except Exception as problem:
        failure = problem
    if batch:
        yield batch
    if failure is not None:
        try:
            raise failure
        finally:
            # The error refers to this frame: the two would keep each other and the images alive.
            del failure
