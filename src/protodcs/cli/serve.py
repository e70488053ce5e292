"""`protodcs serve`: the service in one process, which may be one of several that share a store."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ConfigError, without_passwords
from .live import check_installed
from .screen import explained, tell

if TYPE_CHECKING:
    from ..serve.settings import ServeConfig

# Environment variables of settings begin with this. Kubernetes sets variables such as PROTODCS_PORT or
# PROTODCS_SERVE_PORT for services of these names, so they cannot be ours.
VARIABLE = "PROTODCS_SETTING_"
# Settings that name a file.
_FILES = ("keys", "audit", "tls_certificate", "tls_key")
_NEEDED = {
    "fastapi": "fastapi", "uvicorn": "uvicorn", "httptools": "httptools", "python_multipart": "python-multipart",
    "standardwebhooks": "standardwebhooks",
    "yaml": "pyyaml", "prometheus_client": "prometheus-client", "opentelemetry": "opentelemetry-api",
}  # fmt: skip
_NEEDED_BY_PEERS = {"psycopg": "psycopg[binary]", "aiohttp": "aiohttp", "msgspec": "msgspec"}


@explained
def serve(
    config: Path | None = typer.Option(
        None, help="YAML file of settings. PROTODCS_SETTING_NAME variables and options override it."
    ),
    cells: Path | None = typer.Option(
        None, help="YAML file with host, port and cells: pass requests on to the cells, and serve no stream here."
    ),
    store: str | None = typer.Option(
        None,
        help="sqlite:FOLDER (default: sqlite:protodcs-streams), or postgresql://USER@HOST/DB, which several processes "
        "can share.",
    ),
    encoder: str | None = typer.Option(
        None, help="Encoder, such as demo (default: none; the service takes features only)."
    ),
    host: str | None = typer.Option(None, help="Address to listen on (default: 127.0.0.1)."),
    port: int | None = typer.Option(None, help="Port to listen on (default: 8000)."),
    address: str | None = typer.Option(
        None,
        help="URL at which other processes with the same PostgreSQL reach this one (default: from host and port).",
    ),
    keys: str | None = typer.Option(
        None, help="File of API keys. Required for addresses that other machines can reach."
    ),
    log_format: str | None = typer.Option(
        None, help="Format of the log on standard output: text or json (default: text on a terminal, otherwise json)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object when it is ready."),
) -> None:
    """Serve streams over HTTP until SIGTERM or Ctrl-C; then finish the open requests, unload the streams, and stop."""
    if cells is not None:
        _serve_cells(read_file(cells), host, port, as_json)
        return
    given = {"store": store, "encoder": encoder, "host": host, "port": port}
    given |= {"address": address, "keys": keys, "log_format": log_format}
    defaults = {"log_format": "text" if sys.stdout.isatty() else "json"}
    options = {**defaults, **read_file(config), **_environment(), **{k: v for k, v in given.items() if v is not None}}
    settings = checked_settings(options)
    check_installed(_NEEDED, "serve")
    if settings.is_shared:
        check_installed(_NEEDED_BY_PEERS, "postgres")
    as_json = as_json or settings.log_format == "json"

    def ready(at: str) -> None:
        store = without_passwords(settings.store)
        tell({"serving": at, "store": store, "pid": os.getpid()}, as_json)

    if settings.is_shared:
        from ..serve.cluster import service as one_of_many

        one_of_many.serve(settings, ready)
    else:
        from ..serve.runtime import service

        service.serve(settings, ready)
    tell({"stopped": "all acknowledged requests are stored"}, as_json)


def _serve_cells(options: dict[str, Any], host: str | None, port: int | None, as_json: bool) -> None:
    check_installed({**_NEEDED, **_NEEDED_BY_PEERS}, "postgres")
    from ..serve.cluster import cells

    given = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    config = cells.CellsConfig(**{**options, **given})

    def ready(at: str) -> None:
        tell({"serving": at, "cells": len(config.cells), "pid": os.getpid()}, as_json)

    cells.serve(config, ready)


def read_file(file: Path | None) -> dict[str, Any]:
    """Return the settings in a YAML file; none if there is no file."""
    if file is None:
        return {}
    check_installed({"yaml": _NEEDED["yaml"]}, "serve")
    import yaml

    try:
        found = yaml.safe_load(file.read_text())
    except yaml.YAMLError as problem:
        raise ConfigError(f"{file} is not YAML: {without_passwords(str(problem))}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must hold names and values, such as 'port: 8001'")
    return found


def _environment() -> dict[str, Any]:
    """Return the settings in the environment. Variables without a value count as not set."""
    from ..serve.settings import ServeConfig

    found: dict[str, Any] = {}
    for variable, text in os.environ.items():
        if not variable.startswith(VARIABLE) or not text:
            continue
        name = variable.removeprefix(VARIABLE).lower()
        if name not in ServeConfig.model_fields:
            raise ConfigError(f"{variable} names no setting. `protodcs reference settings` lists them.")
        # The settings convert single values themselves. YAML would take "off" for false.
        found[name] = _parsed(variable, text) if text[0] in "[{" else text
    return found


def _parsed(variable: str, text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{variable} is not YAML or JSON. Given: {without_passwords(text)[:80]!r}.") from None


def _absolute(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with absolute paths, which mean the same in every process."""
    from ..serve.settings import ServeConfig

    store = options.get("store", ServeConfig.model_fields["store"].default)
    if isinstance(store, str) and store.startswith("sqlite:"):
        options = {**options, "store": f"sqlite:{Path(store.removeprefix('sqlite:')).resolve()}"}
    # Not resolved: where a link is changed to point to new keys, that has to be seen.
    files = {name: options[name] for name in _FILES if isinstance(options.get(name), str) and options[name] != "-"}
    return {**options, **{name: str(Path(file).absolute()) for name, file in files.items()}}


def checked_settings(options: dict[str, Any], *, ports: bool = True) -> "ServeConfig":
    """Return settings with which a service can start here. Warn if keys are sent without TLS.

    Args:
        options: the settings by name. Relative paths begin at the current folder.
        ports: whether the service will listen on this machine.
    """
    from ..serve.runtime import preflight
    from ..serve.settings import ServeConfig

    settings = ServeConfig(**_absolute(options))
    preflight.check(settings, ports=ports)
    if settings.keys is not None and not settings.is_local and settings.tls_certificate is None:
        typer.echo(
            "warning: API keys are sent unencrypted. Set tls_certificate and tls_key, or use the gateway in "
            "deploy/haproxy.",
            err=True,
        )
    return settings
