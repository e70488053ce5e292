"""`protodcs discover`: group unknown images into clusters."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from ..atomic_io import replace_file
from ..errors import DataError, InputError
from .decided import ENDINGS, decide_folder, encode, encode_folder, read_decisions
from .screen import check_new, console, explained, given_classes, given_names, new_table, printable, warn_of_boxes

if TYPE_CHECKING:
    from ..arrays import Features
    from ..data.crop import Crop
    from ..discovery import Cluster, Discovery, Vocabulary

_FIELDS = ("sample", "cluster", "place", "size", "similarity", "suggestion", "margin", "name")
_CSV, _PARQUET, _SHEET, _STATE = "clusters.csv", "clusters.parquet", "clusters.png", "clusters.state"
_CLUSTERS_ON_SHEET, _IMAGES_ON_SHEET = 16, 8
_MAX_SAMPLES = 50_000
# Known images of a file of decisions that are encoded: their mean is the point of comparison.
_KNOWN_SAMPLES = 100

Row = dict[str, Any]


class _Unknown(NamedTuple):
    """The samples to cluster.

    Attributes:
        names: the name of each.
        features: (n, d), the features to cluster.
        known: (m, d), the features of known images, if there are any.
        files: image files or crops by name, if there are any.
    """

    names: list[str]
    features: "Features"
    known: "Features"
    files: "Mapping[str, Path | Crop]"


@explained
def discover(
    source: Path = typer.Argument(
        ...,
        help="Folder of images, file of decisions (.csv, .jsonl), results of `classify --megadetector` (.json), or "
        "file of features (.npy, .npz, ...).",
    ),
    classes: str | None = typer.Option(
        None, help="Known classes, as in `classify`; only unknown images of a folder are clustered. Default: all are."
    ),
    vocabulary: str | None = typer.Option(
        None, help="Names to suggest for clusters: general, or as `--classes`. Default: none."
    ),
    model: str = typer.Option("openai/clip-vit-base-patch16", help="Encoder, as in `classify`."),
    name: list[str] | None = typer.Option(
        None, metavar="CLUSTER=NAME", help="Name a cluster of an earlier run, such as 0=monarch. Repeat it for others."
    ),
    images: Path | None = typer.Option(None, help="Folder of the images in a file of decisions (default: beside it)."),
    out: Path = typer.Option(Path("clusters"), help="Folder of the results (default: clusters)."),
    min_cluster_size: int = typer.Option(5, min=3, max=1000, help="Images that form a cluster (default: 5)."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Group unknown images into clusters, and name them.

    Writes clusters.csv, clusters.parquet and a contact sheet, clusters.png. `classify --clusters clusters.state` then
    gives later unknown images the name of the cluster that they belong to.
    """
    from ..discovery import Discovery, DiscoveryConfig

    check_new([out / file for file in (_CSV, _PARQUET, _SHEET, _STATE)], "another folder with --out")
    names = given_names(name or [])
    suggestible = None if vocabulary is None else given_classes(vocabulary)
    unknown = _unknown(source, classes, model, images, as_json)
    if not 2 <= len(unknown.names) <= _MAX_SAMPLES:
        raise DataError(f"there must be 2 to {_MAX_SAMPLES:,} samples to cluster; given: {len(unknown.names):,}")
    config = DiscoveryConfig(
        capacity=max(20, len(unknown.names)), interval=0, min_cluster_size=min_cluster_size, max_cluster_size=50_000
    )
    found = Discovery(unknown.features.shape[1], config)
    for feature in unknown.known:
        found.note_known(feature)
    found.add_many(unknown.features)
    found.update()
    for cluster, chosen in names.items():
        found.name(cluster, chosen)
    clusters = found.clusters()
    rows = _rows(clusters, unknown.names, found, None if suggestible is None else _vocabulary(suggestible, model))
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / _CSV, _csv(rows).encode())
    results = [out / _CSV, *_parquet(rows, out), *_sheet(clusters, unknown, rows, out)]
    found.save(out / _STATE)
    results.append(out / _STATE)
    report = {
        "samples": len(unknown.names),
        "clusters": len(clusters),
        "in_clusters": sum(cluster.size for cluster in clusters),
        "results": [str(file) for file in results],
    }
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report, clusters, rows)


def _unknown(source: Path, classes: str | None, model: str, images: Path | None, quiet: bool) -> _Unknown:
    """Return the samples to cluster."""
    if source.is_dir() and classes is not None:
        decided = decide_folder(source, classes, model, quiet)
        assert decided.features is not None
        features = decided.features
        rejected = [place for place, sample in enumerate(decided.samples) if sample.label is None]
        known = [place for place, sample in enumerate(decided.samples) if sample.label is not None]
        names = [decided.samples[place].file for place in rejected]
        return _Unknown(names, features[rejected], features[known], decided.files)
    from ..data.feature_file import ENDINGS as FEATURE_ENDINGS
    from ..encoders import load

    if source.is_dir():
        encoded, files = encode_folder(source, load(model), quiet)
        return _Unknown([*encoded.names], encoded.features, encoded.features[:0], files)
    if source.suffix in FEATURE_ENDINGS:
        return _stored_features(source)
    if source.suffix == ".json":
        return _unknown_boxes(source, images, model, quiet)
    if source.suffix not in ENDINGS:
        raise InputError(
            f"give a folder, a file of decisions ({', '.join(ENDINGS)}, .json) or of features "
            f"({', '.join(FEATURE_ENDINGS)}); given: {source.name!r}"
        )
    decided = read_decisions(source, images)
    rejected_files = {s.file: decided.files[s.file] for s in decided.samples if s.label is None}
    known_files = {s.file: decided.files[s.file] for s in decided.samples if s.label is not None}
    return _encoded(rejected_files, known_files, model, quiet)


def _unknown_boxes(source: Path, images: Path | None, model: str, quiet: bool) -> _Unknown:
    """Return the boxes of a results file that are unknown."""
    from ..data.crop import Crop
    from ..integrations.megadetector import image_path, read_results, unknown_boxes

    results, folder = read_results(source), source.parent if images is None else images
    rejected: dict[str, Path | Crop] = {}
    known: dict[str, Path | Crop] = {}
    for detection, is_unknown in unknown_boxes(results).items():
        path = image_path(results["images"][detection.image])
        crops = rejected if is_unknown else known
        crops[f"{printable(path)}, box {detection.place}"] = Crop(folder / path, detection.box)
    return _encoded(rejected, known, model, quiet)


def _encoded(
    rejected_files: "Mapping[str, Path | Crop]", known_files: "Mapping[str, Path | Crop]", model: str, quiet: bool
) -> _Unknown:
    """Encode rejected files and some known ones. A long list of known files is taken from evenly."""
    from ..encoders import load

    encoder = load(model)
    encoded = encode(rejected_files, encoder, quiet)
    if rejected_files and not encoded.names:
        first = next(iter(rejected_files.values()))
        raise DataError(f"none of the {len(rejected_files)} images can be read, such as {first}. Set --images.")
    chosen = [*known_files.items()][:: max(1, len(known_files) // _KNOWN_SAMPLES)]
    accepted = encode(dict(chosen[:_KNOWN_SAMPLES]), encoder, quiet)
    return _Unknown([*encoded.names], encoded.features, accepted.features, rejected_files)


def _stored_features(file: Path) -> _Unknown:
    from ..data.feature_file import read_features

    rows = read_features(file).features
    return _Unknown([str(number) for number in range(len(rows))], rows, rows[:0], {})


def _vocabulary(names: tuple[str, ...], model: str) -> "Vocabulary":
    from ..discovery import Vocabulary
    from ..encoders import load

    return Vocabulary(names, load(model).prototypes(names))


def _rows(
    clusters: Sequence["Cluster"], names: Sequence[str], found: "Discovery", vocabulary: "Vocabulary | None"
) -> list[Row]:
    """Return a row for each sample: those of the largest cluster first, and those in none last."""
    rows: list[Row] = []
    for cluster in clusters:
        best = None if vocabulary is None else found.suggest_names(cluster.id, vocabulary, 1)[0]
        rows += [
            {
                "sample": names[key],
                "cluster": cluster.id,
                "place": place,
                "size": cluster.size,
                "similarity": round(cluster.similarity, 4),
                "suggestion": None if best is None else best.name,
                "margin": None if best is None else round(best.margin, 4),
                "name": cluster.name,
            }
            for place, key in enumerate(cluster.keys.tolist())
        ]
    inside = {row["sample"] for row in rows}
    return rows + [dict.fromkeys(_FIELDS) | {"sample": name} for name in names if name not in inside]


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _parquet(rows: Sequence[Row], out: Path) -> list[Path]:
    """Write the rows as Parquet, if pyarrow is installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return []
    kinds = [pa.string(), pa.int64(), pa.int64(), pa.int64(), pa.float64(), pa.string(), pa.float64(), pa.string()]
    file = out / _PARQUET
    pq.write_table(pa.Table.from_pylist([*rows], pa.schema(list(zip(_FIELDS, kinds, strict=True)))), file)
    return [file]


def _sheet(clusters: Sequence["Cluster"], unknown: _Unknown, rows: Sequence[Row], out: Path) -> list[Path]:
    """Draw the most typical images of the largest clusters, one row each."""
    if not unknown.files or not clusters:
        return []
    from ..data.contact_sheet import Picture, contact_sheet, save_sheets
    from ..data.crop import read_part

    suggested = {row["cluster"]: row["suggestion"] and f"{row['suggestion']}?" for row in rows}
    pictures = []
    for cluster in clusters[:_CLUSTERS_ON_SHEET]:
        shown = [unknown.names[key] for key in cluster.keys[:_IMAGES_ON_SHEET].tolist()]
        name = cluster.name or suggested[cluster.id]
        remarks = [f"cluster {cluster.id}: {cluster.size} images", name or ""]
        remarks += [""] * (len(shown) - 2)
        pictures += [
            Picture(read_part(unknown.files[file]), file, remark) for file, remark in zip(shown, remarks, strict=True)
        ]
        # An empty place for each missing image, so that every cluster has its own row.
        pictures += [Picture(_blank(), "") for _ in range(_IMAGES_ON_SHEET - len(shown))]
    title = (
        f"{min(len(clusters), _CLUSTERS_ON_SHEET)} of {len(clusters)} clusters, one in each row, typical images first"
    )
    missing: set[str] = set()
    save_sheets([contact_sheet(pictures, title, columns=_IMAGES_ON_SHEET, missing=missing)], out / _SHEET)
    warn_of_boxes(missing)
    return [out / _SHEET]


def _blank() -> Any:
    import numpy as np

    return np.full((1, 1, 3), 255, dtype=np.uint8)


def _print(report: Mapping[str, Any], clusters: Sequence["Cluster"], rows: Sequence[Row]) -> None:
    title = f"{report['in_clusters']} of {report['samples']} samples in {report['clusters']} clusters"
    named = [cluster.name for cluster in clusters if cluster.name is not None]
    table = new_table("cluster", "images", "similarity", "suggestion", "margin", *["name"][: len(named)], title=title)
    first = {row["cluster"]: row for row in rows}
    for cluster in clusters[:_CLUSTERS_ON_SHEET]:
        name, margin = first[cluster.id]["suggestion"], first[cluster.id]["margin"]
        suggestion = ("", "") if name is None else (name, f"{margin:.2f}")
        last = [cluster.name or ""] if named else []
        table.add_row(str(cluster.id), str(cluster.size), f"{cluster.similarity:.2f}", *suggestion, *last)
    console().print(table)
    for file in report["results"]:
        console().print(file, soft_wrap=True)
