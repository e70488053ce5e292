"""The base class of every method's settings, and the error for settings that are not valid."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import ConfigError, without_passwords


class Settings(BaseModel):
    """Settings that never change after creation. Unknown options and invalid values raise `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, /, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as problem:
            raise as_error(problem) from None

    def replace(self, **options: Any) -> Self:
        """Return a copy with some options replaced, validated again."""
        return type(self)(**{**self.model_dump(), **options})


def as_error(problem: ValidationError) -> ConfigError:
    """Return a pydantic error as a `ConfigError` that names each option, its problem and the given value."""
    lines = []
    for error in problem.errors():
        option, message = ".".join(str(part) for part in error["loc"]), error["msg"].removeprefix("Value error, ")
        line = f"{option}: {message}" if option else message
        # A whole table of options would hide the message.
        if option and not isinstance(error["input"], dict):
            line += f" (given: {without_passwords(str(error['input']))[:80]!r})"
        lines.append(line)
    return ConfigError("; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" if len(lines) > 5 else ""))
