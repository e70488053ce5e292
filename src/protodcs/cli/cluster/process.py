"""One process of a cluster: the program that a `ProcessActor` starts.

It gets what it needs as a line of JSON on its standard input: the settings, the file descriptor to report to, and the
address of Ray if it uses the shared encoder. When its standard input ends, its actor is gone, and it stops.
"""

import json
import os
import signal
import sys
import threading
from typing import Any

from ...errors import ProtoDCSError
from ...serve.cluster import service
from ...serve.settings import ServeConfig


def main() -> int:
    """Serve until SIGTERM, or until the actor is gone. Return the exit code."""
    start = json.loads(sys.stdin.buffer.readline())
    # The actor sees this process end when nobody has this open any more.
    os.set_inheritable(start["report"], False)
    threading.Thread(target=_stop_with_actor, daemon=True).start()

    def report(**facts: Any) -> None:
        os.write(start["report"], json.dumps(facts).encode() + b"\n")

    try:
        config = ServeConfig(**start["settings"])
        encoder = None
        if start["ray"] is not None:
            from .encoder import RayEncoder

            encoder = RayEncoder(start["ray"], start["encoders"])
        service.serve(config, lambda address: report(serving=address), encoder)
    except ProtoDCSError as problem:
        report(problem=str(problem))
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


def _stop_with_actor() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
