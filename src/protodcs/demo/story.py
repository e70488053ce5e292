"""What the browser demo sends beside its images: the truth, and what frozen zero-shot decides.

It travels in the reference to the image, which the service stores and never reads. Only the page of the demo does.
"""

from collections.abc import Iterator
from urllib.parse import urlencode

from .. import encoders, methods
from ..arrays import Pixels
from .comparison import zero_shot_threshold
from .kinds import KNOWN
from .streams import DemoStream

_PREFIX = "demo?"


def told(streams: Iterator[DemoStream]) -> Iterator[tuple[Pixels, str]]:
    """Yield the images of all streams with their references."""
    encoder = encoders.load("demo")
    frozen = methods.create("zero_shot", encoder.prototypes(KNOWN), KNOWN, threshold=zero_shot_threshold(encoder))
    for stream in streams:
        for place, sample in enumerate(stream):
            label = frozen.observe(encoder.encode_pixels([sample.image])[0]).label
            left = stream.shift_length - place % stream.shift_length
            end = min(place + left, len(stream))
            about = {
                "place": place,
                "images": len(stream),
                "shift": sample.shift,
                "left": end - place,
                "next": stream.shift_at(end) if end < len(stream) else stream.shift_at(0),
                "truth": sample.kind,
                "known": int(sample.label >= 0),
                "frozen": label or "",
            }
            yield sample.image, _PREFIX + urlencode(about)
