"""Class names for the WordNet numbers that ImageNet and its relatives use as folder names.

Complete sets take the lists of this package, parts of them a list that lies near the images; a number that nobody
explains stays as it is, and so do folder names that are no WordNet numbers.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..prompts import class_names

# The lists that come with Tiny-ImageNet and ImageNet: a number, white space, names separated by commas.
WORD_LISTS = ("words.txt", "LOC_synset_mapping.txt", "synset_words.txt")
_NUMBER = re.compile(r"n\d{8}")
# Complete sets are recognised by how many classes they have; both lists are sorted by WordNet number.
_COMPLETE = {200: "tiny-imagenet", 1000: "imagenet"}


def class_words(numbers: Sequence[str], folder: Path) -> tuple[str, ...]:
    """The names of `numbers`, which are sorted; lists are looked for in `folder` and up to three folders above."""
    if not all(_NUMBER.fullmatch(number) for number in numbers):
        return tuple(numbers)
    if len(numbers) in _COMPLETE:
        return class_names(_COMPLETE[len(numbers)])
    words = _words_near(folder)
    names = [words.get(number, number) for number in numbers]
    # WordNet has two cranes: a bird and a machine. Class names must differ, so such names keep their number.
    often = Counter(names)
    return tuple(
        name if often[name] == 1 else f"{name} ({number})" for name, number in zip(names, numbers, strict=True)
    )


def _words_near(folder: Path) -> dict[str, str]:
    for place in [folder, *folder.resolve().parents[:3]]:
        for file in WORD_LISTS:
            try:
                text = (place / file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            lines = (line.split(None, 1) for line in text.splitlines())
            return {line[0]: line[1].split(",")[0].strip() for line in lines if len(line) == 2}
    return {}
