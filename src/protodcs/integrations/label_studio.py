"""Label Studio: export samples as tasks with predictions, and import the labels of its JSON export.

Tasks are plain JSON, so this needs no package. `labeling_config` is the setup of a project that fits them. The choice
UNKNOWN stands for samples of no class.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..errors import InputError
from .samples import ReviewSample

UNKNOWN = "(unknown)"
_FROM, _TO = "label", "image"


def labeling_config(classes: Sequence[str]) -> str:
    """Return the labeling setup of a project: one choice per class, and UNKNOWN."""
    choices = "\n".join(f'    <Choice value="{escape(name)}"/>' for name in (*classes, UNKNOWN))
    return (
        f'<View>\n  <Image name="{_TO}" value="$image"/>\n  <Choices name="{_FROM}" toName="{_TO}" choice="single">\n'
        f"{choices}\n  </Choices>\n</View>\n"
    )


def tasks(samples: Iterable[ReviewSample], image_url: str = "/data/local-files/?d=") -> list[dict[str, Any]]:
    """Return one task per sample, in order, with the decision as prediction.

    Args:
        samples: the samples.
        image_url: what stands before the file name to make its address. The default is that of local storage.
    """
    return [_task(place, sample, image_url) for place, sample in enumerate(samples)]


def _task(place: int, sample: ReviewSample, image_url: str) -> dict[str, Any]:
    choice = {
        "from_name": _FROM,
        "to_name": _TO,
        "type": "choices",
        "value": {"choices": [sample.label or UNKNOWN]},
    }
    return {
        "data": {
            "image": image_url + sample.file,
            "file": sample.file,
            "review_order": place,
            "p_unknown": sample.p_unknown,
            "nearest_class": sample.nearest_class,
        },
        "predictions": [{"model_version": "protodcs", "score": 1.0 - sample.doubt, "result": [choice]}],
    }


def labels(exported: Any) -> dict[str, str | None]:
    """Return the label of each file from a JSON export of Label Studio; None for UNKNOWN.

    Of several annotations, the last one counts. Skipped tasks and tasks without annotation are left out.
    """
    if not isinstance(exported, list) or not all(isinstance(task, Mapping) for task in exported):
        raise InputError("An export of Label Studio is a JSON list of tasks. Export the project as JSON.")
    found: dict[str, str | None] = {}
    for task in exported:
        file = task.get("data", {}).get("file")
        for annotation in task.get("annotations", []):
            if file is None or annotation.get("was_cancelled"):
                continue
            for result in annotation.get("result", []):
                choices = result.get("value", {}).get("choices", [])
                if result.get("from_name") == _FROM and choices:
                    found[file] = None if choices[0] == UNKNOWN else str(choices[0])
    return found
