"""Settings of `protodcs serve` in the environment, and the references that the command line prints."""

import json

import pytest
from typer.testing import CliRunner

from protodcs.cli import app
from protodcs.serve.access.problems import TYPES
from protodcs.serve.runtime import preflight, service
from protodcs.serve.settings import ServeConfig


@pytest.fixture
def started(monkeypatch):
    """Return the settings that `protodcs serve` starts with, given its options and PROTODCS_SETTING_... variables."""
    monkeypatch.setattr(preflight, "check", lambda *_, **__: None)

    def start(*options, code=0, **environment):
        found = []
        monkeypatch.setattr(service, "serve", lambda settings, ready: found.append(settings))
        variables = {f"PROTODCS_SETTING_{name}": value for name, value in environment.items()}
        result = CliRunner().invoke(app, ["serve", *map(str, options)], env=variables)
        assert result.exit_code == code, result.output
        return found[0] if found else result.stderr

    return start


def test_every_kind_of_setting_can_be_in_the_environment(started, tmp_path):
    found = started(
        PORT="8123",
        RATE="2.5",
        LOG_FORMAT="off",
        FORBID_IMAGES="true",
        STORE=f"sqlite:{tmp_path}/a: b",
        LOG_ENTRIES="7",
        TENANTS="{acme: {rate: 5}}",
        GUARD='{"window": 64}',
        ENCODER="",
    )
    assert (found.port, found.rate, found.log_format, found.forbid_images) == (8123, 2.5, "off", True)
    assert (found.store, found.log_entries, found.encoder) == (f"sqlite:{tmp_path}/a: b", 7, None)
    assert (found.tenants["acme"].rate, found.guard.window) == (5, 64)


def test_options_override_the_environment_which_overrides_the_file(started, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1001\nrate: 1\nburst: 11\n")
    found = started("--config", file, "--port", 3003, PORT="2002", RATE="2")
    assert (found.port, found.rate, found.burst) == (3003, 2, 11)


def test_a_variable_that_names_no_setting_or_holds_no_value_of_it_is_an_error(started):
    assert "PROTODCS_SETTING_PROT names no setting" in started(PROT="1", code=1)
    assert "port" in started(PORT="eight", code=1)
    assert "PROTODCS_SETTING_TENANTS is not YAML" in started(TENANTS="{acme: [", code=1)


def printed(*words, code=0):
    result = CliRunner().invoke(app, ["reference", *words])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_the_reference_of_settings_has_each_of_them_with_its_variable():
    settings = {one["name"]: one for one in json.loads(printed("settings", "--json"))}
    assert {name.partition(".")[0] for name in settings} == set(ServeConfig.model_fields)
    assert settings["port"] == {
        "name": "port",
        "variable": "PROTODCS_SETTING_PORT",
        "default": 8000,
        "meaning": ServeConfig.model_fields["port"].description,
    }
    assert settings["guard.window"]["variable"] is None
    assert all(one["meaning"] for one in settings.values())
    text = printed("settings", "stream_idle_seconds")
    assert text.startswith("stream_idle_seconds (default: 60.0)\n  Maximum pause between two rows")
    assert "port" not in text.split()
    assert "prot" in printed("settings", "prot", code=1)


def test_the_reference_of_errors_has_each_code_and_says_what_to_do():
    errors = {one["code"]: one for one in json.loads(printed("errors", "--json"))}
    assert set(errors) == set(TYPES)
    assert (errors["overloaded"]["status"], errors["overloaded"]["retry"]) == (429, True)
    text = printed("errors", "stream_damaged")
    assert text.startswith("stream_damaged (409)\n")
    assert "See Damaged streams (docs/how-to/operate.md#damaged-streams)." in text
    assert "](" not in printed("errors")
    assert "no_such_code" in printed("errors", "no_such_code", code=1)
