"""The files for Kubernetes, as kubectl builds them, against its schemas and against wanrun and its server."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

from helpers.deploy import DEPLOY, dockerfile, unknown
from wancli.serve import KEYS
from wanfleet.uploads import StoreError
from wanhub.address import UnreachableError
from wanrun.errors import ArtifactError, ClusterError, NoSpaceError, UsageError, WanError
from wanserve.service import ROUTES

pytestmark = pytest.mark.slow

FOLDER: Final = DEPLOY / "kubernetes"
KUBECTL: Final = Path(sys.executable).with_name("kubectl")
VERSION: Final = "1.36"
"""The first version of Kubernetes whose image volumes are stable."""

OVERLAYS: Final = ("job-gpu", "job-tpu", "server-gpu", "server-tpu")
CHIPS: Final = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}

Document = dict[str, Any]


def build(folder: Path) -> list[Document]:
    """What ``kubectl apply -k`` would send."""
    done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def built() -> dict[str, list[Document]]:
    return {name: build(FOLDER / name) for name in OVERLAYS}


@pytest.fixture(params=OVERLAYS)
def name(request: pytest.FixtureRequest) -> str:
    """Of an overlay."""
    return str(request.param)


@pytest.fixture
def documents(built: dict[str, list[Document]], name: str) -> list[Document]:
    return built[name]


def the(documents: list[Document], kind: str) -> Document:
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


def workload(documents: list[Document]) -> Document:
    (found,) = (document for document in documents if document["kind"] in ("Job", "Deployment"))
    return found


def pod_of(documents: list[Document]) -> Document:
    pod: Document = workload(documents)["spec"]["template"]["spec"]
    return pod


def container_of(documents: list[Document]) -> Document:
    (container,) = pod_of(documents)["containers"]
    assert container["name"] == "wanrun"
    return dict(container)


def strings(value: Any) -> Iterator[str]:
    """All texts and numbers in a document."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        for item in value:
            yield from strings(item)
    else:
        yield str(value)


def check(document: Document, version: str = VERSION) -> None:
    assert kubernetes_validate.validate(document, version, strict=True) == version


def test_documents_follow_the_schema(documents: list[Document], name: str) -> None:
    kinds = {"job": {"ConfigMap", "Job"}, "server": {"Deployment", "Service"}}[name.partition("-")[0]]
    assert {document["kind"] for document in documents} == {*kinds, "PersistentVolumeClaim"}
    for document in documents:
        check(document)


def test_the_schema_is_strict_and_knows_image_volumes(built: dict[str, list[Document]]) -> None:
    for path in (
        "spec",
        "spec/template/spec",
        "spec/template/spec/containers/0",
        "image",
        "spec/podFailurePolicy",
    ):
        job = copy.deepcopy(the(built["job-gpu"], "Job"))
        place: Any = job
        if path == "image":
            volumes = job["spec"]["template"]["spec"]["volumes"]
            (place,) = (volume["image"] for volume in volumes if "image" in volume)
        else:
            for step in path.split("/"):
                place = place[int(step) if step.isdigit() else step]
        place["readOnlyy"] = True
        with pytest.raises(kubernetes_validate.ValidationError, match="readOnlyy"):
            check(job)
    with pytest.raises(kubernetes_validate.ValidationError, match="image"):
        check(the(built["job-gpu"], "Job"), "1.30")


def test_every_file_is_used(built: dict[str, list[Document]]) -> None:
    """What a kustomization names has to exist, which kubectl has seen; and nothing else lies there."""
    named = set()
    for file in FOLDER.rglob("kustomization.yaml"):
        made = yaml.safe_load(file.read_text(encoding="utf-8"))
        names = [*made.get("resources", ()), *(patch["path"] for patch in made.get("patches", ()))]
        names += [name for one in made.get("configMapGenerator", ()) for name in one["files"]]
        named |= {(file.parent / name).resolve() for name in (*names, *made.get("components", ()))}
        named |= {file}
    used = {path for path in named if path.is_file()}
    assert used == {path for path in FOLDER.rglob("*") if path.is_file()}
    assert {path for path in named if path.is_dir()} == {
        FOLDER / name for name in ("job", "server", "pod", *CHIPS)
    }


def test_settings_are_in_one_place(tmp_path: Path) -> None:
    """New settings reach every document that needs them, and nothing of the old ones is left."""
    copied = shutil.copytree(FOLDER, tmp_path / "kubernetes")
    file = copied / "pod" / "settings.yaml"
    old = yaml.safe_load(file.read_text(encoding="utf-8"))["data"]
    new = {"runtime": "example.org/a@sha256:" + "0" * 64, "artifact": "example.org:5000/b:c", "shards": "37"}
    assert old.keys() == new.keys()
    text = file.read_text(encoding="utf-8")
    for key, value in new.items():
        text = text.replace(old[key], value)
    file.write_text(text, encoding="utf-8")
    for name in ("job-gpu", "server-tpu"):
        documents = build(copied / name)
        image, reference = new["runtime"], new["artifact"]
        assert container_of(documents)["image"] == image
        assert [v["image"]["reference"] for v in pod_of(documents)["volumes"] if "image" in v] == [reference]
        assert not {old["runtime"], old["artifact"]} & set(strings(documents))
        if name == "job-gpu":
            assert workload(documents)["spec"]["completions"] == 37
            assert {"name": "JOB_COMPLETIONS", "value": "37"} in container_of(documents)["env"]
            arguments = container_of(documents)["args"]
            assert arguments[arguments.index("--shard") + 1] == "auto"
    everything = "".join(path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.yaml"))
    assert everything.count(old["runtime"]) == everything.count(old["artifact"]) == 1


def test_pods_have_few_rights(documents: list[Document]) -> None:
    pod, container = pod_of(documents), container_of(documents)
    user = pod["securityContext"]
    assert user["runAsNonRoot"] and user["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {user[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {10001}
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_pods_fit_the_image(documents: list[Document]) -> None:
    """The user, the folders that can be written and the place of the artifact are those of the Dockerfile."""
    pod, container = pod_of(documents), container_of(documents)
    assert set(dockerfile("USER")) == {str(pod["securityContext"]["runAsUser"])}
    environment = dict(re.findall(r"(\w+)=(\S+)", " ".join(dockerfile("ENV"))))
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == volumes.keys() and len(mounts) == len(volumes)
    artifact = mounts[environment["WANRUN_ARTIFACT"]]
    assert artifact["readOnly"] and "image" in volumes[artifact["name"]]
    assert "emptyDir" in volumes[mounts[environment["XDG_CACHE_HOME"]]["name"]]
    assert "emptyDir" in volumes[mounts["/tmp"]["name"]]
    places = [word.split("=")[-1] for word in container["args"]]
    assert environment["WANRUN_ARTIFACT"] in places
    for path in (place for place in places if place.startswith("/")):
        assert any(path == mount or path.startswith(f"{mount}/") for mount in mounts), path


def test_what_a_pod_names_is_there(documents: list[Document], name: str) -> None:
    """Claims and prompts are documents of the same folder; the server's secret is one that the page makes."""
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    for volume in pod_of(documents)["volumes"]:
        if "persistentVolumeClaim" in volume:
            assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in names
    page = " ".join((DEPLOY / "README.md").read_text(encoding="utf-8").split())
    for variable in container_of(documents).get("env", ()):
        if "value" in variable:
            continue
        secret = variable["valueFrom"]["secretKeyRef"]
        assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in page


def test_the_job_and_the_server_may_run_side_by_side(built: dict[str, list[Document]]) -> None:
    job, server = (
        {(d["kind"], d["metadata"]["name"]) for d in built[name]} for name in ("job-gpu", "server-gpu")
    )
    assert not job & server


def test_pods_come_to_their_chip(documents: list[Document], name: str) -> None:
    chip, (other,) = CHIPS[name[-3:]], set(CHIPS.values()) - {CHIPS[name[-3:]]}
    pod, resources = pod_of(documents), container_of(documents)["resources"]
    assert resources["limits"][chip] == 1 and resources["requests"].keys() == {"cpu", "memory"}
    assert "memory" in resources["limits"]
    assert pod["tolerations"] == [{"key": chip, "operator": "Exists", "effect": "NoSchedule"}]
    assert other not in set(strings(documents))
    selector = pod.get("nodeSelector", {})
    if name.endswith("gpu"):
        assert selector == {}
    else:
        assert selector.keys() == {f"cloud.google.com/gke-tpu-{what}" for what in ("accelerator", "topology")}
        chips = 1
        for length in selector["cloud.google.com/gke-tpu-topology"].split("x"):
            chips *= int(length)
        assert chips == resources["limits"][chip]


def test_options_exist(documents: list[Document]) -> None:
    assert unknown(container_of(documents)["args"]) == set()
    assert unknown([*container_of(documents)["args"], "--sharp=3"]) == {"--sharp"}


@pytest.mark.parametrize("name", ["job-gpu", "job-tpu"])
def test_the_job_is_one_that_the_api_takes(documents: list[Document]) -> None:
    """What the API server asks of a Job beside its schema."""
    spec = workload(documents)["spec"]
    assert spec["completionMode"] == "Indexed" and "backoffLimit" not in spec
    assert 1 <= spec["parallelism"] <= spec["completions"]
    assert spec["backoffLimitPerIndex"] >= 1 and spec["ttlSecondsAfterFinished"] > 3600
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_exit_codes_that_trying_again_does_not_help(built: dict[str, list[Document]]) -> None:
    spec = workload(built["job-gpu"])["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"] for rule in rules if "onExitCodes" in rule}
    assert {one["containerName"] for one in codes.values()} == {"wanrun"}
    assert {one["operator"] for one in codes.values()} == {"In"}
    values = {action: set(one["values"]) for action, one in codes.items()}
    assert values == {
        "FailJob": {NoSpaceError.exit_code},
        "FailIndex": {UsageError.exit_code, ArtifactError.exit_code},
    }
    again = {WanError.exit_code, ClusterError.exit_code, UnreachableError.exit_code, StoreError.exit_code}
    again |= {137, 143}
    assert not again & set().union(*values.values())
    assert rules[0]["action"] == "Ignore" and rules[0]["onPodConditions"][0]["type"] == "DisruptionTarget"


@pytest.mark.parametrize("name", ["server-gpu", "server-tpu"])
def test_probes_ask_routes_that_need_no_key(documents: list[Document]) -> None:
    without_key = {f"{route.method} {route.path}" for route in ROUTES if not route.needs_key}
    container = container_of(documents)
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    probes = {key: container[key]["httpGet"] for key in ("startupProbe", "readinessProbe", "livenessProbe")}
    for probe in probes.values():
        assert f"GET {probe['path']}" in without_key
        assert f"--port={ports[probe['port']]}" in container["args"]
    assert probes["livenessProbe"]["path"] != probes["readinessProbe"]["path"]
    (port,) = the(documents, "Service")["spec"]["ports"]
    assert port["targetPort"] in ports
    assert "--host=0.0.0.0" in container["args"]  # on the loopback device no probe would come through
    assert [variable["name"] for variable in container["env"]] == [KEYS]


def test_the_server_has_its_time(built: dict[str, list[Document]]) -> None:
    deployment, pod = workload(built["server-gpu"]), pod_of(built["server-gpu"])
    (grace,) = (
        float(word.split("=")[1]) for word in container_of(built["server-gpu"])["args"] if "--grace" in word
    )
    assert pod["terminationGracePeriodSeconds"] >= grace + 15
    startup = container_of(built["server-gpu"])["startupProbe"]
    assert (
        deployment["spec"]["progressDeadlineSeconds"] > startup["periodSeconds"] * startup["failureThreshold"]
    )
    assert deployment["spec"]["replicas"] == 1 and deployment["spec"]["strategy"] == {"type": "Recreate"}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        the(built["server-gpu"], "Service")["spec"]["selector"],
    ):
        assert selector and selector.items() <= labels.items()
    assert pod_of(built["job-gpu"])["terminationGracePeriodSeconds"] >= 10
