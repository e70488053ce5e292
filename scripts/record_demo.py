"""Record the page of `protodcs demo` for README and docs: `python scripts/record_demo.py`.

Writes docs/assets/demo.gif, ten seconds and at most 2 MB. It begins 15 images before the first fog of seed 0, whatever
the decisions are. Needs chromium and the checks in tests/ui (`npm install`).
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

ROOT = Path(__file__).parent.parent
GIF = ROOT / "docs" / "assets" / "demo.gif"
FRAMES, MILLISECONDS, WIDTH, COLOURS = 20, 500, 880, 256
LARGEST = 2_000_000


def main():
    """Start the demo, take pictures of its page, and write them as one file."""
    command = [sys.executable, "-m", "protodcs", "demo", "--no-browser", "--seed", "0", "--rate", "8"]
    with TemporaryDirectory() as folder:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as demo:
            address = re.search(r"http\S+", demo.stdout.readline())[0]
            frames = [str(FRAMES), str(MILLISECONDS)]
            environment = {"PROTODCS_PYTHON": sys.executable, **os.environ}
            subprocess.run(
                ["node", "record.js", address, folder, *frames], cwd=ROOT / "tests" / "ui", env=environment, check=True
            )
            demo.send_signal(signal.SIGINT)
        pictures = [Image.open(file).convert("RGB") for file in sorted(Path(folder).glob("frame-*.png"))]
    height = round(WIDTH * pictures[0].height / pictures[0].width)
    small = [picture.resize((WIDTH, height), Image.Resampling.LANCZOS) for picture in pictures]
    # One palette for all frames, so that what stays does not flicker.
    every = Image.new("RGB", (WIDTH, height * len(small)))
    for place, picture in enumerate(small):
        every.paste(picture, (0, place * height))
    palette = every.quantize(COLOURS)
    first, *others = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in small]
    first.save(GIF, save_all=True, append_images=others, duration=MILLISECONDS, loop=0, optimize=True)
    size = GIF.stat().st_size
    print(f"{GIF.relative_to(ROOT)}: {size / 1e6:.2f} MB")
    if size > LARGEST:
        raise SystemExit("The file is too large: record fewer frames, or use fewer colours.")


if __name__ == "__main__":
    main()
