"""Copy the JavaScript libraries of the web UI from npm into `src/protodcs/ui/vendor`, and write their notices.

    python scripts/vendor_ui.py

Needs npm. To update a library, change its version and integrity below: `npm view NAME@VERSION dist.integrity`.
"""

import base64
import hashlib
import io
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

VENDOR = Path(__file__).parent.parent / "src" / "protodcs" / "ui" / "vendor"


class Package(NamedTuple):
    """A package on npm, and the files of it that the UI loads, each under a new name."""

    name: str
    version: str
    integrity: str
    files: dict[str, str]


PACKAGES = (
    Package(
        "preact",
        "11.2.0",
        "sha512-/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
        {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "hooks.js"},
    ),
    Package(
        "uplot",
        "1.6.32",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {"dist/uPlot.iife.min.js": "uplot.js", "dist/uPlot.min.css": "uplot.css"},
    ),
)


def as_module(name: str, source: bytes) -> bytes:
    """Return a file as the browser loads it: an ES module without bare imports and source maps."""
    lines = [line for line in source.decode().splitlines() if not line.startswith("//# sourceMappingURL")]
    text = "\n".join(lines).replace('from"preact"', 'from"./preact.js"') + "\n"
    return (text + "export default uPlot;\n" if name == "uplot.js" else text).encode()


def main() -> None:
    """Write all files and their notices."""
    rows, licences = [], []
    for package in PACKAGES:
        archive = download(package)
        licences.append(f"## {package.name} {package.version}\n\n{read(archive, 'LICENSE').decode().strip()}\n")
        for path, name in package.files.items():
            content = as_module(name, read(archive, path))
            (VENDOR / name).write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            rows.append(f"| {name} | {package.name} {package.version} | {path} | {digest} | {package.integrity} |")
    table = [
        "| file | package | file in the package | sha256 of our file | integrity of the package |",
        "|---|---|---|---|---|",
    ]
    head = """# Libraries of the web UI

Written by `scripts/vendor_ui.py`, which makes three changes: source map comments are removed, `preact` is
imported by path, and uPlot becomes an ES module.
"""
    (VENDOR / "NOTICES.md").write_text("\n".join([head, *table, *rows, "", *licences]))


def download(package: Package) -> tarfile.TarFile:
    """Return the archive of a package. Raise ValueError if it is not the one that we reviewed."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(folder).iterdir()
        data = file.read_bytes()
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    if integrity != package.integrity:
        raise ValueError(
            f"{package.name} {package.version} has the integrity {integrity}, expected {package.integrity}"
        )
    return tarfile.open(fileobj=io.BytesIO(data))


def read(archive: tarfile.TarFile, path: str) -> bytes:
    """Return a file of a package."""
    found = archive.extractfile(f"package/{path}")
    if found is None:
        raise ValueError(f"the package has no file {path}")
    return found.read()


if __name__ == "__main__":
    main()
