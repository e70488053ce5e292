"""The limits on the classes and settings of a stream."""

from typing import Any

from ..settings import ServeConfig, tenant_of
from ..stream.cost import check_cost
from ..stream.live_stream import StreamSpec, check_classes


class SizeLimits:
    """Checks what a stream may have, by the limits of its tenant."""

    def __init__(self, config: ServeConfig):
        self._config = config

    def check(self, stream: str, spec: StreamSpec, config: dict[str, Any], classes: int, dimension: int) -> None:
        """Raise an error if a stream may not have these settings and so many classes."""
        limits = self._config.of_tenant(tenant_of(stream))
        check_classes(classes, limits.classes)
        check_cost(spec.settings(config), classes, dimension, spec.guard, limits, spec.vocabulary is not None)
