"""Programs that get a signal at a chosen step, so that a test does not have to catch the moment by the clock."""

import os
import signal
from pathlib import Path

# Python imports this module at its start, in processes that a program spawns too.
_SITE = """
import os
from pathlib import Path

moves = 0

def interrupted(move):
    def moved(self, target):
        global moves
        moves += str(target).endswith({ending!r})
        if moves == {move}:
            {act}
        return move(self, target)
    return moved

Path.rename, Path.replace = interrupted(Path.rename), interrupted(Path.replace)
"""
_ACTS = {
    signal.SIGKILL: "os.killpg(os.getpgrp(), 9)",
    signal.SIGINT: "os.kill(os.getpid(), 2)",
}


def interrupting(folder: Path, ending: str, move: int, how: signal.Signals = signal.SIGKILL) -> dict[str, str]:
    """Return an environment in which a program is interrupted before it puts a file in its place.

    The program needs a process group of its own (`start_new_session=True`): SIGKILL ends all of the group.

    Args:
        folder: where the module for `PYTHONPATH` is written.
        ending: how the names of the files end.
        move: which file of that ending, counted from 1 in each process.
        how: SIGKILL for the process group, or SIGINT for the process.
    """
    site = folder / "interrupting"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE.format(ending=ending, move=move, act=_ACTS[how]))
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
