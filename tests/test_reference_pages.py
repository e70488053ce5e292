"""The reference pages that the documentation generates from the code."""

import importlib.util
from pathlib import Path

import pytest

from conftest import random_stream
from protodcs import methods
from protodcs.serve.access.problems import FIXES, TYPES
from protodcs.serve.api.app import RULES
from protodcs.serve.settings import ServeConfig

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "scripts" / "reference_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_page_has_every_command_and_its_options(reference):
    page = reference.command_line()
    for text in ("## protodcs classify", "## protodcs streams observe", "`--batch-size`", "required"):
        assert text in page


def test_the_settings_page_has_every_setting_once(reference):
    page = reference.service_settings()
    for name in ServeConfig.model_fields:
        assert (page.count(f"| `{name}` |") or page.count(f"### {name}\n")) == 1, name


def test_the_page_of_options_has_every_method_and_says_which_never_answer_unknown(reference):
    page = reference.configuration()
    prototypes, features, _ = random_stream(classes=10, samples=400)
    for name in methods.names():
        method = methods.REGISTER[name]
        title = method.__name__ if name in ("streamdcs", "protodcs") else name
        section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        assert all(f"| `{option}` |" in section for option in method.config_type.model_fields), name
        warns = 'never answers "unknown" unless you set `threshold`' in section
        assert warns == method(prototypes).observe_many(features).known.all(), name


def test_the_http_page_has_every_documented_route(reference):
    page = reference.http_api()
    shown = [(method, path) for method, path, _ in RULES if path.startswith("/v1/streams") and method != "HEAD"]
    assert shown
    for method, path in shown:
        assert f"### `{method} {path.replace(':path}', '}')}`" in page


def test_the_error_page_has_every_code_and_says_how_to_fix_it(reference):
    page = reference.errors()
    assert all(f"| `{code}` |" in page for code in TYPES)
    assert set(FIXES) <= set(TYPES)
