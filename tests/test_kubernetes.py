"""The manifests for Kubernetes agree with its schemas, with the settings of the service, and with each other."""

from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict

from protodcs.serve.api.health import router
from protodcs.serve.settings import ServeConfig

DEPLOY = Path(__file__).parent.parent / "deploy"
KUSTOMIZATION = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
RESOURCES = [found for file in KUSTOMIZATION["resources"] for found in yaml.safe_load_all((DEPLOY / file).read_text())]
SETTINGS = yaml.safe_load((DEPLOY / "kubernetes" / "serve.yaml").read_text())
OLDEST_VERSION = "1.30.0"


def name_of(resource):
    return f"{resource['kind']} {resource['metadata']['name']}"


def resources(kind):
    return {found["metadata"]["name"]: found for found in RESOURCES if found["kind"] == kind}


def pods():
    """Return the pods of the deployments by name."""
    return {name: found["spec"]["template"] for name, found in resources("Deployment").items()}


def containers(pod):
    return pod["spec"].get("initContainers", []) + pod["spec"]["containers"]


# Kubernetes has no schemas for resources of operators.
@pytest.mark.parametrize("resource", [found for found in RESOURCES if found["kind"] != "Cluster"], ids=name_of)
def test_a_manifest_agrees_with_the_schema(resource):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for version in (OLDEST_VERSION, kubernetes.latest_version()):
        kubernetes.validate(resource, version, strict=True)


def test_the_schemas_reject_a_field_that_is_not_there():
    kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    budget = deepcopy(resources("PodDisruptionBudget")["protodcs"])
    budget["spec"]["maxUnavailabel"] = 1
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(budget, OLDEST_VERSION, strict=True)


def test_every_file_is_part_of_the_deployment():
    generated = [file for each in KUSTOMIZATION["configMapGenerator"] for file in each["files"]]
    named = {*KUSTOMIZATION["resources"], *generated}
    assert {f"kubernetes/{file.name}" for file in (DEPLOY / "kubernetes").iterdir()} <= named
    assert all((DEPLOY / file).is_file() for file in named)


def test_the_files_say_for_which_version_they_are_and_that_they_were_not_run():
    minor = OLDEST_VERSION.rpartition(".")[0]
    assert f"Kubernetes {minor} or later. Schema-checked, not run." in (DEPLOY / "kustomization.yaml").read_text()


@pytest.mark.parametrize("name", pods())
def test_containers_are_confined(name):
    pod = pods()[name]
    assert pod["spec"]["automountServiceAccountToken"] is False
    # Variables such as PROTODCS_PORT, which Kubernetes makes of services, reach no process.
    assert pod["spec"]["enableServiceLinks"] is False
    context = pod["spec"]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(pod):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]


def test_the_namespace_rejects_privileged_pods():
    labels = resources("Namespace")[KUSTOMIZATION["namespace"]]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_settings_are_those_of_the_service():
    config = ServeConfig(**SETTINGS, address="http://10.0.0.7:8000")
    assert config.is_shared
    (container,) = pods()["protodcs"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": config.port, "metrics": config.metrics_port}
    for variable in container["env"]:
        if variable["name"].startswith("PROTODCS_"):
            assert variable["name"].removeprefix("PROTODCS_SETTING_").lower() in ServeConfig.model_fields
    assert pods()["protodcs"]["spec"]["terminationGracePeriodSeconds"] > config.drain_seconds


def test_the_database_is_the_one_of_the_operator():
    (name,) = resources("Cluster")
    database = resources("Cluster")[name]["spec"]
    url = conninfo_to_dict(SETTINGS["store"])
    assert url["host"] == f"{name}-rw"
    assert {"database": url["dbname"], "owner": url["user"]} == database["bootstrap"]["initdb"]
    assert "password" not in url
    assert url["sslmode"] == "verify-full"
    # `store_replicas` is the number of standbys that have a write before it is acknowledged.
    synchronous = database["postgresql"]["synchronous"]
    assert synchronous["number"] == SETTINGS["store_replicas"] < database["instances"]
    assert synchronous["dataDurability"] == "required"
    secrets = {volume["secret"]["secretName"] for volume in pods()["protodcs"]["spec"]["volumes"] if "secret" in volume}
    assert {f"{name}-app", f"{name}-ca"} < secrets


def test_the_files_that_the_settings_name_are_mounted():
    (container,) = pods()["protodcs"]["spec"]["containers"]
    (initial,) = pods()["protodcs"]["spec"]["initContainers"]
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    url = conninfo_to_dict(SETTINGS["store"])
    for file in (SETTINGS["keys"], url["sslrootcert"], url["passfile"]):
        assert str(Path(file).parent) in mounted
    # The library of PostgreSQL ignores a file with a password that others can read.
    program, *_, mode, source, target = initial["command"]
    assert (program, mode, target) == ("install", "0600", url["passfile"])
    read = {mount["mountPath"]: mount["name"] for mount in initial["volumeMounts"]}
    assert mounted[str(Path(target).parent)] == read[str(Path(target).parent)]
    (volume,) = [v for v in pods()["protodcs"]["spec"]["volumes"] if v["name"] == read[str(Path(source).parent)]]
    assert Path(source).name in {item["path"] for item in volume["secret"]["items"]}


def test_what_a_pod_mounts_is_made_by_a_generator_the_operator_or_a_step_in_the_file():
    steps = (DEPLOY / "kustomization.yaml").read_text()
    generated = {
        found["name"]: {Path(file).name for file in found["files"]} for found in KUSTOMIZATION["configMapGenerator"]
    }
    (database,) = resources("Cluster")
    for pod in pods().values():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for container in containers(pod):
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in generated
            if "secret" in volume:
                name = volume["secret"]["secretName"]
                assert name.startswith(database) or f" {name} --" in steps


def test_probes_ask_routes_of_the_service():
    (container,) = pods()["protodcs"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[kind]["httpGet"]
        assert asked["path"] in {route.path for route in router.routes}
        assert asked["port"] in ports
    assert container["readinessProbe"]["httpGet"]["path"] == "/v1/ready"


def test_one_pod_at_a_time_is_disrupted():
    for name, pod in pods().items():
        budget = resources("PodDisruptionBudget")[name]["spec"]
        assert budget["maxUnavailable"] == 1
        assert budget["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_services_reach_ports_of_pods():
    for service in resources("Service").values():
        (pod,) = [
            pod for pod in pods().values() if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        open_ports = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= open_ports


def test_the_gateway_finds_the_processes():
    (container,) = pods()["protodcs-gateway"]["spec"]["containers"]
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    configuration = (DEPLOY / "haproxy" / "haproxy.cfg").read_text()
    assert all(f"presetenv {name} " in configuration for name in given)
    host, _, port = given["GATEWAY_SERVER"].partition(":")
    service, namespace, *_ = host.split(".")
    assert namespace == KUSTOMIZATION["namespace"]
    found = resources("Service")[service]["spec"]
    # The name has one address per process, those that are not ready included: the gateway checks them itself.
    assert found["clusterIP"] == "None"
    assert found["publishNotReadyAddresses"] is True
    assert int(port) == ServeConfig(**SETTINGS, address="http://10.0.0.7:8000").port
    assert int(given["GATEWAY_PROCESSES"]) > resources("Deployment")["protodcs"]["spec"]["replicas"]


def test_nobody_reaches_a_pod_unless_a_policy_allows_it():
    policies = resources("NetworkPolicy")
    everyone = policies.pop("protodcs-default")["spec"]
    assert everyone["podSelector"] == {}
    assert set(everyone["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in everyone
    (database,) = resources("Cluster")
    labels = {name: pod["metadata"]["labels"] for name, pod in pods().items()}
    labels[database] = {"cnpg.io/cluster": database}
    assert {name: policy["spec"]["podSelector"]["matchLabels"] for name, policy in policies.items()} == labels
    for name, pod in pods().items():
        opened = {port["port"] for rule in policies[name]["spec"]["ingress"] for port in rule["ports"]}
        assert opened == {port["containerPort"] for each in pod["spec"]["containers"] for port in each["ports"]}
    # Only the gateway may be reached from everywhere.
    open_to_all = {
        name for name, policy in policies.items() if any("from" not in rule for rule in policy["spec"]["ingress"])
    }
    assert open_to_all == {"protodcs-gateway"}
