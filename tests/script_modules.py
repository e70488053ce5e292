"""Import a Python file that belongs to no package, such as a script."""

import importlib.util
import sys


def load_file(file):
    """Return a Python file as a module. Later imports find it under its name, as those of a started process."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
