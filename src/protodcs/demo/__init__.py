"""A world without downloads: drawn images of known and unknown objects, shifts, and streams.

    from protodcs.demo import KNOWN, DemoStream

    stream = DemoStream(500, unknown=0.2, shifts=("clean", "fog"))

The encoder for these images loads by the name "demo". The command `protodcs demo --terminal` shows it all.
Needs Pillow; the extra `protodcs[demo]` installs it with everything else.
"""

from .drawing import draw
from .kinds import EXTRA, KNOWN, UNKNOWN
from .shifts import SHIFTS, shifted
from .streams import DemoStream, Sample

__all__ = ["EXTRA", "KNOWN", "SHIFTS", "UNKNOWN", "DemoStream", "Sample", "draw", "shifted"]
