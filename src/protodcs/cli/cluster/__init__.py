"""`protodcs cluster`: processes of the service on the machines of a Ray cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...errors import ConfigError
from ..live import check_installed
from ..screen import explained, tell
from ..serve import checked_settings, read_file
from .connection import connected

if TYPE_CHECKING:
    from ...serve.settings import ServeConfig

app = typer.Typer(help="Run processes of the service on the machines of a Ray cluster.", no_args_is_help=True)

_NEEDED = {"ray": "ray[serve]", "psycopg": "psycopg[binary]", "aiohttp": "aiohttp", "msgspec": "msgspec"}
_RAY = typer.Option("auto", "--ray", help="Address of the Ray cluster (default: the one of this machine).")
_AS_JSON = typer.Option(False, "--json", help="Print one JSON object for scripts.")
# A process gets its own address from its machine.
_ANY_ADDRESS = "http://this-process"


@app.command()
@explained
def up(
    file: Path = typer.Argument(..., help="YAML file of settings of `serve`, with a section `cluster`."),
    ray: str = _RAY,
    as_json: bool = _AS_JSON,
) -> None:
    """Start processes on a Ray cluster, or update those that run to new settings, one after the other.

    The processes share their streams in PostgreSQL. Ray starts a process again that ended, and places it on another
    machine if its own is lost. Files of the settings, such as keys, must be on each machine.
    """
    check_installed(_NEEDED, "cluster")
    from .settings import ClusterSettings

    options = read_file(file)
    cluster = ClusterSettings(**options.pop("cluster", {}))
    if "address" in options:
        raise ConfigError("Each process of a cluster has an address of its own. Remove `address`.")
    config = checked_settings({"log_format": "json", **options, "address": _ANY_ADDRESS}, ports=False)
    _check(config, cluster.encoders)
    with _connected(ray):
        from . import actors, encoder

        _check_nodes(config)
        if cluster.encoders:
            encoder.deploy(config, cluster)
        processes = dict(actors.up(config, cluster))
        if not cluster.encoders:
            encoder.remove()
    _tell(processes, as_json)


@app.command()
@explained
def status(ray: str = _RAY, as_json: bool = _AS_JSON) -> None:
    """Print the address of each process, and whether it serves. Exit with 1 if one does not."""
    with _connected(ray):
        from . import actors

        processes = actors.status()
    _tell(processes, as_json)
    if not all(facts["serving"] for facts in processes.values()):
        raise typer.Exit(1)


@app.command()
@explained
def down(ray: str = _RAY, as_json: bool = _AS_JSON) -> None:
    """Stop all processes and the encoder. The streams stay in PostgreSQL."""
    with _connected(ray):
        from . import actors, encoder

        stopped = actors.down()
        encoder.remove()
    tell({"stopped": stopped if as_json else ", ".join(stopped) or "no process was running"}, as_json)


def _connected(address: str) -> Any:
    return connected(address, "run `protodcs serve` on each machine")


def _check(config: "ServeConfig", encoders: int) -> None:
    if not config.is_shared:
        raise ConfigError("The processes of a cluster share their streams in PostgreSQL. Set store=postgresql://....")
    if encoders and config.encoder is None:
        raise ConfigError(f"cluster.encoders={encoders}, but there is no encoder. Set `encoder`.")


def _check_nodes(config: "ServeConfig") -> None:
    import ray

    nodes = sum(node["Alive"] for node in ray.nodes())
    if config.is_local and nodes > 1:
        raise ConfigError(
            f"host={config.host} is reached by its own machine only, but Ray has {nodes} machines. Set host=0.0.0.0 "
            "and keys."
        )


def _tell(processes: dict[str, dict[str, Any]], as_json: bool) -> None:
    if as_json:
        tell({"processes": processes}, as_json=True)
        return
    tell({name: facts["problem"] or facts["address"] for name, facts in processes.items()}, as_json=False)
