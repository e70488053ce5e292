"""What every process of the service does when it is ready."""

import gc
import sys

# New objects after which the youngest ones are collected. A request has some hundred until its reply. With Python's
# default of 700, a busy process would spend a twentieth of its time on garbage collections.
_GC_THRESHOLD = 5_000
# A thread that computes in Python lets another one run after so many seconds. Python's default is 0.005.
_SWITCH_SECONDS = 0.0002


def avoid_pauses() -> None:
    """Avoid causes of pauses in which requests wait. Call this once, when the process is ready.

    All present objects are left out of garbage collection. The modules of the HTTP process alone hold about 190,000,
    and they stay until the process ends. A full collection would visit them all, for about 145 ms.

    The event loop gets its turn sooner while another thread parses a large body.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
    sys.setswitchinterval(_SWITCH_SECONDS)
