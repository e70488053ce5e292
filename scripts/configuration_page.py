"""Print docs/configuration.md from the fields of the configs."""

from typing import get_args

from protodcs import ProtoDCSConfig, StreamDCSConfig
from protodcs.discovery import DiscoveryConfig

INTRODUCTION = """# Configuration

Each method has a config. A config is frozen and validated, and the state of an engine holds all of it. The defaults of
`StreamDCSConfig` are the recommended settings. The defaults of `ProtoDCSConfig` follow the paper to the letter.

    from protodcs import ProtoDCSConfig, StreamDCSConfig
    StreamDCSConfig()                              # what we recommend
    StreamDCSConfig(target_false_reject=0.05)      # one option replaced
    ProtoDCSConfig.preset("paper")                 # the same as ProtoDCSConfig()
    ProtoDCSConfig(evolution_gate="entropy")       # one option replaced
"""
PAPER = """
If the paper can be read in two ways, both are options here, so that you can run and compare them.
"""
HEAD = """
| option | default | range | meaning |
|---|---|---|---|
"""


def values(field):
    """Return the range of a field in words."""
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


def table(config):
    """Return the options of a config as a Markdown table."""
    rows = (
        f"| `{name}` | `{field.default}` | {values(field)} | {field.description} |\n"
        for name, field in config.model_fields.items()
    )
    return HEAD + "".join(rows)


if __name__ == "__main__":
    print(INTRODUCTION, end="")
    print("\n## StreamDCS\n" + table(StreamDCSConfig), end="")
    print("\n## ProtoDCS\n" + PAPER + table(ProtoDCSConfig), end="")
    print("\n## Discovery\n" + table(DiscoveryConfig), end="")
