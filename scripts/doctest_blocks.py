"""Show the doctests of docstrings as code in the API reference: an extension of Griffe, which mkdocstrings loads."""

import re
from typing import Any

import griffe

# A doctest ends at the first blank line, as for Python's doctest module.
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    """Put each doctest into a fenced block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one module, class or function."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
