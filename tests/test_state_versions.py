"""Versions of states and stores: older layouts are named as such, and no layout changes without a new number.

`layouts/` has states of every method, a pool and a store of the service, written by earlier commits.
`formats.json` has a fingerprint of each format. If a test says that a format has changed, raise its number and run
`python tests/test_state_versions.py`, which writes the file again.
"""

import hashlib
import inspect
import json
import pkgutil
import struct
import sys
import tarfile
from contextlib import closing
from enum import Enum
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel

from protodcs import StreamDCSConfig, StreamPool, methods
from protodcs.core import state, vocabulary
from protodcs.core.base import FeatureMethod
from protodcs.discovery import snapshots as discovery_snapshots
from protodcs.errors import StateVersionError, StoreError
from protodcs.serve import guard
from protodcs.serve import stream as stream_package
from protodcs.serve.store import inspection, schema, sqlite
from protodcs.serve.stream import live_stream, records, snapshots

FEATURE_METHODS = [name for name in methods.names() if issubclass(methods.REGISTER[name], FeatureMethod)]
LAYOUTS = sorted((Path(__file__).parent / "layouts").glob("*.tar.xz"))
FORMATS = Path(__file__).parent / "formats.json"


# What each format consists of.


def fields(model: type[BaseModel]) -> dict[str, str]:
    return {name: str(field.annotation) for name, field in model.model_fields.items()}


def constants(module) -> dict[str, str]:
    """Return the constants of a module, and the layouts of the structures that it packs."""
    found = {}
    for name, value in sorted(vars(module).items()):
        if isinstance(value, struct.Struct):
            found[name] = value.format
        elif name.isupper() and isinstance(value, (int, float, tuple, frozenset)):
            found[name] = repr(sorted(value) if isinstance(value, frozenset) else value)
        elif inspect.isclass(value) and issubclass(value, Enum) and value.__module__ == module.__name__:
            found[name] = repr(list(value))
    return found


def modules_of(method: type[FeatureMethod]):
    """Return the modules of a method: its package if it has one of its own."""
    package = import_module(method.__module__.rpartition(".")[0])
    if package.__name__ == "protodcs.methods":
        return [import_module(method.__module__)]
    return [import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)]


def method_format(name: str) -> tuple[int, object]:
    """Return the version of a method's state, and what it consists of."""
    method = methods.REGISTER[name]
    rng = np.random.default_rng(0)
    engine = methods.create(name, rng.normal(size=(4, 6)))
    engine.observe_many(rng.normal(size=(80, 6)))
    counters, arrays = engine._memory.export()
    described = {
        "options": fields(method.config_type),
        "counters": sorted(counters),
        "arrays": {key: (str(array.dtype), array.ndim) for key, array in sorted(arrays.items())},
        "constants": {module.__name__: constants(module) for module in modules_of(method)},
    }
    arena = engine._arena()
    if arena is not None:
        described["arena"] = [(key, np.dtype(dtype).str, shape) for key, (dtype, shape) in arena.layout.items()]
    return method.version, described


def store_schema() -> str:
    return " ".join((schema.SQLITE + schema.POSTGRES).split())


def formats() -> dict[str, tuple[object, object]]:
    """Return each format's version, and what it consists of."""
    stream_modules = [
        import_module(f"{stream_package.__name__}.{found.name}")
        for found in pkgutil.iter_modules(stream_package.__path__)
    ]
    journal = {module.__name__: constants(module) for module in [*stream_modules, guard]}
    journal_versions = [records.VERSION, snapshots.VERSION, guard.VERSION]
    return {
        **{f"state of {name}": method_format(name) for name in FEATURE_METHODS},
        "state file": (state.SCHEMA, {**fields(state.Header), "constants": constants(vocabulary)}),
        "state of a discovery": (
            discovery_snapshots.Header.model_fields["schema_version"].default,
            fields(discovery_snapshots.Header),
        ),
        "stream of the service": (live_stream.BIRTH_SCHEMA, fields(live_stream.StreamSpec)),
        "journal and snapshots of the service": (journal_versions, {**journal, "guard": sorted(guard._NUMBERS)}),
        "tables of the store": (schema.LAYOUT, store_schema()),
    }


def fingerprints() -> dict[str, dict[str, object]]:
    return {
        name: {
            "version": version,
            "fingerprint": hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest(),
        }
        for name, (version, described) in formats().items()
    }


# Tests.


@pytest.mark.parametrize("name", fingerprints())
def test_a_format_changes_only_with_its_version(name):
    stored, now = json.loads(FORMATS.read_text(encoding="utf-8")).get(name), fingerprints()[name]
    if stored is None or stored["version"] != now["version"]:
        assert stored == now, "Run `python tests/test_state_versions.py` to write down the new version."
    assert stored == now, (
        f"The {name} has changed. Raise its version, so that older ones are recognised, then run "
        "`python tests/test_state_versions.py`."
    )


def test_a_changed_constant_changes_the_fingerprint(monkeypatch):
    from protodcs.core.streamdcs import constants as tuned

    before = fingerprints()["state of streamdcs"]
    monkeypatch.setattr(tuned, "BIAS_HORIZON", tuned.BIAS_HORIZON + 1)
    assert fingerprints()["state of streamdcs"] != before


@pytest.fixture(params=LAYOUTS, ids=lambda path: path.name.partition(".")[0])
def layout(request, tmp_path):
    """The folder with what an earlier commit wrote."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_there_are_earlier_layouts():
    assert len(LAYOUTS) >= 2


def test_states_of_earlier_layouts_are_read_or_named_as_such(layout):
    files = list(layout.glob("*.state"))
    assert {file.stem for file in files} >= {"streamdcs", "protodcs", "zero_shot", "dpe"}
    for file in files:
        with pytest.raises(StateVersionError, match="written by another version of protodcs"):
            methods.restore(file.read_bytes())


def test_a_pool_of_an_earlier_layout_is_named_as_such_and_kept(layout):
    rng = np.random.default_rng(0)
    prototypes, classes, config = rng.normal(size=(3, 4)), ["a", "b", "c"], StreamDCSConfig(history=64)
    with closing(StreamPool(prototypes, classes, config, folder=layout / "pool")) as pool:
        assert list(pool) == ["camera"]
        with pytest.raises(StateVersionError, match=r"stream 'camera'.*written by another version"):
            pool.observe("camera", rng.normal(size=4))
        assert list(pool) == ["camera"]


def test_a_store_of_an_earlier_layout_is_named_as_such_and_kept(layout):
    (database,) = layout.rglob(inspection.DATABASE)
    before = database.read_bytes()
    advice = "written by another version of protodcs: it has layout 3.*Use the version of protodcs that wrote it$"
    with pytest.raises(StoreError, match=advice):
        sqlite.SqliteStore(database.parent)
    with pytest.raises(StoreError, match=advice):
        sqlite.back_up(database.parent, layout / "copy")
    assert database.read_bytes() == before


if __name__ == "__main__":
    FORMATS.write_text(json.dumps(fingerprints(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    sys.stdout.write(f"{FORMATS} is written.\n")
