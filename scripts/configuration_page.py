"""Prints docs/configuration.md from the fields of Config."""

from typing import get_args

from protodcs import Config

INTRODUCTION = """# Configuration

Every number and every reading of the method is a field of `Config`. A config is frozen and validated; an engine's
state carries all of it, resolved.

    from protodcs import Config
    Config.preset("paper")                              # the letter of the paper
    Config.preset("default")                            # what we recommend
    Config.preset("paper", evolution_gate="entropy")    # one option replaced

Where the paper is silent or contradicts itself, both readings are options here, so that they can be run and compared.
`Config()` is the preset `paper`; the preset `default` has the same value where none is given for it.

| option | `paper` | `default` | range | meaning |
|---|---|---|---|---|
"""


def values(field):
    """The range of a field in words."""
    choices = get_args(field.annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(f"`{choice}`" for choice in choices)
    if field.annotation is bool:
        return "`True`, `False`"
    limits = {
        kind: getattr(rule, kind) for rule in field.metadata for kind in ("ge", "gt", "le", "lt") if hasattr(rule, kind)
    }
    low = f"[{limits['ge']:g}" if "ge" in limits else f"({limits['gt']:g}"
    high = f"{limits['le']:g}]" if "le" in limits else f"{limits['lt']:g})"
    return f"{low}, {high}"


if __name__ == "__main__":
    print(INTRODUCTION, end="")
    recommended = Config.preset("default")
    for name, field in Config.model_fields.items():
        chosen = getattr(recommended, name)
        other = "" if chosen == field.default else f"`{chosen}`"
        print(f"| `{name}` | `{field.default}` | {other} | {values(field)} | {field.description} |")
