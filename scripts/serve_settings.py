"""Prints docs/serve-settings.md from the fields of ServeConfig; those of the guard follow under its name."""

from pydantic import BaseModel

from protodcs.serve.settings import ServeConfig


def rows(settings: type[BaseModel], prefix: str = ""):
    """The lines of a table, one for each setting."""
    for name, field in settings.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield f"| `{name}` | | {field.description} |"
            yield from rows(type(field.default), f"{name}.")
        else:
            yield f"| `{prefix}{name}` | `{field.default}` | {field.description or ''} |"


if __name__ == "__main__":
    print("| setting | default | meaning |\n|---|---|---|")
    print("\n".join(rows(ServeConfig)))
