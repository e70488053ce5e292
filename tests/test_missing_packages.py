"""What the library and the commands say if an optional package is not installed."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from ports import free_port
from protodcs import StreamDCS, encoders, plot
from protodcs.errors import EncoderError, MissingPackageError

EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SERVICE = (
    "fastapi",
    "uvicorn",
    "httptools",
    "python_multipart",
    "standardwebhooks",
    "yaml",
    "prometheus_client",
    "opentelemetry",
)


@pytest.fixture
def decisions():
    return StreamDCS(np.eye(10, 16)).observe_many(np.eye(10, 16))


def run_without(packages, *arguments):
    """Run a command as if these packages were not installed, and return the one line that it prints."""
    code = f"import sys; sys.modules.update(dict.fromkeys({packages!r})); from protodcs.cli import app; app()"
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    return line


@pytest.mark.parametrize(
    ("export", "package", "install"),
    [("to_pandas", "pandas", "pip install pandas"), ("to_arrow", "pyarrow", "pip install 'protodcs[data]'")],
)
def test_exports_of_decisions_say_what_to_install(monkeypatch, decisions, export, package, install):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError) as raised:
        getattr(decisions, export)()
    assert str(raised.value) == f"`{export}` needs {package}: {install}"


def test_charts_say_what_to_install(monkeypatch, decisions):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match="charts need matplotlib: pip install matplotlib"):
        plot.unknown_rate(decisions, window=2)


@pytest.mark.parametrize("package", SERVICE)
def test_serve_names_its_extra(package, tmp_path):
    (tmp_path / "serve.yaml").write_text("{}")
    options = ("--config", tmp_path / "serve.yaml", "--store", f"sqlite:{tmp_path / 'store'}", "--port", free_port())
    line = run_without([package], "serve", *options)
    assert line.endswith("run pip install 'protodcs[serve]'")


@pytest.mark.parametrize(
    ("call", "encoder", "module", "extra"),
    [
        (encoders.check, "demo", "onnxruntime", "demo"),
        (encoders.check, "mini", "torch", "transformers"),
        (encoders.check, "open_clip:ViT-B-16", "open_clip", "open-clip"),
        (encoders.check, "onnx:folder", "onnxruntime", "onnx"),
        (encoders.check, "openai/clip-vit-base-patch16", "transformers", "transformers"),
        (encoders.load, "demo", "onnxruntime", "onnx"),
        (encoders.load, "mini", "torch", "transformers"),
        (encoders.load, "open_clip:ViT-B-16", "open_clip", "open-clip"),
    ],
)
def test_an_encoder_names_the_extra_that_holds_its_package(monkeypatch, call, encoder, module, extra):
    for name in [name for name in sys.modules if name.startswith(("protodcs.encoders.", f"{module}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EncoderError, match=rf"pip install 'protodcs\[{extra}\]'"):
        call(encoder)
    packages = [re.split(r"[>=<\[]", requirement)[0].removesuffix("_torch") for requirement in EXTRAS[extra]]
    assert {module, "pillow"} <= {*packages}


def test_without_pillow_a_command_with_images_names_the_extras_of_encoders(tmp_path):
    line = run_without(["PIL"], "classify", tmp_path, "--classes", "cat,dog")
    assert line == (
        "error: Images need Pillow, which the extra of your encoder installs: pip install 'protodcs[transformers]', or "
        "open-clip, onnx or demo"
    )


def test_a_command_without_the_client_names_its_extra():
    assert run_without(["httpx"], "streams", "list") == "error: the client needs httpx: pip install 'protodcs[client]'"


def test_watch_needs_pyav_for_a_video_but_not_for_a_folder(tmp_path):
    video = run_without(["av"], "watch", "rtsp://127.0.0.1:9/camera", "--classes", "cat,dog")
    assert video == "error: this needs av: run pip install 'protodcs[video]'"
    # The next check after that of the packages.
    folder = run_without(["av"], "watch", tmp_path, "--classes", "no such list")
    assert "There is no file and no list of class names 'no such list'" in folder
