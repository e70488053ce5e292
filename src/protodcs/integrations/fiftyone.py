"""FiftyOne: export samples as a dataset, and import the labels that were given there.

Needs the package `fiftyone`. The decision is in the field `decision`, its order in `review_order`. Put the true class
into the field `label`; UNKNOWN stands for samples of no class.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .samples import ReviewSample

UNKNOWN = "(unknown)"


def dataset(samples: Iterable[ReviewSample], folder: Path, name: str) -> Any:
    """Return a new, persistent FiftyOne dataset of the samples, whose files are in `folder`."""
    import fiftyone  # type: ignore[import-not-found]

    created = fiftyone.Dataset(name, persistent=True)
    created.add_sample_field("label", fiftyone.EmbeddedDocumentField, embedded_doc_type=fiftyone.Classification)
    rows = []
    for place, sample in enumerate(samples):
        decision = fiftyone.Classification(label=sample.label or UNKNOWN, confidence=1.0 - sample.doubt)
        rows.append(
            fiftyone.Sample(
                filepath=str((folder / sample.file).absolute()),
                file=sample.file,
                decision=decision,
                nearest_class=sample.nearest_class,
                p_unknown=sample.p_unknown,
                review_order=place,
            )
        )
    created.add_samples(rows)
    return created


def labels(labelled: Any) -> dict[str, str | None]:
    """Return the label of each file of a dataset or view; None for UNKNOWN. Samples without `label` are left out."""
    found: dict[str, str | None] = {}
    for file, label in zip(*labelled.values(["file", "label.label"]), strict=True):
        if label is not None:
            found[file] = None if label == UNKNOWN else label
    return found
