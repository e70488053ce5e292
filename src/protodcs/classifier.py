"""Images in, decisions out: an encoder and a method, joined.

The encoder is stateless and works in batches, ahead of the method; the method is stateful and sees one feature after
another, in order. It must never learn from an image whose decision was not asked for.
"""

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import numpy as np

from . import encoders, methods
from .ahead import Ahead
from .arrays import Features, Pixels
from .core import state
from .core.decision import Decision, Decisions
from .core.settings import Settings
from .data.image import decode
from .data.prompts import class_names
from .encoders import Encoder
from .errors import ConfigError, ImageError
from .method import FeatureMethod

# The methods that use the encoder's temperature unless another one is given.
_TAKES_TEMPERATURE = ("streamdcs", "protodcs")
# One batch of features waits while the next is in the making, so the encoder never stands still when one side is late.
BATCHES_AHEAD = 2


class OpenSetClassifier:
    """A classifier over class names that adapts to its stream and says "unknown" when it should.

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
        **options: Any,
    ) -> Self:
        """Load an encoder and start a method on its prototypes of `classes`.

        Args:
            name: an encoder, as `protodcs.encoders.load` takes it.
            classes: class names, a name of `protodcs.data.prompts` such as "cifar10", or a text file.
            device: "auto" takes a GPU when there is one.
            dtype: number type of the encoder; None is float32.
            batch_size: how many images `stream` encodes at once.
            revision: of a hub name.
            templates: the sentences a class name is put into; None is the encoder's own choice.
            method: a registered method. The default is the recommended one.
            config: the settings of the method, used as they are.
            options: single settings, if you give no `config`. StreamDCS and ProtoDCS use the encoder's temperature
                unless you set another.
        """
        encoder = encoders.load(
            name, device=device, dtype=dtype, batch_size=batch_size, revision=revision, templates=templates
        )
        return cls.with_encoder(encoder, classes, method=method, config=config, **options)

    @classmethod
    def with_encoder(
        cls,
        encoder: Encoder,
        classes: str | Sequence[str] | None,
        *,
        method: str = "streamdcs",
        config: Settings | None = None,
        **options: Any,
    ) -> Self:
        """As `from_pretrained`, beside an encoder that is loaded already; many classifiers may share one."""
        if classes is None:
            raise ConfigError("name the classes: classes=['cat', 'dog'], or a list such as 'cifar10'")
        names = class_names(classes)
        kind = methods.REGISTER[method]
        if config is None:
            if method in _TAKES_TEMPERATURE:
                options.setdefault("temperature", 1 / encoder.logit_scale)
            config = kind.config_type(**options)
        elif options:
            raise ConfigError(f"config and {', '.join(sorted(options))} are both given: put all options into config")
        return cls(encoder, kind(encoder.prototypes(names), names, config, encoder.fingerprint))

    @classmethod
    def restored(cls, encoder: Encoder, file: str | os.PathLike[str]) -> Self:
        """Continue from a saved state; one that was learned beside another encoder is refused."""
        return cls(encoder, methods.restore(state.read(file), encoder.fingerprint))

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in order."""
        return self.engine.classes

    def __call__(self, image: Any) -> Decision:
        """Decide on one image - a path, bytes, a PIL image or an array - and learn from it."""
        return self.engine.observe(self.encoder.encode([image])[0])

    def stream(self, images: Iterable[Any]) -> Iterator[Decision]:
        """Decisions on many images, one for each, in order; the encoder takes `batch_size` of them at once.

        A background thread reads, decodes and encodes, up to two batches beyond the one that is being decided. The
        engine works in the thread of the caller, when a decision is asked for: between two decisions it has seen
        exactly the images decided so far, and all its functions can be used. With `batch_size` 1 there is no thread,
        and an image is read when its decision is asked for. Closing the iterator, or dropping it, stops the thread.

        An image that cannot be used raises ImageError at its place, after the decisions on all images before it, and
        an error of `images` itself comes out the same way: decode images first, with `protodcs.data.decode`, where a
        stream has to survive them.
        """
        live = self.encoder.batch_size == 1
        batches = self._encoded(iter(images)) if live else Ahead(self._encoded, images, BATCHES_AHEAD)
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
        with closing(Ahead(self._encoded, images, BATCHES_AHEAD)) as batches:
            rows = list(batches)
        features = np.concatenate(rows) if rows else np.empty((0, self.encoder.dimension), dtype=np.float32)
        return self.engine.observe_many(features, two_pass=True)

    def _encoded(self, images: Iterator[Any]) -> Generator[Features, None, None]:
        """The features of the images, batch after batch."""
        for batch in _batches(_decoded(images), self.encoder.batch_size):
            yield self.encoder.encode_pixels(batch)

    def add_class(self, name: str) -> None:
        """Append a class by its name while the stream runs."""
        self.engine.add_class(name, self.encoder.prototypes([name])[0])

    def remove_class(self, name: str) -> None:
        """Take a class off the list."""
        self.engine.remove_class(name)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write what was learned; `restored` continues from it."""
        self.engine.save(file)

    def __repr__(self) -> str:
        return f"OpenSetClassifier({self.encoder.name!r}, {self.engine.name!r}, {len(self.classes)} classes)"


def _decoded(images: Iterator[Any]) -> Iterator[Pixels]:
    """The pixels of each image; an error says at which place of the stream it stands."""
    for number, image in enumerate(images):
        try:
            yield decode(image)
        except ImageError as problem:
            raise ImageError(f"image {number} of the stream: {problem}") from None


def _batches(images: Iterator[Pixels], size: int) -> Iterator[list[Pixels]]:
    """The images in lists of `size`; where reading one fails, those before it come first."""
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
            # The error knows this frame: they would keep each other, and the images, alive.
            del failure
