"""Corrupted copies of a set on disk, in the layouts in which such sets are published.

`npy` is the one of CIFAR-10-C: a file for each corruption with all severities one after another, and the labels beside
it. `folder` is the one of Tiny-ImageNet-C and ImageNet-C: corruption, severity, class, image; as PNG, so that no second
compression is added. A part appears whole or not at all.
"""

import io
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from ..arrays import Pixels
from ..atomic_io import replace_file
from ..errors import ConfigError, DataError
from .corruptions import FAMILIES, NAMES, VARIANTS, Variant
from .reading import read_corrupted
from .source import ImageSource

ABOUT = "copies.json"
_UNLABELLED = "unlabelled"
_NOT_IN_NAMES = frozenset('%/\\:*?"<>|')
# The packages whose arithmetic and codecs the pixels come from.
_PIXELS_FROM = ("numpy", "opencv-python-headless", "pillow")


@dataclass(frozen=True, slots=True)
class Part:
    """What is written in one piece: a corruption at one or more severities."""

    corruption: str
    severities: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CorruptedExport:
    """A set of corrupted copies; a process that is given one can write any part of it."""

    folder: Path
    source: ImageSource
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    form: Literal["npy", "folder"]
    family: str | None
    variant: Variant
    side: int | None

    @classmethod
    def planned(
        cls,
        *,
        folder: Path,
        source: ImageSource,
        corruptions: Sequence[str],
        severities: Sequence[int],
        form: str,
        family: str | None,
        variant: str,
        side: int | None,
    ) -> "CorruptedExport":
        """The copies a user asks for, after a look at every setting."""
        if not len(source):
            raise DataError(f"{source.name} has no images")
        if side is not None and not 8 <= side <= 2048:
            raise ConfigError(f"the side is 8 to 2048 pixels; given: {side}")
        if _UNLABELLED in source.classes:
            raise DataError(
                f"{source.name} has a class called {_UNLABELLED!r}, which is where images without a class go"
            )
        strange = [name for name in corruptions if name not in NAMES]
        if strange or not corruptions:
            raise ConfigError(f"there is no corruption {(strange or [''])[0]!r}: choose from {', '.join(NAMES)}")
        if not severities or not set(severities) <= {1, 2, 3, 4, 5}:
            raise ConfigError(f"severities are 1 to 5; given: {list(severities)}")
        if form not in ("npy", "folder"):
            raise ConfigError(f"the format is npy or folder; given: {form!r}")
        if variant not in VARIANTS or family not in (None, *FAMILIES):
            raise ConfigError(f"the variant is one of {', '.join(VARIANTS)}, the family of {', '.join(FAMILIES)}")
        return cls(
            folder=folder,
            source=source,
            corruptions=tuple(dict.fromkeys(corruptions)),
            severities=tuple(sorted(set(severities))),
            form=cast(Literal["npy", "folder"], form),
            family=family,
            variant=variant,
            side=side,
        )

    def parts(self) -> list[Part]:
        """Everything that is to be written."""
        if self.form == "npy":
            return [Part(name, self.severities) for name in self.corruptions]
        return [Part(name, (severity,)) for name in self.corruptions for severity in self.severities]

    def open(self) -> list[Part]:
        """Begin or continue in the folder; returns the parts that are still to write."""
        about = json.dumps(self._about(), indent=1, sort_keys=True) + "\n"
        file = self.folder / ABOUT
        if file.exists():
            if file.read_text(encoding="utf-8") != about:
                raise DataError(f"{self.folder} holds other copies, or was begun with other packages: see its {ABOUT}")
        else:
            if self.folder.exists() and any(self.folder.iterdir()):
                raise DataError(f"{self.folder} is not empty and holds no {ABOUT}: give a new folder")
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(file, about.encode())
        if self.form == "npy" and not (self.folder / "labels.npy").exists():
            labels = io.BytesIO()
            np.save(labels, np.tile(self.source.labels, len(self.severities)))
            replace_file(self.folder / "labels.npy", labels.getvalue())
        return [part for part in self.parts() if not self._place(part).exists()]

    def write(self, part: Part) -> None:
        """Write one part."""
        place = self._place(part)
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_name(f".draft-{place.name}")
        if self.form == "npy":
            self._write_npy(part, draft)
        else:
            self._write_folder(part, draft)
        draft.rename(place)

    def _about(self) -> dict[str, Any]:
        return {
            "source": self.source.name,
            "fingerprint": self.source.fingerprint,
            "images": len(self.source),
            "classes": list(self.source.classes),
            "corruptions": list(self.corruptions),
            "severities": list(self.severities),
            "format": self.form,
            "family": self.family,
            "variant": self.variant,
            "side": self.side,
            "packages": {name: _version(name) for name in _PIXELS_FROM},
        }

    def _place(self, part: Part) -> Path:
        if self.form == "npy":
            return self.folder / f"{part.corruption}.npy"
        return self.folder / part.corruption / str(part.severities[0])

    def _corrupted(self, part: Part, severity: int) -> Iterator[Pixels]:
        return read_corrupted(
            self.source,
            range(len(self.source)),
            part.corruption,
            severity,
            family=self.family,
            variant=self.variant,
            side=self.side,
        )

    def _write_npy(self, part: Part, draft: Path) -> None:
        count, shape = len(self.source), None
        for level, severity in enumerate(part.severities):
            for index, image in enumerate(self._corrupted(part, severity)):
                if shape is None:
                    shape = image.shape
                    size = (count * len(part.severities), *shape)
                    array = np.lib.format.open_memmap(draft, mode="w+", dtype=np.uint8, shape=size)
                if image.shape != shape:
                    raise DataError(
                        f"{self.source.name} has images of {shape} and {image.shape}: use --format folder, or --side"
                    )
                array[level * count + index] = image
        array.flush()

    def _write_folder(self, part: Part, draft: Path) -> None:
        from PIL import Image

        shutil.rmtree(draft, ignore_errors=True)
        labels, classes = self.source.labels, self.source.classes
        for index, image in enumerate(self._corrupted(part, part.severities[0])):
            inside = draft / (_file_name(classes[labels[index]]) if labels[index] >= 0 else _UNLABELLED)
            inside.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(inside / f"{index:07d}.png", compress_level=1)


def _file_name(class_name: str) -> str:
    """The name of a class as the name of a folder: two classes never share one, none is hidden or leads elsewhere."""
    letters = [
        f"%{ord(letter):02X}" if letter in _NOT_IN_NAMES or ord(letter) < 32 else letter for letter in class_name
    ]
    if letters[0] == ".":
        letters[0] = "%2E"
    return "".join(letters)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except LookupError:
        return None
