"""The web UI: static files that the service sends to browsers. They need no build step.

`files` is all that Python knows of them; `serve/api/ui.py` sends them.
"""

from importlib.resources import files as _package
from pathlib import PurePosixPath

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/markdown; charset=utf-8",
}


def files() -> dict[str, bytes]:
    """Return the content of all files of the UI by their paths, such as "views/streams.js"."""
    found: dict[str, bytes] = {}
    folders = [(PurePosixPath(), _package(__name__))]
    while folders:
        path, folder = folders.pop()
        for entry in folder.iterdir():
            if entry.is_dir():
                folders.append((path / entry.name, entry))
            elif PurePosixPath(entry.name).suffix in MEDIA_TYPES:
                found[str(path / entry.name)] = entry.read_bytes()
    return found
