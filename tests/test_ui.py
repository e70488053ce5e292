"""The web UI: its files as the service sends them, its static checks, and a real browser before a real service."""

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from protodcs.core.streamdcs.constants import SKEW
from protodcs.core.streamdcs.threshold import Widths, fit_mixture
from protodcs.ui import files
from test_service_app import served

CHECKS = Path(__file__).parent / "ui"
UI = Path(__file__).parent.parent / "src" / "protodcs" / "ui"
CHROMIUM = os.environ.get("PROTODCS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
# Transferred bytes of all files. The largest page may load 150 kB.
MOST_BYTES = 150_000


async def get(path, **headers):
    """The response of a service to a browser."""
    async with served() as service:
        return await service.client.get(path, headers=headers)


async def test_the_root_leads_to_the_page_and_every_file_is_sent():
    assert (await get("/")).headers["location"] == "ui/"
    async with served() as service:
        for path, content in files().items():
            response = await service.client.get(f"/ui/{path}")
            assert (response.status_code, response.content) == (200, content), path
        page = await service.client.get("/ui/")
        assert page.content == files()["index.html"]


async def test_the_page_may_load_nothing_from_elsewhere_and_run_no_inline_code():
    headers = (await get("/ui/")).headers
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["trusted-types"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"


async def test_a_file_that_has_not_changed_is_not_sent_again():
    first = await get("/ui/main.js", **{"Accept-Encoding": "gzip"})
    assert (first.headers["content-encoding"], first.headers["cache-control"]) == ("gzip", "no-cache")
    again = await get("/ui/main.js", **{"Accept-Encoding": "gzip", "If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = await get("/ui/main.js", **{"Accept-Encoding": "identity", "If-None-Match": first.headers["etag"]})
    assert plain.status_code == 200


@pytest.mark.parametrize(
    "path", ["nothing.js", "../__init__.py", "%2e%2e/version.py", "__init__.py", "vendor/preact.d.ts"]
)
async def test_no_other_file_can_be_read(path):
    assert (await get(f"/ui/{path}")).status_code == 404


def test_all_files_together_are_small():
    sizes = {path: len(gzip.compress(content)) for path, content in files().items() if not path.endswith(".md")}
    assert sum(sizes.values()) <= MOST_BYTES, sizes


def test_the_libraries_are_those_of_the_notices():
    rows = re.findall(r"^\| (\S+) \| .* \| ([0-9a-f]{64}) \|", (UI / "vendor" / "NOTICES.md").read_text(), re.MULTILINE)
    hashes = {name: hashlib.sha256((UI / "vendor" / name).read_bytes()).hexdigest() for name, _ in rows}
    assert hashes == dict(rows)
    assert {*hashes} == {path.name for path in (UI / "vendor").iterdir() if path.suffix in (".js", ".css")}


def npm_packages():
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if not (CHECKS / "node_modules").is_dir():
        pytest.skip("the checks of the UI are not installed: run npm install --no-package-lock in tests/ui")


def run_node(*command, **environment):
    done = subprocess.run(
        command, cwd=CHECKS, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-10_000:]}\n{done.stderr[-5_000:]}"
    return done.stdout


@pytest.mark.parametrize("check", ["types", "lint", "unit"])
def test_the_scripts_pass_their(check):
    npm_packages()
    run_node("npm", "run", "--silent", check)


def test_the_browser_fits_the_same_groups_as_the_engine():
    npm_packages()
    rng = np.random.default_rng(5)
    scores = np.concatenate([rng.normal(1.0, 1.2, 300), rng.normal(-4.0, 0.8, 90)])
    start = (scores < -1.5).astype(np.float64)
    script = (
        f"import {{ fitGroups }} from {json.dumps(str(UI / 'logic' / 'groups.js'))};"
        f"console.log(JSON.stringify(fitGroups({scores.tolist()}, {start.tolist()})));"
    )
    fitted = json.loads(run_node("node", "--input-type=module", "--eval", script))
    expected = fit_mixture(scores, start, Widths(2.0 / (1.0 + SKEW) * scores.std(), 0.0))
    for name in ("share", "mode", "width", "mean", "deviation"):
        assert fitted[name] == pytest.approx(getattr(expected, name), rel=1e-6), name


@pytest.mark.parametrize("scenario", sorted(file.name for file in (CHECKS / "browser").glob("*.test.js")))
def test_in_a_browser(scenario):
    npm_packages()
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    run_node("node", "--test", f"browser/{scenario}", PROTODCS_CHROMIUM=CHROMIUM, PROTODCS_PYTHON=sys.executable)
