"""The sample that exports to other tools share."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReviewSample:
    """An image and the decision about it.

    Attributes:
        file: its path, relative to the folder of the images.
        label: the class that was decided; None if the image is unknown.
        nearest_class: the best class, also if the image is unknown.
        p_unknown: probability that it belongs to no class.
    """

    file: str
    label: str | None
    nearest_class: str
    p_unknown: float

    @property
    def doubt(self) -> float:
        """The estimated probability that the decision between known and unknown is wrong."""
        return min(self.p_unknown, 1.0 - self.p_unknown)
