"""A benchmark as data: methods x streams x seeds, read from YAML.

Nothing here reads an image or runs a method, so a mistake in a grid is reported before any work begins.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ..core.settings import as_error
from ..data.streams import protocols
from ..errors import ConfigError
from ..methods.spec import MethodSpec
from . import feature_pack, user_streams

SEEDS = [0, 1, 2, 3, 4]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ImageStream(_Part):
    """A stream made from sets of images under corruptions."""

    name: str = Field(min_length=1, max_length=80, description="In tables.")
    encoder: str = Field("mini", description="As `protodcs.encoders.load` takes it.")
    known: str = Field(description="Set of known images, as `protodcs.data.open_source` takes it.")
    unknown: list[str] = Field(default=[], description="Sets of unknown images.")
    classes: str = Field(description="Prompts of the known classes: a list of `protodcs.data.prompts`, or a file.")
    vocabulary: str | None = Field(
        None, description="General names for methods that use a vocabulary, as `classes` names them; or `general`."
    )
    protocols: list[str] = Field(["continual"], min_length=1)
    corruptions: Literal["standard", "clean"] | list[str] = Field("standard")
    severity: int = Field(5, ge=1, le=5)
    views: int = Field(
        1,
        ge=1,
        le=4096,
        description="Of each image. A feature is the mean of the tenth that is most confident about the classes. "
        "Methods that take images see them as they are.",
    )
    options: dict[str, Any] = Field({}, description="Options of the protocol, such as known_count.")

    @field_validator("protocols")
    @classmethod
    def _there(cls, names: list[str]) -> list[str]:
        if len(set(names)) < len(names):
            raise ValueError(f"each protocol once; given: {names}")
        for name in names:
            if name not in protocols():
                raise ValueError(f"there is no protocol {name!r}: choose one of {', '.join(protocols())}")
        return names


def _lowest_terms(share: str) -> str:
    """Return a share in lowest terms: one stream must not have two names."""
    # Short numbers alone: a fraction such as 1e999999999 would be computed for hours.
    if not re.fullmatch("[0-9]{1,4}(/0*[1-9][0-9]{0,3})?", share) or Fraction(share) > 1:
        raise ValueError(f"a share is a fraction from '0' to '1', such as '9/10'; given: {share[:20]!r}")
    return str(Fraction(share))


class PackStream(_Part):
    """A stream of real CLIP features: known ImageNet classes against another set."""

    pack: str = Field(description="One of the six streams of `protodcs.bench.feature_pack`.")
    split: Literal["all", "tune", "judge"] = Field("all", description="Choose parameters on one, judge on the other.")
    unknown: str | None = Field(None, description="Share of unknown samples, as a fraction; None: as the recipe gives.")
    order: Literal["shuffled", "bursts", "sorted"] = Field(
        "shuffled", description="Or the unknown ones in bursts of 1,000, or after all known ones."
    )
    classes: int | None = Field(None, ge=1, le=1000, description="Number of known classes; None: as the recipe gives.")
    samples: int | None = Field(None, ge=1, description="At most so many samples; None: all.")

    @field_validator("pack")
    @classmethod
    def _there(cls, name: str) -> str:
        if name not in feature_pack.STREAMS:
            raise ValueError(
                f"there is no stream {name!r} of CLIP features: choose one of {', '.join(feature_pack.STREAMS)}"
            )
        return name

    @field_validator("unknown")
    @classmethod
    def _share(cls, share: str | None) -> str | None:
        return None if share is None else _lowest_terms(share)

    @field_validator("classes")
    @classmethod
    def _one_name(cls, classes: int | None, given: ValidationInfo) -> int | None:
        """Drop the recipe's own number of classes: one stream must not have two names."""
        recipe = feature_pack.STREAMS.get(given.data.get("pack", ""))
        return None if recipe is not None and classes == recipe.known else classes

    @property
    def name(self) -> str:
        """In tables."""
        words: list[str] = [self.split] if self.split != "all" else []
        words += [f"K={self.classes}"] if self.classes is not None else []
        words += [f"{self.unknown} unknown"] if self.unknown is not None else []
        words += [self.order] if self.order != feature_pack.SHUFFLED else []
        words += [f"{self.samples} samples"] if self.samples is not None else []
        return f"{self.pack} ({', '.join(words)})" if words else self.pack

    @property
    def protocols(self) -> list[str]:
        """Its order: it has one segment, and nothing to reset."""
        return [self.order]


class UserStream(_Part):
    """A stream of real CLIP features with few classes, as users have them; see `user_streams`."""

    family: user_streams.Family = Field(description="The known classes.")
    unknown: user_streams.Unknown = Field(description="The unknown images.")
    share: str = Field(description="Share of unknown samples, as a fraction.")
    split: user_streams.Split = Field(description="Choose parameters on one, judge on the other.")
    tail: bool = Field(False, description="Two classes make up most of the known samples.")
    run: int = Field(1, ge=1, le=1000, description="Mean length of runs of one class; 1: shuffled.")
    samples: int = Field(user_streams.MOST, ge=1, le=user_streams.MOST, description="At most so many samples.")

    @field_validator("share")
    @classmethod
    def _fraction(cls, share: str) -> str:
        return _lowest_terms(share)

    @property
    def name(self) -> str:
        """In tables."""
        words = [self.split, self.unknown, f"{self.share} unknown"]
        words += ["tail"] if self.tail else []
        words += [f"runs of {self.run}"] if self.run > 1 else []
        words += [f"{self.samples} samples"] if self.samples < user_streams.MOST else []
        return f"{self.family} ({', '.join(words)})"

    @property
    def protocols(self) -> list[str]:
        """Its order: it has one segment, and nothing to reset."""
        return [feature_pack.SHUFFLED if self.run == 1 else "runs"]


def _kind(words: object) -> str:
    """Which kind of stream is meant, so that a mistake in it is reported in the words of that kind alone."""
    for kind, key, form in (("features", "pack", PackStream), ("users", "family", UserStream)):
        if key in words if isinstance(words, dict) else isinstance(words, form):
            return kind
    return "images"


Stream = Annotated[
    Annotated[ImageStream, Tag("images")]
    | Annotated[PackStream, Tag("features")]
    | Annotated[UserStream, Tag("users")],
    Discriminator(_kind),
]


class Grid(_Part):
    """Methods x streams x seeds."""

    name: str = Field(pattern="^[a-z0-9][a-z0-9-]{0,60}$")
    seeds: list[int] = Field(SEEDS, min_length=1, description="Each is an order of the stream.")
    streams: list[Stream] = Field(min_length=1)
    methods: list[MethodSpec] = Field(min_length=1)
    vocabulary: str | None = Field(
        None,
        description="File below PROTODCS_DATA with the features of general names as `text`: the vocabulary of all "
        "streams of CLIP features, for methods that use one.",
    )

    @model_validator(mode="after")
    def _apart(self) -> Self:
        for kind, named in (("streams", self.streams), ("methods", self.methods)):
            titles = [entry.name if not isinstance(entry, MethodSpec) else entry.title for entry in named]
            twice = sorted({title for title in titles if titles.count(title) > 1})
            if twice:
                raise ValueError(f"two {kind} are called {twice[0]!r}: give each a name of its own")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds are whole numbers from 0, each once; given: {self.seeds}")
        for stream in self.streams:
            strange = [method_spec.title for method_spec in self.methods if method_spec.sees == "images"]
            if not isinstance(stream, ImageStream) and strange:
                raise ValueError(f"{strange[0]} needs images, and {stream.name!r} is a stream of features")
        if self.vocabulary is not None and all(isinstance(stream, ImageStream) for stream in self.streams):
            raise ValueError(
                f"`vocabulary` is a file of CLIP features, and no stream of the grid has CLIP features; given: "
                f"{self.vocabulary!r}. Write `vocabulary: NAMES` in the streams of images instead"
            )
        return self

    def tasks(self) -> Iterator["Task"]:
        """Yield every cell: all methods of a stream and a seed, then those of the next seed."""
        for stream in self.streams:
            for protocol in stream.protocols:
                for seed in self.seeds:
                    for method_spec in self.methods:
                        yield Task(
                            self.name,
                            method_spec,
                            stream,
                            protocol,
                            seed,
                            method_spec.trace and seed == self.seeds[0],
                            self.vocabulary_of(stream) if method_spec.uses_vocabulary else None,
                        )

    def vocabulary_of(self, stream: Stream) -> str | None:
        """Return the name of the vocabulary for a stream, for methods that use one."""
        if isinstance(stream, ImageStream):
            return stream.vocabulary
        # The names must come from the encoder of the pack.
        return feature_pack.GENERAL if self.vocabulary and feature_pack.is_own() else self.vocabulary


@dataclass(frozen=True)
class Task:
    """One cell of a grid, before anything is known about its data. It has a vocabulary only if its method uses one."""

    grid: str
    method_spec: MethodSpec
    stream: ImageStream | PackStream | UserStream
    protocol: str
    seed: int
    trace: bool
    vocabulary: str | None = None


def load(file: str | Path, encoder: str | None = None, streams_of: str | Path | None = None) -> Grid:
    """Return the grid of a YAML file.

    Args:
        file: the YAML file.
        encoder: replaces that of every stream of images.
        streams_of: another grid, whose streams replace those of this one.
    """
    content = _read(file)
    if streams_of is not None:
        content["streams"] = _read(streams_of).get("streams")
    if encoder is not None:
        listed = content.get("streams")
        for stream in listed if isinstance(listed, list) else []:
            if isinstance(stream, dict) and not {"pack", "family"} & set(stream):
                stream["encoder"] = encoder
    try:
        return Grid.model_validate(content)
    except ValidationError as problem:
        raise ConfigError(f"{file}: {as_error(problem)}") from None


def _read(file: str | Path) -> dict[str, Any]:
    """Return the content of a grid's file."""
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"Cannot read the grid {str(file)!r}: {problem.strerror}. Check the path.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not a text file in UTF-8.") from None
    except yaml.YAMLError as problem:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a grid. A grid has the keys name, streams and methods.")
    return content
