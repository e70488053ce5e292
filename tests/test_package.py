"""The package as a user meets it: imports, command line, explanations, both backends, the documents."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import protodcs
from conftest import random_stream
from protodcs import Decisions, OpenSetClassifier, ProtoDCS, ProtoDCSConfig, StreamDCS, StreamDCSConfig, encoders
from protodcs.cli import app
from protodcs.cli.state import MEANINGS, _flat
from protodcs.core.streamdcs import constants

ROOT = Path(__file__).parent.parent
READINGS = (
    {},
    {"evolution_gate": "entropy", "cache_admission": "verified"},
    {"evolution_gate": "quantile", "cache_admission": "buffered"},
    {"evolution_gate": "off", "first_check": False},
    {"cache_admission": "gated", "openness": "softmax", "evidence_scale": 100.0},
    {"verification": False, "visual_prototypes": False},
    {"text_prototypes": False, "evidence_logits": "fused"},
    {"target_false_reject": 0.05, "text_rate": 0.0},
)
VARIANTS = (
    *(("protodcs", reading) for reading in READINGS),
    ("streamdcs", {}),
    ("streamdcs", {"target_false_reject": 0.05}),
)


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    ).stdout


def test_importing_the_package_imports_nothing_heavy():
    heavy = "('numba', 'numpy', 'torch', 'PIL', 'ray', 'pydantic', 'sklearn')"
    assert run(f"import protodcs, sys; print([m for m in {heavy} if m in sys.modules])").strip() == "[]"
    loaded = run(
        f"import protodcs, sys; protodcs.StreamDCS, protodcs.ProtoDCS; print([m for m in {heavy} if m in sys.modules])"
    )
    for name in ("torch", "PIL", "ray", "sklearn"):
        assert name not in loaded


def test_help_of_the_command_line_imports_nothing_heavy():
    heavy = ("numpy", "pydantic", "rich", "ray", "PIL")
    code = (
        "import atexit, runpy, sys\n"
        f"atexit.register(lambda: print([m for m in {heavy} if m in sys.modules]))\n"
        "sys.argv = ['protodcs', '--help']\n"
        "runpy.run_module('protodcs', run_name='__main__')"
    )
    *usage, imported = run(code).splitlines()
    assert "Usage: protodcs" in usage[0]
    assert imported == "[]"


def test_every_public_name_is_there_and_no_other():
    for name in protodcs.__all__:
        assert getattr(protodcs, name) is not None
    assert dir(protodcs) == protodcs.__all__
    with pytest.raises(AttributeError, match="nonsense"):
        protodcs.nonsense  # noqa: B018


THREADS = """
import threading, numpy as np
from protodcs import methods
problems = []
def start(name):
    try:
        engine = methods.create(name, np.eye(4, 16))
        for i in range(130):
            engine.observe(np.eye(4, 16)[i % 4])
    except BaseException as problem:
        problems.append(repr(problem))
threads = [threading.Thread(target=start, args=(name,)) for name in ("zero_shot", "protodcs", "streamdcs") * 3]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(problems)
"""


def test_first_engines_may_be_built_in_many_threads_and_in_any_order():
    assert run(THREADS).strip() == "[]"


BOTH_BACKENDS = """
import sys, numpy as np
sys.path.insert(0, "tests")
from conftest import random_stream
from protodcs import methods
from protodcs.core._native import BACKEND
prototypes, features, _ = random_stream(classes=9, samples=260, seed=5)
out = []
fused = {"evolution_gate": "entropy", "evidence_logits": "fused"}
for method, options in (
    ("streamdcs", {}), ("protodcs", {}), ("protodcs", fused), ("protodcs", {"uncertainty": "entropy"})
):
    d = methods.create(method, prototypes, **options).observe_many(features)
    out.append([d.openness.tolist(), d.index.tolist(), d.known.tolist(), d.aleatoric.tolist()])
import json; print(json.dumps([BACKEND, out]))
for method in ("streamdcs", "protodcs"):
    engine = methods.create(method, prototypes)
    for feature in features:
        decision = engine.observe(feature)
    json.dumps(decision.to_dict())
    assert methods.restore(engine.snapshot()).snapshot() == engine.snapshot()
"""


def test_both_backends_give_the_same_answers():
    plain, fast = (json.loads(run(BOTH_BACKENDS, PROTODCS_BACKEND=name)) for name in ("numpy", "native"))
    assert (plain[0], fast[0]) == ("numpy", "native")
    for first, second in zip(plain[1], fast[1], strict=True):
        np.testing.assert_allclose(first[0], second[0], atol=1e-6)
        np.testing.assert_allclose(first[3], second[3], atol=1e-6)
        assert first[1:3] == second[1:3]


# Decisions.


def test_decisions_are_columns_that_can_be_sliced_and_iterated():
    prototypes, features, _ = random_stream(samples=50)
    engine = StreamDCS(prototypes, classes=[f"c{k}" for k in range(7)])
    decisions = engine.observe_many(features, scores=True)
    assert isinstance(decisions, Decisions)
    assert len(decisions) == 50
    assert decisions.scores.shape == (50, 7)
    assert decisions[-1].sequence == 49
    assert [d.sequence for d in decisions[10:13]] == [10, 11, 12]
    assert decisions.label == [d.label for d in decisions]
    assert "50 samples" in repr(decisions)
    with pytest.raises(IndexError):
        decisions[50]
    assert json.loads(json.dumps(decisions[3].to_dict()))["sequence"] == 3


def test_decisions_keep_their_reasons_when_they_are_sliced_and_indexed():
    prototypes, features, _ = random_stream(samples=100)
    decisions = StreamDCS(prototypes).observe_many(features)
    turn = decisions.reason.index(None)
    part = decisions[turn - 2 : turn + 2]
    assert part.reason == [decision.reason for decision in part] == ["few samples", "few samples", None, None]
    assert decisions[turn - 1].to_dict()["reason"] == "few samples"
    assert decisions[turn].reason is None


# Explanations.


def explained(engine, features):
    """Explain and observe each feature, and check what holds for the explanations of both methods."""
    for feature in features:
        before = engine.snapshot()
        why = engine.explain(feature)
        assert engine.snapshot() == before
        decision = engine.observe(feature)
        assert why.decision.to_dict() == decision.to_dict()
        assert why.best[0][0] == engine.classes[decision.index]
        json.dumps(why.to_dict())
        yield why, decision


@pytest.mark.parametrize("options", [{}, {"target_false_reject": 0.2}, {"class_bias": False, "linear_head": False}])
def test_an_explanation_of_streamdcs_agrees_with_the_decision_and_changes_nothing(options):
    prototypes, features, _ = random_stream(samples=260, seed=2)
    engine = StreamDCS.from_options(prototypes, **options)
    for why, decision in explained(engine, features):
        assert why.verification.score == decision.score
        assert (why.class_bias is None) == (not engine.config.class_bias)
        assert len(str(why).splitlines()) == 3


@pytest.mark.parametrize("options", READINGS)
def test_an_explanation_of_protodcs_agrees_with_the_decision_and_changes_nothing(options):
    prototypes, features, _ = random_stream(samples=260, seed=2)
    engine = ProtoDCS.from_options(prototypes, **options)
    for why, decision in explained(engine, features):
        first = why.first_check
        if engine.config.first_check:
            assert first.confident == (first.openness < first.cache_gate)
            assert first.trusted == (first.openness < first.trust_gate) == decision.trusted
        assert why.temporary.openness_after == decision.openness
        assert why.temporary.stepped == (why.temporary.gradient_norm > 0)
        assert why.temporary.stepped == (why.temporary.text_step > 0)
        assert {name: text + visual for name, text, visual in why.prediction.parts} == pytest.approx(dict(why.best))
        assert decision.evolved or why.evolution.drift_after == why.evolution.drift_before
        assert why.evolution.evolved == decision.evolved
        assert len(why.cache.nearest) == why.cache.held
        if why.verification.fitted and engine.config.verification:
            assert len(why.verification.mixture) == 2
        lines = str(why).splitlines()
        assert sum(not line.startswith(" ") for line in lines) == 7
        assert max(len(line) for line in lines) <= 76


def test_an_explanation_has_the_drift_of_the_text_prototypes_and_what_their_gate_measured():
    prototypes, features, _ = random_stream(samples=260, seed=2)
    engine = ProtoDCS(prototypes)
    for why, decision in explained(engine, features):
        evolution = why.evolution
        assert evolution.drift_after == pytest.approx(engine.stats()["text_drift_mean"], abs=1e-15)
        assert evolution.passed == (decision.known and evolution.measured < evolution.threshold)
        assert why.prediction.entropy == evolution.measured
    assert engine.stats()["evolved"] > 20


def test_a_frozen_engine_explains_that_nothing_is_kept():
    prototypes, features, _ = random_stream(samples=150)
    engine = ProtoDCS(prototypes, config=ProtoDCSConfig.preset("working"))
    engine.observe_many(features)
    engine.freeze()
    for feature in features[:40]:
        why = engine.explain(feature)
        assert why.decision.to_dict() == engine.peek(feature).to_dict()
        assert "frozen" in why.cache.reason
        assert not why.evolution.evolved
    assert any("normalised entropy" in engine.explain(feature).evolution.reason for feature in features)


def test_an_explanation_says_what_held_the_evolution_back():
    prototypes, features, _ = random_stream(samples=150)
    engine = ProtoDCS(prototypes, config=ProtoDCSConfig.preset("paper"))
    engine.observe_many(features)
    reasons = {engine.explain(feature).evolution.reason for feature in features}
    assert any("gate at 0.1 did not open for AU" in reason for reason in reasons)
    assert any("not known" in reason for reason in reasons)


def test_decisions_become_tables_and_dictionaries():
    prototypes, features, _ = random_stream(samples=50)
    engine = StreamDCS(prototypes)
    decisions = engine.observe_many(features)
    rows = decisions.to_dicts()
    assert [row["sequence"] for row in rows] == list(range(50))
    table = pytest.importorskip("pyarrow") and decisions.to_arrow()
    assert table.column("outcome").to_pylist() == decisions.outcome
    assert table.column("p_unknown").to_pylist() == list(decisions.p_unknown)
    assert "50 decisions" in decisions._repr_html_()
    assert "<th>sequence</th><td>50</td>" in engine._repr_html_()
    assert "Decision" in engine.explain(features[0])._repr_html_()


def test_decisions_become_a_data_frame():
    pandas = pytest.importorskip("pandas")
    prototypes, features, _ = random_stream(samples=20)
    frame = StreamDCS(prototypes).observe_many(features).to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["sequence"]) == list(range(20))


# The command line.


@pytest.fixture
def state_file(tmp_path):
    prototypes, features, _ = random_stream(samples=220)
    engine = StreamDCS(prototypes, classes=[f"class {k} [new]" for k in range(7)], encoder="test-encoder")
    engine.observe_many(features)
    engine.save(tmp_path / "engine.state")
    return tmp_path / "engine.state"


def test_state_show_explains_numbers_and_settings(state_file):
    result = CliRunner().invoke(app, ["state", "show", str(state_file)], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    for words in ("streamdcs", "test-encoder", "class 0 [new]", "220", "samples observed", "all with their defaults"):
        assert words in result.stdout


def test_state_show_lists_changed_settings_first_with_their_defaults(tmp_path):
    engine = StreamDCS(np.eye(3, 8), config=StreamDCSConfig(temperature=0.02, history=64))
    engine.save(tmp_path / "engine.state")
    result = CliRunner().invoke(app, ["state", "show", str(tmp_path / "engine.state")], env={"COLUMNS": "160"})
    settings = result.stdout.partition("Settings, 2 of 8 changed")[2]
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in settings.splitlines() if line.startswith("│")]
    assert rows[:2] == [["temperature", "0.02", "0.01"], ["history", "64", "2048"]]
    assert all(default == "" for _, _, default in rows[2:])


@pytest.mark.parametrize("method", [StreamDCS, ProtoDCS])
def test_every_number_of_both_methods_has_a_meaning(method):
    prototypes, features, _ = random_stream(samples=220)
    engine = method(prototypes)
    for rows in ([], features):
        if len(rows):
            engine.observe_many(rows)
        assert {*_flat(engine.stats())} - {"method", "classes", "frozen"} <= {*MEANINGS}


def test_state_show_prints_json_for_scripts(state_file):
    result = CliRunner().invoke(app, ["state", "show", str(state_file), "--json"])
    report = json.loads(result.stdout)
    assert report["stats"]["sequence"] == 220
    assert report["arrays"]["initial_prototypes"]["shape"] == [7, 32]
    assert report["config"]["linear_head"] is True


def test_state_show_refuses_a_damaged_file_in_words(state_file):
    data = bytearray(state_file.read_bytes())
    data[-3] ^= 1
    state_file.write_bytes(data)
    result = CliRunner().invoke(app, ["state", "show", str(state_file)])
    assert result.exit_code == 1
    assert "does not match its hash" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["classify", "{csv}", "--classes", "demmo"], "Did you mean 'demo'?"),
        (["classify", "{folder}", "--classes", "demo"], "contains no image"),
        (["evaluate", "{csv}"], "is not a folder"),
        (["classify", "missing", "--classes", "demo"], "There is no folder 'missing'"),
        (["state", "show", "{csv}"], "This is not a state file"),
        (["state", "show", "{csv}"], "rows.csv.state."),
        (["classify", "{folder}/..", "--classes", "demo,", "--model", "demo"], "There is only one class, 'demo'."),
        (["classify", "{folder}/..", "--classes", "demo", "--target-false-reject", "5"], "such as 0.05 for 5 %"),
        (["classify", "{folder}/..", "--classes", "demo", "--model", "demo"], "No image can be read (1 given)."),
        (["streams", "lst"], "Did you mean 'list'?"),
        (["clasify"], "Did you mean 'classify'?"),
        (["state", "shw"], "Did you mean 'show'?"),
        (["classify", "--clases", "demo"], "Possible options: --classes"),
        (["export", "demmo", "out"], "Unknown encoder 'demmo'. Did you mean 'demo'?"),
    ],
)
def test_a_typical_mistake_gets_a_message_that_helps(arguments, message, tmp_path, monkeypatch):
    (tmp_path / "rows.csv").write_text("file,known\n" + "a.png,True\n" * 100)
    (tmp_path / "rows.csv.state").touch()
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    places = {"csv": tmp_path / "rows.csv", "folder": tmp_path / "folder"}
    result = CliRunner().invoke(app, [argument.format(**places) for argument in arguments])
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_options_and_datasets(shell):
    def completed(line):
        environment = {"_PROTODCS_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "_TYPER_COMPLETE_ARGS": line}
        environment |= {"COMP_CWORD": str(len(line.split()) - 1), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        command = [sys.executable, "-m", "protodcs"]
        return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True).stdout

    assert "classify" in completed("protodcs cla")
    assert "--target-false-reject" in completed("protodcs classify --tar")
    assert "cifar100-c" in completed("protodcs fetch cifar100")
    script = subprocess.run(
        [sys.executable, "-m", "protodcs"],
        env=os.environ | {"_PROTODCS_COMPLETE": f"source_{shell}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_classify_takes_files_a_limit_a_target_and_writes_parquet(tmp_path):
    parquet, image = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("PIL.Image")
    demo = pytest.importorskip("onnxruntime") and pytest.importorskip("protodcs.demo")
    rng = np.random.default_rng(0)
    for number, kind in enumerate(demo.KNOWN[:12]):
        image.fromarray(demo.draw(kind, rng)).save(tmp_path / f"{number}.png")
    files = sorted(str(file) for file in tmp_path.glob("*.png"))
    out, sheet = tmp_path / "rows.parquet", tmp_path / "sheet.jpg"
    options = ["--classes", "demo", "--model", "demo", "--limit", "6", "--target-false-reject", "0.2"]
    named = ["--format", "parquet", "--out", str(out), "--sheet", str(sheet), "--json"]
    result = CliRunner().invoke(app, ["classify", *files, *options, *named])
    assert result.exit_code == 0, result.stderr
    assert parquet.read_table(out).column("file").to_pylist() == files[::2]
    with image.open(sheet) as drawn:
        assert drawn.format == "JPEG"
    classifier = OpenSetClassifier.restored(encoders.load("demo"), out.with_suffix(".parquet.state"))
    assert classifier.engine.config.target_false_reject == 0.2


def test_version():
    assert CliRunner().invoke(app, ["--version"]).stdout.strip() == f"protodcs {protodcs.__version__}"


# Documents.


def blocks(path, language="python"):
    text = path.read_text()
    return [part.split("```")[0] for part in text.split(f"```{language}\n")[1:]]


@pytest.mark.parametrize("name", ["features", "images", "own_method"])
def test_the_example_scripts_run(name):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ("AUROC" if name == "own_method" else "unknown") in done.stdout


def test_the_readme_shows_what_its_example_prints(tmp_path, monkeypatch, capsys):
    readme = (ROOT / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks(ROOT / "README.md")[0], "README.md", "exec"), {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    (shown,) = blocks(ROOT / "README.md", "text")[:1]
    # Probabilities may round differently on another machine.
    assert [line[:-1] for line in printed] == [line.split()[:-1] for line in shown.splitlines()]
    assert any("unknown" in line for line in printed)
    assert len(readme.splitlines()) <= 155


def test_the_documentation_lists_every_constant_of_streamdcs():
    page = (ROOT / "docs" / "explanation" / "how-a-decision-is-made.md").read_text()
    rows = re.findall(r"^\| (`[A-Z_]+`(?:, `[A-Z_]+`)*) \|", page, re.MULTILINE)
    (others,) = re.findall(r"^Four more are not tuned[^.]*", page, re.MULTILINE)
    listed = re.findall(r"`([A-Z_]+)`", " ".join([*rows, others]))
    assert sorted(listed) == sorted(name for name in vars(constants) if name.isupper())
