"""From a folder of pictures to decisions, with the mini encoder: needs the test data, named by PROTODCS_DATA.

`python examples/images.py pictures` writes the folder; the same on the command line is then
`protodcs classify pictures --classes cifar10 --model mini --out decisions.csv --sheet unknown.png`.
"""

import sys
from pathlib import Path

from PIL import Image

from protodcs import OpenSetClassifier
from protodcs.data import open_source


def write_pictures(folder):
    """200 objects of the ten CIFAR-10 classes and 200 digits, which belong to none of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, name in (("object", "cifar10-test"), ("digit", "svhn-test")):
        for number, image in enumerate(open_source(name).read(range(200))):
            Image.fromarray(image).save(folder / f"{number:03d}-{kind}.png")


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/images.py FOLDER")
    folder = Path(sys.argv[1])
    write_pictures(folder)
    classifier = OpenSetClassifier.from_pretrained("mini", classes="cifar10")
    files = sorted(folder.glob("*.png"))
    unknown = {"object": 0, "digit": 0}
    for file, decision in zip(files, classifier.classify(files), strict=True):
        unknown[file.stem.split("-")[1]] += not decision.known
    print(f"unknown: {unknown['digit']} of 200 digits, {unknown['object']} of 200 objects")


if __name__ == "__main__":
    main()
