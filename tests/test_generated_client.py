"""A client that openapi-python-client generates from the OpenAPI document, as docs/how-to/client.md describes it."""

import json
import os
import subprocess
import sys
import venv

import httpx
import pytest

from protodcs.serve.access.keys import create_key
from service.rig import Service

# The generator skips an operation if all of its content is of a kind that it does not know.
_SKIPPED = {"/v1/streams/{stream}/observe:stream"}

_PROGRAM = """
import sys
from protodcs_api import AuthenticatedClient
from protodcs_api.api.observations import observe_v1_streams_stream_observe_post as observe
from protodcs_api.api.streams import create_v1_streams_post as create, status_v1_streams_stream_get as status
from protodcs_api.models import NewStream, ObserveV1StreamsStreamObservePostJsonFeatures as Features, Problem

client = AuthenticatedClient(base_url=sys.argv[1], token=sys.argv[2])
rows = [[float(i == j) for j in range(16)] for i in range(10)]
print(create.sync(client=client, body=NewStream(id="s", prototypes=rows)).id)
seen = observe.sync("s", client=client, body=Features(features=rows[:3]), idempotency_key="a")
print([decision.position for decision in seen.decisions])
print(status.sync("s", client=client).sequence)
refused = status.sync("none", client=client)
print(isinstance(refused, Problem) and refused.code)
"""


@pytest.mark.long
def test_a_generated_client_type_checks_and_talks_to_the_service(tmp_path):
    # Apart from our packages: the generator wants other versions of some.
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "openapi-python-client"], check=True)
    keys = tmp_path / "keys.json"
    token = create_key(keys, "acme", "admin")[1]
    with Service(tmp_path, store=f"sqlite:{tmp_path / 'streams'}", keys=str(keys), log_format="off") as service:
        described = httpx.get(f"{service.base_url}/openapi.json", headers={"Authorization": f"Bearer {token}"}).json()
        (tmp_path / "openapi.json").write_text(json.dumps(described))
        generate = f"{python.parent}/openapi-python-client generate --path openapi.json --meta none"
        environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": ""}
        subprocess.run([*generate.split(), "--output-path", "protodcs_api"], cwd=tmp_path, env=environment, check=True)
        talk = [python, "-c", _PROGRAM, service.base_url, token]
        printed = subprocess.run(talk, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == ["s", "[0, 1, 2]", "3", "stream_not_found"]

    modules = [file for file in (tmp_path / "protodcs_api" / "api").glob("*/*.py") if file.name != "__init__.py"]
    assert len(modules) == sum(len(path) for name, path in described["paths"].items() if name not in _SKIPPED)
    check = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", os.devnull, "--python-executable", str(python)]
    checked = subprocess.run([*check, "protodcs_api"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    # This file is the same in every client.
    problems = [line for line in checked.stdout.splitlines() if not line.startswith("protodcs_api/client.py:")]
    assert [line for line in problems if ": error:" in line] == []
    assert "checked" in checked.stdout
