"""Generate the reference pages of the documentation. MkDocs calls `on_files` of this module.

The pages come from the code, so they need no file in the repository: the command line from the Typer application, the
HTTP API from the OpenAPI document, the settings and options from the fields of the configs.
"""

import inspect
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any, get_args

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from protodcs import ProtoDCSConfig, StreamDCSConfig, methods
from protodcs import errors as protodcs_errors
from protodcs.cli import app
from protodcs.discovery import DiscoveryConfig
from protodcs.methods.scored import ScoredMethod
from protodcs.serve.access.problems import FIXES, RETRYABLE, TYPES
from protodcs.serve.api.app import RESOURCES, RULES
from protodcs.serve.api.openapi import common_problems, describe
from protodcs.serve.settings import ServeConfig

# The settings that most services change. The settings page shows them first and folds the others.
COMMON_SETTINGS = (
    "store", "encoder", "device", "host", "port", "address", "keys", "max_loaded_streams", "rate", "streams",
    "tls_certificate", "tls_key", "audit", "metrics_port", "log_format", "log_level",
)  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those in the folder."""
    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files


# The command line.


def command_line() -> str:
    """Return the page of all commands."""
    introduction = """# Command line

Every command prints its help with `--help`. With `--json`, a command prints one JSON object for scripts. Results go to
standard output; progress, warnings and errors go to standard error. The exit status is 0 for success, 1 for an error
that the message explains, 2 for a wrong option, and 130 after Ctrl-C.
"""
    command = typer.main.get_command(app)
    return introduction + "".join(_commands(command, "protodcs"))


def _commands(command: Any, name: str) -> Iterator[str]:
    """Yield a section for each command below this one."""
    children = getattr(command, "commands", None)
    if children is None:
        yield _command(command, name)
        return
    for child in sorted(children):
        yield from _commands(children[child], f"{name} {child}")


def _command(command: Any, name: str) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    usage = " ".join([name, *(_placeholder(argument) for argument in arguments), *(["[OPTIONS]"] if options else [])])
    text = f"\n## {name}\n\n{inspect.cleandoc(command.help or '')}\n\n```text\n{usage}\n```\n"
    if arguments:
        text += "\n| argument | meaning |\n|---|---|\n"
        text += "".join(f"| `{_placeholder(one)}` | {_cell(one.help or '')} |\n" for one in arguments)
    if options:
        text += "\n| option | default | meaning |\n|---|---|---|\n"
        text += "".join(f"| {_names(one)} | {_default(one)} | {_cell(one.help or '')} |\n" for one in options)
    return text


def _placeholder(argument: Any) -> str:
    name = (argument.metavar or argument.name).upper()
    return f"{name}..." if argument.nargs == -1 else name


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if option.default in (None, False) or callable(option.default):
        return ""
    return f"`{option.default}`"


# The HTTP API.


def http_api() -> str:
    """Return the page of all routes."""
    introduction = """# HTTP API

This page lists the routes of the service. A running service has the same list with all schemas at `/docs`, which works
offline, and as an OpenAPI document at `/openapi.json`. [Errors](errors.md) lists the error codes. [Run the
service](../how-to/serve.md) explains idempotency keys, order and durability.
"""
    document = _openapi()
    roles = {(method, path.replace(":path}", "}")): rule.role for method, path, rule in RULES}
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            role = roles.get((method.upper(), path))
            group = (operation.get("tags") or [_group(path)])[0]
            groups.setdefault(group, []).append(_route(method.upper(), path, operation, role, document))
    return introduction + "".join(f"\n## {group.capitalize()}\n" + "".join(routes) for group, routes in groups.items())


def _openapi() -> dict[str, Any]:
    from fastapi import FastAPI

    api = FastAPI(title="ProtoDCS", openapi_url=None)
    for resource in RESOURCES:
        api.include_router(resource, responses=common_problems())
    describe(api, RULES)
    return api.openapi()


def _group(path: str) -> str:
    """Return the resource that a path belongs to."""
    parts = [part for part in path.split("/") if part and not part.startswith("{")]
    return parts[-1] if parts[:2] != ["v1", "streams"] or len(parts) == 2 else parts[2]


def _route(method: str, path: str, operation: dict[str, Any], role: str | None, document: dict[str, Any]) -> str:
    text = f"\n### `{method} {path}`\n\n{operation.get('description') or operation.get('summary', '')}\n\n"
    text += f"Role: {f'`{role}`' if role else 'none'}. Success: {', '.join(_successes(operation))}.\n"
    rows = [
        f"| `{parameter['name']}` | {parameter['in']} | {_type(parameter.get('schema', {}))} | "
        f"{_cell(parameter.get('description', ''))} |\n"
        for parameter in operation.get("parameters", [])
        if parameter["in"] != "path" or parameter.get("description")
    ]
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = _resolved(content.get("schema", {}), document)
        fields = schema.get("properties", {})
        if not fields:
            rows.append(f"| body | `{media}` | {_type(schema)} | {_cell(schema.get('description', ''))} |\n")
        needed = schema.get("required", [])
        rows += [
            f"| `{name}`{' (required)' if name in needed else ''} | `{media}` | {_type(field)} | "
            f"{_cell(field.get('description', ''))} |\n"
            for name, field in fields.items()
        ]
    if rows:
        text += "\n| name | in | type | meaning |\n|---|---|---|---|\n" + "".join(rows)
    return text


def _successes(operation: dict[str, Any]) -> Iterator[str]:
    for status in operation["responses"]:
        if str(status).startswith("2"):
            yield str(status)


def _resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        found: dict[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return found
    return schema


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


# Errors.


def errors() -> str:
    """Return the page of all errors."""
    text = """# Errors

## Python

All errors of this package inherit from `ProtoDCSError`. Each also inherits the built-in exception that you would
expect, such as `ValueError`. A message states the problem, the given value and a fix.

| error | also a | meaning |
|---|---|---|
"""
    for name, error in vars(protodcs_errors).items():
        if inspect.isclass(error) and issubclass(error, protodcs_errors.ProtoDCSError):
            bases = [base.__name__ for base in error.__bases__ if base is not protodcs_errors.ProtoDCSError]
            summary = inspect.getdoc(error).splitlines()[0]
            text += f"| `{name}` | {', '.join(f'`{base}`' for base in bases)} | {_cell(summary)} |\n"
    text += """
## Service

The service responds with problem documents (RFC 9457, `application/problem+json`). Rely on `code`, which does not
change between versions. `detail` is for people. `instance` ends with the request id, which is also in the log. Retry
only where the last column says so; the [client](../how-to/client.md#retries) does that for you. `protodcs reference
errors CODE` prints one of them.

| code | status | meaning | what to do | retry |
|---|---|---|---|---|
"""
    for code, kind in TYPES.items():
        retry = "yes" if kind.status in RETRYABLE else ""
        text += f"| `{code}` | {kind.status} | {kind.title} | {FIXES.get(code, '')} | {retry} |\n"
    return text


# Settings and options.


def service_settings() -> str:
    """Return the page of the settings of the service."""
    introduction = """# Service settings

`protodcs serve --config FILE` reads these settings from a YAML file. Environment variables override the file. Their
names are `PROTODCS_SETTING_` and the setting in capitals, such as `PROTODCS_SETTING_METRICS_PORT=9464`. Values with
several parts are YAML or JSON, such as `PROTODCS_SETTING_TENANTS='{acme: {rate: 5}}'`. Options of the command override
both. `protodcs reference settings` prints this list.

Durations are in seconds and sizes in bytes, unless the setting says otherwise.

## Common settings
"""
    fields = ServeConfig.model_fields
    common = {name: fields[name] for name in COMMON_SETTINGS}
    others = {name: field for name, field in fields.items() if name not in common and not _nested(field)}
    text = introduction + _settings(common)
    text += "\n## Advanced settings\n\n" + _folded("All other settings", _settings(others))
    for name, field in fields.items():
        if kind := _nested(field):
            text += f"\n### {name}\n\n{field.description}\n\n"
            text += _folded(f"Settings of `{name}`", _settings(kind.model_fields))
    return text


def _nested(field: FieldInfo) -> type[BaseModel] | None:
    return type(field.default) if isinstance(field.default, BaseModel) else None


def _settings(fields: dict[str, FieldInfo]) -> str:
    rows = (f"| `{name}` | `{field.default}` | {_cell(field.description or '')} |\n" for name, field in fields.items())
    return "\n| setting | default | meaning |\n|---|---|---|\n" + "".join(rows)


def _folded(title: str, table: str) -> str:
    return f'??? note "{title}"\n' + "".join(f"    {line}\n" if line else "\n" for line in table.splitlines())


def configuration() -> str:
    """Return the page of the options of the methods."""
    introduction = """# Method options

Each method has a config. A config is immutable and validated. The state of an engine contains all of it. The defaults
of `StreamDCSConfig` are the recommended settings. The defaults of `ProtoDCSConfig` are those of its preset `working`.

``` { .python .notest }
from protodcs import ProtoDCSConfig, StreamDCSConfig

StreamDCSConfig()  # recommended
StreamDCSConfig(target_false_reject=0.02)  # one option changed
ProtoDCSConfig(cache_size=3)  # the preset `working` with one option changed
ProtoDCSConfig.preset("paper")  # the letter of the paper
```

[Set a false-reject target](../how-to/false-reject-target.md) explains the option that most people change.
"""
    paper = """
If the paper allows two readings, both are options, so that you can run and compare them. A preset names some of them:

| preset | what it sets | why |
|---|---|---|
| `working` (the default) | `evolution_gate="entropy"`, `evolution_prior=1` | as in DPE: text prototypes evolve |
| `paper` | `evolution_gate="aleatoric"`, `evolution_prior=0` | as printed: the gate cannot open |

Give a preset as the option `preset`: in a grid (`options: {preset: paper}`), in `methods.create("protodcs", prototypes,
preset="paper")`, in the `config` of `POST /v1/streams`, or with `protodcs streams create --option preset=paper`.
Options beside it replace its settings. The state of an engine holds the settings, not the name of a preset.
"""
    return (
        introduction
        + "\n## StreamDCS\n" + _options(StreamDCSConfig)
        + "\n## ProtoDCS\n" + paper + _options(ProtoDCSConfig)
        + "".join(_peer(name) for name in methods.names() if name not in ("streamdcs", "protodcs"))
        + "\n## Discovery\n" + _options(DiscoveryConfig)
    )  # fmt: skip


def _peer(name: str) -> str:
    """Return the section of another method over features."""
    method = methods.REGISTER[name]
    fields = method.config_type.model_fields
    about = f"`protodcs.methods.create({name!r}, prototypes, classes)`. {(method.__doc__ or '').splitlines()[0]}"
    decides = issubclass(method, ScoredMethod)
    if not decides and "threshold" in fields and fields["threshold"].default is None:
        about += '\n\n**It never answers "unknown" unless you set `threshold`.** By default, every image gets a class.'
    return f"\n## {name}\n\n{about}\n{_options(method.config_type)}"


def _options(config: type[BaseModel]) -> str:
    rows = (
        f"| `{name}` | `{field.default}` | {_range(field)} | {_cell(field.description or '')} |\n"
        for name, field in config.model_fields.items()
    )
    return "\n| option | default | range | meaning |\n|---|---|---|---|\n" + "".join(rows)


def _range(field: FieldInfo) -> str:
    """Return the values that a field accepts."""
    choices = [choice for choice in get_args(field.annotation) if choice is not NoneType]
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(f"`{choice}`" for choice in choices)
    if field.annotation is bool:
        return "`True`, `False`"
    limits = {kind: getattr(rule, kind) for rule in field.metadata for kind in _LIMITS if hasattr(rule, kind)}
    low = f"[{limits['ge']:g}" if "ge" in limits else f"({limits['gt']:g}" if "gt" in limits else "("
    high = f"{limits['le']:g}]" if "le" in limits else f"{limits['lt']:g})" if "lt" in limits else ")"
    return f"{low}, {high}" if limits else ""


_LIMITS = ("ge", "gt", "le", "lt")


def _cell(text: str) -> str:
    """Return a text that fits into one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {
    "reference/cli.md": command_line,
    "reference/http.md": http_api,
    "reference/errors.md": errors,
    "reference/settings.md": service_settings,
    "reference/configuration.md": configuration,
}
