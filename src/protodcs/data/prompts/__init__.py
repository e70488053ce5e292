"""Class names and prompt templates, as data: one text file each, one entry a line, `#` starts a comment.

`class_names` and `templates` take a name of the files here, the path of a user's own file, or a list.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from ...errors import DataError, InputError, did_you_mean

__all__ = ["class_names", "filled", "names_of_classes", "names_of_templates", "species_names", "templates"]

PLACE = "{}"
_COMMON, _SCIENTIFIC = "{common}", "{scientific}"
# A class may be called "red fox (Vulpes vulpes)".
_SPECIES = re.compile(r"(.+?)\s*\(([A-Z][a-z-]+(?: [a-z-]+){0,2})\)")
_CONTENTS = {"names": "class names", "templates": "templates"}
# Endings of files whose lines hold more than a name.
_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".xlsx")


def names_of_classes() -> list[str]:
    """The lists of class names that come with the package."""
    return _shipped("names")


def names_of_templates() -> list[str]:
    """The sets of templates that come with the package."""
    return _shipped("templates")


def class_names(which: str | Path | Sequence[str]) -> tuple[str, ...]:
    """Class names in label order.

    >>> class_names("cifar10")[:3]
    ('airplane', 'automobile', 'bird')
    """
    return _entries(which, "names", _check_names)


def templates(which: str | Path | Sequence[str]) -> tuple[str, ...]:
    """Sentences with one `{}` for the class name, or with `{common}` and `{scientific}` for the names of a species.

    >>> templates("photo")
    ('a photo of a {}.',)
    """
    return _entries(which, "templates", _check_templates)


def species_names(name: str) -> tuple[str, str]:
    """Return the common and the scientific name of a class. Both are the whole name if it has no two names.

    >>> species_names("red fox (Vulpes vulpes)")
    ('red fox', 'Vulpes vulpes')
    >>> species_names("crane (bird)")
    ('crane (bird)', 'crane (bird)')
    """
    found = _SPECIES.fullmatch(name)
    return (name, name) if found is None else (found[1], found[2])


def filled(template: str, name: str) -> str | None:
    """Put a class name into a template. Return None if the template wants two names, and the class has one.

    >>> filled("a photo of {scientific} with common name {common}.", "red fox (Vulpes vulpes)")
    'a photo of Vulpes vulpes with common name red fox.'
    """
    if PLACE in template:
        return template.replace(PLACE, name)
    common, scientific = species_names(name)
    if common == scientific and _COMMON in template:
        # The sentence with the scientific name alone has it already.
        return None
    return template.replace(_COMMON, common).replace(_SCIENTIFIC, scientific)


def _entries(
    which: str | Path | Sequence[str], kind: str, check: Callable[[Sequence[str], str], None]
) -> tuple[str, ...]:
    if isinstance(which, str | Path):
        entries = _lines(_text(which, kind))
        check(entries, f"{which}")
    else:
        entries = list(which)
        check(entries, f"the given {kind}")
    return tuple(entries)


def _text(which: str | Path, kind: str) -> str:
    shipped = files(__name__) / f"{which}.{kind}.txt"
    if str(which) in _shipped(kind):
        return shipped.read_text(encoding="utf-8")
    if Path(which).suffix.lower() in _TABLES:
        raise InputError(
            f"{str(which)!r} is a table, and its lines are not {_CONTENTS[kind]}. Give a text file with one entry per "
            "line."
        )
    try:
        # An editor may have put a mark of the byte order in front.
        return Path(which).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        what = _CONTENTS[kind]
        raise DataError(
            f"There is no file and no list of {what} {str(which)!r}.{did_you_mean(str(which), _shipped(kind))} Give at "
            f"least two {what} (separated by commas in commands), a text file, or one of these lists: "
            f"{', '.join(_shipped(kind))}."
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"The file {str(which)!r} cannot be read: {problem}") from None


def _shipped(kind: str) -> list[str]:
    ending = f".{kind}.txt"
    return sorted(file.name.removesuffix(ending) for file in files(__name__).iterdir() if file.name.endswith(ending))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _check_names(entries: Sequence[str], where: str) -> None:
    if not entries or not all(isinstance(entry, str) and entry.strip() for entry in entries):
        raise InputError(f"{where}: class names must be non-empty strings, at least one")
    name, times = Counter(entries).most_common(1)[0]
    if times > 1:
        raise InputError(f"{where}: class names must be unique; {name!r} occurs {times} times")


def _check_templates(entries: Sequence[str], where: str) -> None:
    if not entries:
        raise InputError(f"{where}: at least one template is needed, such as 'a photo of a {PLACE}.'")
    for entry in entries:
        places = [entry.count(place) for place in (PLACE, _COMMON, _SCIENTIFIC)] if isinstance(entry, str) else []
        if places not in ([1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1]):
            raise InputError(
                f"{where}: a template has exactly one {PLACE} for the class name, or {_COMMON} and {_SCIENTIFIC}; "
                f"given: {entry!r}"
            )
    if all(_COMMON in entry for entry in entries):
        raise InputError(f"{where}: a class without a scientific name needs a template without {_COMMON}")
