"""States on their way: whole, honest, small in memory, and refused when they are not."""

import gc
import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from conftest import random_stream
from protodcs import ProtoDCS, ProtoDCSConfig, Prototypes, StreamDCS, methods
from protodcs.core import state
from protodcs.core.protodcs import alignment
from protodcs.errors import StateError, StateVersionError

ZEROS = b"0" * 64


def trained(samples=260, method="streamdcs", **options):
    prototypes, features, _ = random_stream(classes=8, width=24, samples=samples, seed=1)
    engine = methods.create(method, prototypes, **options)
    engine.observe_many(features)
    return engine, features


def split(data):
    """The JSON header, our own header inside it, and the bytes of the arrays."""
    length = struct.unpack("<Q", data[:8])[0]
    outer = json.loads(data[8 : 8 + length])
    return outer, json.loads(outer["__metadata__"]["state"]), bytearray(data[8 + length :])


def join(outer, inner, body):
    """A file with a hash that is right for what it says."""
    inner = {**inner, "content_hash": "0" * 64}
    outer = {**outer, "__metadata__": {"state": json.dumps(inner, sort_keys=True, separators=(",", ":"))}}
    text = json.dumps(outer, separators=(",", ":")).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(body)
    at = re.search(rb'\\"content_hash\\":\\"0{64}', data)
    if at is None:
        return data
    digest = hashlib.sha256(data).hexdigest().encode()
    return data[: at.end() - 64] + digest + data[at.end() :]


def test_a_state_is_a_safetensors_file_that_says_what_it_is(tmp_path):
    engine, _ = trained(method="protodcs", evolution_gate="entropy")
    engine.save(tmp_path / "state.safetensors")
    with safe_open(tmp_path / "state.safetensors", "np") as file:
        header = json.loads(file.metadata()["state"])
        assert file.get_tensor("initial_prototypes").shape == (8, 24)
        assert "text" in file.keys()  # noqa: SIM118 - not a dictionary
    assert header["format"] == "protodcs-state"
    assert header["schema_version"] == state.SCHEMA
    assert header["method"] == "protodcs"
    assert header["classes"] == [str(k) for k in range(8)]
    assert header["config"]["evolution_gate"] == "entropy"
    assert header["backend"] in ("native", "numpy")
    assert header["counters"]["sequence"] == 260
    data = (tmp_path / "state.safetensors").read_bytes()
    assert hashlib.sha256(data.replace(header["content_hash"].encode(), ZEROS)).hexdigest() == header["content_hash"]


def test_class_names_may_hold_anything():
    names = ['"content_hash":"' + "0" * 64, "\\", "猫", "\x00", '{"a":1}', "content_hash"]
    engine = ProtoDCS(np.eye(6, 8), classes=names)
    assert ProtoDCS.restore(engine.snapshot()).classes == tuple(names)


def test_a_state_is_tied_to_its_encoder_and_its_method():
    engine = ProtoDCS(np.eye(3, 8), encoder="clip-a")
    data = engine.snapshot()
    assert ProtoDCS.restore(data, encoder="clip-a").encoder == "clip-a"
    assert ProtoDCS.restore(data).encoder == "clip-a"
    with pytest.raises(StateError, match="features of encoder 'clip-a'; given: 'clip-b'"):
        ProtoDCS.restore(data, encoder="clip-b")
    with pytest.raises(StateError, match="belongs to the method 'zero_shot'"):
        ProtoDCS.restore(methods.create("zero_shot", np.eye(2, 4)).snapshot())


@pytest.mark.parametrize("version", [state.SCHEMA - 1, state.SCHEMA + 1, True, str(state.SCHEMA), None])
def test_a_state_of_another_schema_was_written_by_another_version(version):
    engine, _ = trained()
    outer, inner, body = split(engine.snapshot())
    with pytest.raises(StateVersionError, match=f"written by another version.*this one reads {state.SCHEMA}"):
        StreamDCS.restore(join(outer, {**inner, "schema_version": version}, body))


@pytest.mark.parametrize("version", [StreamDCS.version - 1, StreamDCS.version + 1])
def test_a_state_of_another_version_of_the_method_was_written_by_another_version(version):
    engine, _ = trained()
    outer, inner, body = split(engine.snapshot())
    data = join(outer, {**inner, "method_version": version or 99}, body)
    with pytest.raises(StateVersionError, match=r"'streamdcs' was written by another version"):
        StreamDCS.restore(data)


def test_a_missing_file_and_other_safetensors_files_are_refused(tmp_path):
    from safetensors.numpy import save_file

    with pytest.raises(StateError, match="No such file"):
        ProtoDCS.load(tmp_path / "nothing")
    save_file({"a": np.zeros(3)}, tmp_path / "other")
    with pytest.raises(StateError, match="no content hash"):
        ProtoDCS.load(tmp_path / "other")
    with pytest.raises(StateError, match="A state must be bytes"):
        ProtoDCS.restore("a string")


WRITER = """
import sys
from pathlib import Path
from protodcs.core import state
from protodcs.core.protodcs import alignment
path, size = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
turn = 0
while True:
    state.write(path, bytes([turn % 251]) * size)
    turn += 1
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    path, size = tmp_path / "state", 3_000_000
    state.write(path, b"\xff" * size)
    rng = np.random.default_rng(0)
    for _ in range(12):
        worker = subprocess.Popen([sys.executable, "-c", WRITER, path, str(size)], stdout=subprocess.PIPE)
        worker.stdout.readline()
        time.sleep(rng.uniform(0, 0.05))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        data = path.read_bytes()
        assert len(data) == size
        assert len(set(data)) == 1
    state.write(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_failed_save_keeps_the_old_file_and_leaves_nothing_behind(tmp_path, monkeypatch):
    engine, _ = trained()
    path = tmp_path / "state"
    engine.save(path)
    before = path.read_bytes()

    def fails(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StateError, match=r"state'?: No space"):
        engine.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def test_saving_into_a_missing_folder_names_the_file_one_asked_for(tmp_path):
    with pytest.raises(StateError, match=r"missing/camera\.state"):
        ProtoDCS(np.eye(2, 4)).save(tmp_path / "missing" / "camera.state")


def test_every_snapshot_of_a_stream_with_many_classes_can_be_restored():
    """Classes open late and close together, so that the alignment lags as far behind as it is allowed to."""
    rng = np.random.default_rng(1)

    def directions(count):
        rows = rng.normal(size=(count, 256))
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    text_cone, image_cone = directions(2)
    content = directions(100)
    engine = ProtoDCS(text_cone + 0.6 * content)
    for step in range(700):
        noise = directions(1)[0]
        engine.observe(image_cone + 0.2 * text_cone + 0.4 * content[rng.integers(100)] + 0.4 * noise)
        if step % 10 == 0:
            assert ProtoDCS.restore(engine.snapshot()).sequence == step + 1


@pytest.mark.long
def test_a_real_stream_with_a_thousand_classes_can_be_restored_and_continued_bit_equal(clip_stream):
    """Beyond some hundred open classes a restore proves a sample of the alignment instead of all of it."""
    prototypes, features, _ = clip_stream("big")
    paper = ProtoDCSConfig.preset("paper")
    engine, twin = ProtoDCS(prototypes, config=paper), ProtoDCS(prototypes, config=paper)
    for step, feature in enumerate(features[:2500]):
        assert engine.observe(feature).openness == twin.observe(feature).openness
        if step % 500 == 499:
            twin = ProtoDCS.restore(engine.snapshot())
    assert engine.stats()["open_classes"] > 256
    assert twin.snapshot() == engine.snapshot()


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_with_a_single_class_can_be_restored(seed):
    prototypes, features, _ = random_stream(classes=1, samples=60, seed=seed)
    engine = ProtoDCS(prototypes)
    engine.observe_many(features)
    assert ProtoDCS.restore(engine.snapshot()).snapshot() == engine.snapshot()


def test_a_class_on_top_of_another_ones_queue_stays_finite():
    """The text row of the new class lies where another class has its cached features: weights of e^88 and more."""
    axes = np.eye(64)
    engine = ProtoDCS(axes[:3], config=ProtoDCSConfig(first_check=False, cold_threshold=3.0))
    for i in range(4):
        engine.observe(0.02 * axes[0] + 0.9 * axes[10] + 0.4 * axes[40 + i])
    engine.add_class("new", axes[10])
    engine.observe(axes[10])
    decision = engine.observe(0.04 * axes[0] + 0.97 * axes[31])
    assert np.isfinite(decision.scores).all()
    kept, full = engine._memory, engine._memory.fork()
    alignment.rebuild(full)
    np.testing.assert_allclose(kept.visual_sum, full.visual_sum, atol=1e-6)
    assert ProtoDCS.restore(engine.snapshot()).snapshot() == engine.snapshot()


def test_a_buffer_that_holds_more_than_can_have_come_is_refused():
    engine, _ = trained(samples=150, method="protodcs", cache_admission="buffered")
    header, arrays = state.unpack(engine.snapshot())
    arrays["buffer"] = np.repeat(arrays["initial_prototypes"][:1], 51, axis=0)
    arrays["buffer_class"], arrays["buffer_quality"] = np.zeros(51, dtype=np.int64), np.zeros(51)
    with pytest.raises(StateError, match="more than came since"):
        methods.restore(state.pack(header.model_copy(update={"content_hash": "0" * 64}), arrays))


@pytest.mark.parametrize("method", ["streamdcs", "protodcs"])
def test_counters_that_do_not_belong_there_are_refused(method):
    outer, inner, body = split(trained(method=method)[0].snapshot())
    inner["counters"]["more"] = 1
    with pytest.raises(StateError, match="more"):
        methods.restore(join(outer, inner, body))


def test_a_large_buffer_is_not_made_before_it_is_needed():
    wide = np.ones((1, 2**20), dtype=np.float32)
    engine = methods.create("protodcs", wide, cache_admission="buffered", mixture_start=100_000, cache_size=1)
    assert methods.restore(engine.snapshot()).dimension == 2**20


# States without their prototypes.

READINGS = (
    {"method": "streamdcs"},
    {"method": "streamdcs", "target_false_reject": 0.05},
    {"method": "protodcs"},
    {"method": "protodcs", "preset": "paper"},
    {"method": "protodcs", "evolution_gate": "entropy", "cache_admission": "buffered"},
    {"method": "protodcs", "alignment_keys": "all", "evolution_norm": "raw", "evolution_gate": "quantile"},
)


@given(reading=st.sampled_from(READINGS), cut=st.integers(0, 250), seed=st.integers(0, 3))
@settings(max_examples=25)
def test_a_difference_beside_its_prototypes_continues_bit_equal_at_any_cut(reading, cut, seed):
    rows, features, _ = random_stream(classes=8, width=24, samples=260, seed=seed)
    shared = Prototypes(rows)
    options = {name: value for name, value in reading.items() if name != "method"}
    engine = methods.create(reading["method"], shared, **options)
    engine.observe_many(features[:cut])
    data, whole = engine.difference(), engine.snapshot()
    twin = methods.restore(data, prototypes=shared)
    assert np.shares_memory(twin._initial_prototypes(twin._memory), shared.rows)
    assert twin.snapshot() == whole
    assert methods.restore(whole, prototypes=shared).difference() == data
    for feature in features[cut:]:
        assert twin.observe(feature).openness == engine.observe(feature).openness
    assert twin.difference() == engine.difference()


@pytest.mark.parametrize("name", methods.names())
def test_every_method_has_differences(name):
    rows, features, _ = random_stream(samples=150)
    engine = methods.create(name, rows)
    engine.observe_many(features)
    data = engine.difference()
    assert methods.restore(data, prototypes=rows).snapshot() == engine.snapshot()
    assert type(engine).restore(data, prototypes=Prototypes(rows)).difference() == data
    assert len(engine.snapshot()) - len(data) > 0.9 * rows.nbytes


def test_a_difference_names_its_prototypes_and_refuses_others(tmp_path):
    engine, _ = trained()
    shared, other = engine._prototypes, Prototypes(random_stream(classes=8, width=24, seed=2)[0])
    data = engine.difference()
    outer, inner, _ = split(data)
    assert inner["prototypes"] == shared.fingerprint
    assert "initial_prototypes" not in outer
    with pytest.raises(StateError, match=f"leaves out its prototypes.*{shared.fingerprint}.*give them"):
        StreamDCS.restore(data)
    for state_of_it in (data, engine.snapshot()):
        with pytest.raises(StateError, match=f"{shared.fingerprint}, and those given have {other.fingerprint}"):
            methods.restore(state_of_it, prototypes=other)
    (tmp_path / "thin.state").write_bytes(data)
    assert StreamDCS.load(tmp_path / "thin.state", prototypes=shared).snapshot() == engine.snapshot()


def test_after_an_edit_of_the_classes_a_difference_wants_the_edited_prototypes():
    rows, features, _ = random_stream(samples=100)
    engine = methods.create("streamdcs", rows)
    engine.observe_many(features)
    engine.add_class("more", features[0])
    with pytest.raises(StateError, match="those given have"):
        methods.restore(engine.difference(), prototypes=rows)
    edited = np.concatenate([rows, features[:1]])
    assert methods.restore(engine.difference(), prototypes=edited).snapshot() == engine.snapshot()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prototypes", "abc", "prototypes"),
        ("prototypes", 7, "prototypes"),
        ("prototypes", None, "has no array 'initial_prototypes'"),
        ("classes", ["a", "b"], "names 2 classes"),
    ],
)
def test_a_difference_with_a_wrong_header_is_refused(field, value, words):
    engine, _ = trained()
    outer, inner, body = split(engine.difference())
    inner[field] = value
    with pytest.raises(StateError, match=words):
        methods.restore(join(outer, inner, body), prototypes=engine._prototypes)


def test_a_state_that_holds_prototypes_and_denies_it_is_refused():
    engine, _ = trained()
    outer, inner, body = split(engine.snapshot())
    inner["prototypes"] = engine._prototypes.fingerprint
    with pytest.raises(StateError, match="says that it leaves them out"):
        methods.restore(join(outer, inner, body), prototypes=engine._prototypes)


@pytest.mark.parametrize("part", range(2))
def test_broken_differences_are_refused_as_whole_states_are(part):
    rng = np.random.default_rng(300 + part)
    engines = [trained(**reading)[0] for reading in READINGS]
    for turn in range(150):
        engine = engines[rng.integers(len(engines))]
        data = engine.difference()
        spoiled = damaged(data, rng) if turn % 2 else senseless(data, rng)[0]
        if spoiled != data:
            assert refused(spoiled, prototypes=engine._prototypes)


# Hostile files. Half are damaged as a disk or a network damages them; half are broken in their meaning by someone who
# then puts the right hash in.


def damaged(data, rng):
    """Bytes flipped, cut, repeated, inserted or overwritten."""
    kind = rng.integers(6)
    if kind == 0:
        return data[: rng.integers(len(data))]
    if kind == 1:
        at, size = rng.integers(len(data)), rng.integers(1, 200)
        return data[:at] + data[at + size :]
    if kind == 2:
        at = rng.integers(len(data))
        return data[:at] + rng.bytes(int(rng.integers(1, 100))) + data[at:]
    if kind == 3:
        return struct.pack("<Q", int(rng.integers(2**63))) + data[8:]
    spoiled = bytearray(data)
    for at in rng.integers(len(data), size=rng.integers(1, 20)):
        spoiled[at] ^= int(rng.integers(1, 256))
    return bytes(spoiled)


def senseless(data, rng):
    """A file with a right hash and a wrong meaning."""
    outer, inner, body = split(data)
    arrays = [name for name in outer if name != "__metadata__"]
    filled = [name for name in arrays if outer[name]["data_offsets"][1] > outer[name]["data_offsets"][0]]
    kind = rng.choice(list(BREAKS))
    BREAKS[kind](outer, inner, body, filled, rng)
    return join(outer, inner, body), kind


def poke(value):
    """Overwrite one number of a random float array."""

    def breaks(outer, inner, body, filled, rng):
        name = rng.choice([name for name in filled if outer[name]["dtype"] != "I64"])
        start, stop = outer[name]["data_offsets"]
        code, size = ("<d", 8) if outer[name]["dtype"] == "F64" else ("<f", 4)
        at = start + size * int(rng.integers((stop - start) // size))
        body[at : at + size] = struct.pack(code, value)

    return breaks


def reshape(outer, inner, body, filled, rng):
    name = rng.choice(filled)
    shape = outer[name]["shape"]
    outer[name]["shape"] = [int(np.prod(shape)), 1] if len(shape) == 1 else shape[::-1]
    if outer[name]["shape"] == shape:
        outer[name]["shape"] = [*shape, 1]


def retype(outer, inner, body, filled, rng):
    name = rng.choice(filled)
    outer[name]["dtype"] = {"F64": "I64", "I64": "F64", "F32": "I32"}[outer[name]["dtype"]]


def drop(outer, inner, body, filled, rng):
    """Rename an array away: the old name is missing, the new one does not belong."""
    name = rng.choice(filled)
    outer[name + "_"] = outer.pop(name)


def counters(outer, inner, body, filled, rng):
    name = rng.choice(list(inner["counters"]))
    old = inner["counters"][name]
    bad = [-1, 2**70, "many", None, [], 1e300, -5]
    if name in ("sequence", "learned", "skipped", "known", "unknown"):
        bad += [old + 1, max(old - 1, 0) if old else 7, 0 if old else 3]
    inner["counters"][name] = bad[rng.integers(len(bad))]
    if inner["counters"][name] == old:
        inner["counters"][name] = -1


def no_counter(outer, inner, body, filled, rng):
    del inner["counters"][rng.choice(list(inner["counters"]))]


def row_count(outer, inner, body, filled, rng):
    """Change the number of features in a queue, or behind the linear head."""
    start, stop = outer["counts" if "counts" in outer else "head_learned"]["data_offsets"]
    at = start + 8 * int(rng.integers((stop - start) // 8))
    old = struct.unpack("<q", body[at : at + 8])[0]
    bad = [-1, 2**40, -(2**60)]
    if "counts" in outer:
        bad += [value for value in (6, old + 1, old - 1) if value != old]
    body[at : at + 8] = struct.pack("<q", bad[rng.integers(len(bad))])


def class_count(outer, inner, body, filled, rng):
    kinds = (
        inner["classes"][:-1],
        [*inner["classes"], "more"],
        [],
        ["x"] * len(inner["classes"]),
        None,
        [1, 2, 3],
        "abc",
    )
    inner["classes"] = kinds[rng.integers(len(kinds))]


def config(outer, inner, body, filled, rng):
    bad = {
        "mixture_window": [None],
        "temperature": [0, -1, "cold"],
        "nonsense": [1],
        "self": [1],
    }
    if inner["method"] == "streamdcs":
        bad |= {"history": [63, 10**9], "target_false_reject": [0, None, "five"], "class_bias": [None]}
    else:
        bad |= {
            "cache_size": [-3, 0, 2**60, "five"],
            "gate_window": [3, 10**9],
            "mixture_window": [5, None],
            "cache_admission": ["never", 7],
            "evolution_gate": [None],
        }
    name = rng.choice(list(bad))
    inner["config"][name] = bad[name][rng.integers(len(bad[name]))]


def header_type(outer, inner, body, filled, rng):
    bad = {
        "method": ["nonsense", 7, None, "zero_shot"],
        "frozen": ["yes", 1, None],
        "encoder": [5, ["x"]],
        "method_version": [-1, 2**80, "1", None, True, 1.5],
        "schema_version": [-1, 2**80, "1", None, True, 1.5],
        "counters": [None, [], "none"],
        "config": [None, []],
        "format": ["other", None],
        "backend": [None, 3],
        "extra": [1],
    }
    name = rng.choice(list(bad))
    inner[name] = bad[name][rng.integers(len(bad[name]))]


def scale(outer, inner, body, filled, rng):
    """All numbers of an array twice as large: features that are no longer unit, sums that contradict their queues."""
    scaled = ("initial_prototypes", "text", "cache", "text_sum", "visual_sum", "bias_rows")
    names = [n for n in scaled if n in filled]
    # A single open class has nothing to be told apart from: its sums are zero, and twice that is right.
    names = [n for n in names if any(body[slice(*outer[n]["data_offsets"])])]
    name = rng.choice(names)
    start, stop = outer[name]["data_offsets"]
    dtype = np.float64 if outer[name]["dtype"] == "F64" else np.float32
    body[start:stop] = (np.frombuffer(bytes(body[start:stop]), dtype) * 2).tobytes()


BREAKS = {
    "NaN": poke(float("nan")),
    "infinity": poke(float("inf")),
    "huge": poke(3e38),
    "reshape": reshape,
    "retype": retype,
    "drop": drop,
    "counters": counters,
    "no counter": no_counter,
    "row count": row_count,
    "class count": class_count,
    "config": config,
    "header type": header_type,
    "scale": scale,
}


@pytest.fixture(scope="module")
def victims():
    readings = (
        {},
        {"evolution_gate": "entropy", "cache_admission": "buffered"},
        {"evolution_gate": "quantile", "alignment_keys": "all", "evolution_norm": "raw"},
        {"alignment_direction": "text-to-visual"},
    )
    options = [{"method": "protodcs", **reading} for reading in readings]
    options += [{"method": "streamdcs"}, {"method": "streamdcs", "history": 64}]
    return [trained(**chosen)[0].snapshot() for chosen in options]


def refused(data, **beside):
    """Restoring fails with a StateError, with little work (of this thread: a neighbour's is not counted) and memory."""
    # Collecting the garbage of all tests before takes up to a second.
    gc.disable()
    tracemalloc.start()
    started = time.thread_time()
    try:
        with pytest.raises(StateError) as caught:
            methods.restore(data, **beside)
        seconds = time.thread_time() - started
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert seconds < 1.0
    assert peak <= 3 * len(data) + 16 * 2**20
    assert len(str(caught.value)) < 2_000
    return True


# Values that no element of these arrays can have; NaN is added for each array of floating-point numbers.
IMPOSSIBLE = {
    "initial_prototypes": [2.0], "history": [1e30], "rule": [1e30],
    "head_means": [1.5], "head_learned": [-1, 10**6],
    "baseline_moments": [1e30], "baseline_weights": [-1.0, 1e9], "baseline_pool": [1e30], "bias_rows": [9.0],
    "bias_vectors": [1e30], "bias_sums": [1e30],
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_damaged_array_of_a_streamdcs_state_is_an_error(name):
    engine, _ = trained()
    header, arrays = state.unpack(engine.snapshot())
    header.content_hash = "0" * 64
    StreamDCS.restore(state.pack(header, arrays))
    assert set(arrays) == set(IMPOSSIBLE)
    array = arrays[name]
    damaged_arrays = [
        array[:-1],
        array[..., None],
        array.astype(np.float32 if array.dtype != np.float32 else np.float64),
    ]
    values = IMPOSSIBLE[name] + ([] if array.dtype.kind == "i" else [np.nan, np.inf])
    for value in values:
        for place in np.ndindex(array.shape) if array.size < 50 else [(0,) * array.ndim, (-1,) * array.ndim]:
            changed = array.copy()
            changed[place] = value
            damaged_arrays.append(changed)
    for changed in damaged_arrays:
        with pytest.raises(StateError):
            StreamDCS.restore(state.pack(header, {**arrays, name: np.ascontiguousarray(changed)}))
    without = {other: values for other, values in arrays.items() if other != name}
    with pytest.raises(StateError):
        StreamDCS.restore(state.pack(header, without))
    with pytest.raises(StateError):
        StreamDCS.restore(state.pack(header, {**arrays, "more": np.zeros(3)}))


@pytest.mark.parametrize("part", range(4))
def test_damaged_states_are_refused(victims, part):
    rng = np.random.default_rng(100 + part)
    for _ in range(250):
        victim = victims[rng.integers(len(victims))]
        spoiled = damaged(victim, rng)
        if spoiled != victim:
            assert refused(spoiled)


@pytest.mark.parametrize("part", range(4))
def test_states_broken_in_meaning_under_a_right_hash_are_refused(victims, part):
    rng = np.random.default_rng(200 + part)
    for _ in range(250):
        victim = victims[rng.integers(len(victims))]
        spoiled, kind = senseless(victim, rng)
        try:
            refused(spoiled)
        except BaseException as problem:
            raise AssertionError(f"a state broken by {kind!r} was not refused as it should be: {problem}") from problem


def test_the_breaking_itself_is_sound(victims):
    """An unbroken file that was taken apart and joined again is accepted, so the tests above can fail."""
    for victim in victims:
        assert methods.restore(join(*split(victim))).snapshot() == victim


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 8,
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 2**40) + b"{}",
        b"\x80\x04\x95" + b"pickle" * 20,
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        b"PK\x03\x04" + b"\x00" * 500,
    ],
    ids=["empty", "short", "ones", "no hash", "huge header", "pickle", "nested", "zip"],
)
def test_files_of_other_kinds_are_refused(data):
    assert refused(data)


def test_deep_json_under_a_right_hash_is_refused():
    text = '{\\"content_hash\\":\\"' + "0" * 64 + '\\",\\"a\\":' + "[" * 200_000 + "]" * 200_000 + "}"
    outer = ('{"__metadata__":{"state":"' + text + '"}}').encode()
    data = struct.pack("<Q", len(outer)) + outer
    at = re.search(rb"0{64}", data).start()
    data = data[:at] + hashlib.sha256(data).hexdigest().encode() + data[at + 64 :]
    assert refused(data)


def test_a_large_false_claim_costs_no_memory():
    """A file that wrongly claims full queues of the largest size must not make us allocate for them."""
    engine = methods.create("protodcs", np.random.default_rng(0).normal(size=(2_000, 64)), cache_size=64)
    outer, inner, body = split(engine.snapshot())
    start, _ = outer["counts"]["data_offsets"]
    body[start : start + 8] = struct.pack("<q", 64)
    assert refused(join(outer, inner, body))
