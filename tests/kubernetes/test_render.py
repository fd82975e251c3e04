"""`elastic kubernetes render`: its manifests are valid, minimal and complete."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import subprocess
import sys
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

import elastic
from elastic.domain.errors import EXIT_JOB_FAILED, EXIT_UNRECOVERABLE, FieldError
from elastic.launcher import cli
from elastic.launcher.kubernetes.controllers import KINDS, pod_template
from elastic.launcher.kubernetes.kustomize import build, name_of, parsed
from elastic.launcher.kubernetes.render import SEPARATE, manifests
from elastic.store.etcd.compatibility import ETCD_VERSION
from tests.kubernetes.jobs import certificate_names, printed, render
from tests.store.etcds import BINARY, DEPLOYED

kubernetes_validate = pytest.importorskip("kubernetes_validate")
VERSIONS = ("1.35.0", "1.36.0", "1.37.0")
OVERLAYS = ("base", "spot-pool", "shared-inference", "rdma", "local")
BASIC = ("--name", "demo", "--image", "r.example.com/train:1")
SCRIPT = ("-m", "examples.train_gpt", "--steps", "10")
FOLDERS = ("base", "claim", *(f"overlays/{name}" for name in OVERLAYS if name != "base"))
AGENT_CONTROLLERS = {"job": "Deployment", "statefulset": "StatefulSet"}
"""Controllers that upgrade agents one by one. The Jobs of a JobSet have no such upgrade."""
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


def component(pod: Object) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/component"])


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


FINAL = [EXIT_UNRECOVERABLE, EXIT_JOB_FAILED]


def fail_job_rule(spec: Object) -> Object:
    (rule,) = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    return dict(rule["onExitCodes"])


@pytest.mark.parametrize("part", ["coordinator", "agent"])
def test_a_jobset_ends_when_its_script_fails_and_not_when_a_pod_crashes(part: str) -> None:
    jobs = one(job(kind="jobset"), "JobSet", "demo")["spec"]["replicatedJobs"]
    (spec,) = [entry["template"]["spec"] for entry in jobs if entry["name"] == part]
    assert fail_job_rule(spec) == {"containerName": part, "operator": "In", "values": FINAL}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_lost_agent_is_replaced_at_once(overlay: str) -> None:
    """Not by the Job controller, which waits longer after each loss, for up to 10 minutes."""
    objects = job(overlay)
    agents = one(objects, "Deployment", "demo-agent")["spec"]
    assert agents["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert agents["template"]["spec"].get("restartPolicy", "Always") == "Always"
    assert one(objects, "StatefulSet", "demo-coordinator")
    assert [name_of(item)[1] for item in objects if item["kind"] == "Job"] == ["demo-end"]


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize(("kind", "controller"), AGENT_CONTROLLERS.items())
def test_an_upgrade_gives_a_new_node_time_to_join(overlay: str, kind: str, controller: str) -> None:
    """Loading torch and joining take 20 to 60 s after the readiness of the agent's pod."""
    spec = one(job(overlay, kind), controller, "demo-agent")["spec"]
    assert spec["minReadySeconds"] >= 60


def test_the_end_job_fails_with_the_training_and_outlives_its_machine() -> None:
    spec = one(job(), "Job", "demo-end")["spec"]
    assert fail_job_rule(spec) == {"containerName": "end", "operator": "In", "values": FINAL}
    assert spec["backoffLimit"] >= 1000 and spec["template"]["spec"]["restartPolicy"] == "Never"
    ignored = {"type": "DisruptionTarget", "status": "True"}
    assert spec["podFailurePolicy"]["rules"][0]["onPodConditions"] == [ignored]


def test_the_end_job_knows_coordinators_and_controllers() -> None:
    objects = job("spot-pool")
    (container,) = one(objects, "Job", "demo-end")["spec"]["template"]["spec"]["containers"]
    number = one(objects, "StatefulSet", "demo-coordinator")["spec"]["replicas"]
    pods_read = [f"--coordinator=demo-coordinator-{index}" for index in range(number)]
    last = ["deployment/demo-agent", "statefulset/demo-coordinator"]
    assert container["command"][4:] == [*pods_read, *last] and "args" not in container


def test_only_the_end_job_reaches_the_api_server() -> None:
    policies = [item for item in job("spot-pool") if item["kind"] == "NetworkPolicy"]
    (end,) = [item["spec"] for item in policies if item["metadata"]["name"] == "demo-end"]
    labels = {"app.kubernetes.io/component": "end", "app.kubernetes.io/instance": "demo"}
    assert labels.items() <= end["podSelector"]["matchLabels"].items()
    (rule,) = end["egress"]
    assert [port["port"] for port in rule["ports"]] == [443, 6443]
    blocks = [
        peer["ipBlock"]["cidr"]
        for item in policies
        if item["spec"] is not end
        for rule in item["spec"].get("egress", ())
        for peer in rule["to"]
        if "ipBlock" in peer
    ]
    assert blocks == ["169.254.0.0/16", "169.254.169.254/32"], "resolvers, metadata server"


@pytest.mark.parametrize("kind", ["statefulset", "jobset"])
def test_other_kinds_need_no_rights(kind: str) -> None:
    objects = job("spot-pool", kind)
    assert not {item["kind"] for item in objects} & {"Role", "RoleBinding", "Job", "Deployment"}
    assert not [name for _, name in map(name_of, objects) if name == "demo-end"]


def test_schemas_refuse_an_unknown_field() -> None:
    item = one(job(), "Deployment", "demo-agent")
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
        [kubectl, "kustomize", str(manifests() / folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    real = {name_of(item): sorted_lists(item) for item in parsed(done.stdout)}
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


# ---- identities ----


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_coordinators_and_snapshots_can_use_etcd(overlay: str) -> None:
    """Agents and Prometheus have no certificate of etcd's authority, and only members have the
    join token."""
    mounted = {component(pod): {v["secret"]["secretName"] for v in pod["spec"]["volumes"]
                                if "secret" in v} for pod in pods(job(overlay))}  # fmt: skip
    assert mounted == {
        "agent": {"demo-certs", "demo-token"},
        "coordinator": {"demo-certs", "demo-etcd-certs", "demo-token"},
        "etcd": {"demo-etcd-certs"},
        "snapshot": {"demo-etcd-certs"},
        "end": set(),
    }
    (monitor,) = printed("monitor", "--name", "demo")
    assert set(re.findall(r"demo-[a-z-]*certs", json.dumps(monitor))) == {"demo-scrape-certs"}
    for pod in pods(job(overlay)):
        (container,) = pod["spec"]["containers"]
        sources = [source["configMapRef"]["name"] for source in container.get("envFrom", ())]
        assert ("demo-store" in sources) == (component(pod) == "coordinator")


# ---- checkpoints ----


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_deleting_the_job_leaves_the_checkpoints(overlay: str, kind: str) -> None:
    """`kubectl delete -f` deletes what `render` prints; the claim is printed on its own."""
    objects = job(overlay, kind)
    claims = [name for kind, name in map(name_of, objects) if kind == "PersistentVolumeClaim"]
    assert claims == ["demo-snapshots"], "only that of etcd, which is of no use without the job"
    (claim,) = printed("claim", "--name", "demo")
    name = claim["metadata"]["name"]
    mounted = [
        v["persistentVolumeClaim"]["claimName"]
        for pod in pods(objects)
        for v in pod["spec"].get("volumes", ())
        if "persistentVolumeClaim" in v
    ]
    assert sorted(mounted) == [*2 * [name], *claims] and name == "demo-checkpoints"
    assert claim["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"


@pytest.mark.parametrize("version", VERSIONS)
def test_claims(version: str) -> None:
    (usual,) = printed("claim", "--name", "demo")
    assert usual["spec"]["accessModes"] == ["ReadWriteMany"]
    assert usual["spec"]["resources"]["requests"] == {"storage": "100Gi"}
    words = ("--namespace", "train", "--size", "2500MiB", "--storage-class", "fast")
    (own,) = printed("claim", "--name", "one", *words, "--access", "ReadWriteOnce")
    assert own["metadata"]["namespace"] == "train" and own["metadata"]["name"] == "one-checkpoints"
    assert own["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert own["spec"]["storageClassName"] == "fast"
    assert own["spec"]["resources"]["requests"]["storage"] == str(2500 << 20)
    for item in (usual, own):
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--name"),
        (["--name", "Demo"], "--name"),
        (["--name", "demo", "--size", "1MiB"], "--size"),
        (["--name", "demo", "--size", "lots"], "--size"),
        (["--name", "demo", "--access", "ReadOnlyMany"], "--access"),
        (["--name", "demo", "--storage-class", "A B"], "--storage-class"),
    ],
)
def test_wrong_claims_are_one_line(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["kubernetes", "claim", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and named in err


# ---- values ----


@pytest.mark.parametrize("kind", KINDS)
def test_no_placeholder_is_left(kind: str) -> None:
    objects = job(
        "spot-pool", kind, "--namespace", "train", "--nodes", "3:5", "--nproc-per-node", "2"
    )
    text = yaml.safe_dump_all(objects)
    rest = {name_of(item)[1].removeprefix("elastic") for item in build(manifests() / "base")}
    rest |= {name.removeprefix("elastic") for name in SEPARATE}
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
        own = container["name"] in ("agent", "coordinator")
        assert container.get("args") == (list(SCRIPT) if own else None)
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
    assert images["end"] == images["coordinator"] and images["agent"] == "r.example.com/train:1"


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


@pytest.mark.parametrize("kind", KINDS)
def test_coordinators_have_the_names_of_their_pods(kind: str) -> None:
    """In `elastic status` and in JSON logs, which else tell no coordinator from another."""
    (container,) = (
        pod["spec"]["containers"][0]
        for pod in pods(job("base", kind))
        if component(pod) == "coordinator"
    )
    assert "--name=$(POD_NAME)" in container["command"]
    (source,) = (entry["valueFrom"] for entry in container["env"] if entry["name"] == "POD_NAME")
    assert source == {"fieldRef": {"fieldPath": "metadata.name"}}


def test_sizes() -> None:
    objects = job("local", "job", "--gpus", "4", "--memory", "8GiB", "--cpus", "6", "--nodes", "4")
    item = one(objects, "Deployment", "demo-agent")
    spec = item["spec"]["template"]["spec"]
    resources = spec["containers"][0]["resources"]
    assert item["spec"]["replicas"] == 4
    assert resources["limits"]["nvidia.com/gpu"] == "4" and resources["requests"]["cpu"] == "6"
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == str(8 << 30)
    (shared,) = (
        v["emptyDir"] for v in spec["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"
    )
    assert shared["sizeLimit"] == str(4 << 30)
    assert one(objects, "ConfigMap", "demo-config")["data"]["PET_NPROC_PER_NODE"] == "4"


@pytest.mark.parametrize("kind", KINDS)
def test_no_coordinator_and_no_member_of_etcd_is_the_only_one_by_default(kind: str) -> None:
    objects = render(*BASIC, "--kind", kind, *SCRIPT)
    assert objects == job("base", kind) and etcd_of("base")["spec"]["replicas"] == 3
    endpoint = one(objects, "ConfigMap", "demo-config")["data"]["PET_RDZV_ENDPOINT"]
    assert len(endpoint.split(",")) == 3
    for pod in pods(objects):
        assert "nodeAffinity" not in pod["spec"].get("affinity", {})


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


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_has_no_anchors(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They confuse `diff` and `yq`."""
    words = ("--kind", kind, "--restore-etcd", "x.db", *SCRIPT)
    assert cli.main(["kubernetes", "render", *BASIC, *words]) == 0
    text = capsys.readouterr().out
    events = yaml.parse(text)
    assert not [event for event in events if getattr(event, "anchor", None)]


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
    (["--overlay", "spot-pool", "--overlay", "rdma"], "--overlay once"),
    (["--kind", "deployment"], "--kind"),
    (["--restore-etcd", "../x.db"], "--restore-etcd"),
    (["--domain", "rack"], "--domain"),
    (["--domain", "example.com/"], "--domain"),
    (["--queue", "Team A"], "--queue"),
    (["--env", "NAME"], "--env"),
    (["--env", "2X=1"], "--env"),
    (["--env", "PET_NO_SUCH_FLAG=1"], "PET_NO_SUCH_FLAG"),
    (
        ["--env", "PET_GRACE=200"],
        "patch terminationGracePeriodSeconds, and 10 s less in the "
        "variable PET_GRACE of the container agent in the Deployment elastic-agent",
    ),
    (["--env", "PET_DOMAIN=a"], "give --domain"),
    (
        ["--env", "POD_IP=10.0.0.1"],
        "the variable POD_IP of the container coordinator in the StatefulSet elastic-coordinator",
    ),
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
    assert len(pods(objects)) == (5 if kind == "job" else 4)
    for pod in pods(objects):
        spec = pod["spec"]
        assert (
            spec["automountServiceAccountToken"] is False
            and spec["serviceAccountName"] == f"demo-{'end' if component(pod) == 'end' else 'job'}"
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


def test_only_the_end_job_has_a_token() -> None:
    objects = job("spot-pool")
    (binding,) = [item for item in objects if item["kind"] == "RoleBinding"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "demo-end"}]
    assert not {item["kind"] for item in objects} & {"ClusterRole", "ClusterRoleBinding"}
    for account in (item for item in objects if item["kind"] == "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    for pod in pods(objects):
        assert ("serviceAccountToken" in str(pod["spec"])) == (component(pod) == "end")


def test_no_liveness_probe_kills_a_waiting_process() -> None:
    """Coordinators may wait for etcd, and agents for coordinators. A member of etcd is alive
    without a quorum and without room; tests/kubernetes/test_full_etcd.py asks a real one."""
    for pod in pods(job()):
        (container,) = pod["spec"]["containers"]
        if component(pod) in ("end", "snapshot"):  # nothing waits for them
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
    url = one(job(overlay), "ConfigMap", "demo-store")["data"]["PET_STORE"]
    members = range(etcd_of(overlay)["spec"]["replicas"])
    hosts = [f"demo-etcd-{index}.demo-etcd" for index in members]
    assert url == "etcd://" + ",".join(f"{host}:2379" for host in hosts)
    assert set(hosts) <= set(certificate_names("demo"))
    peers = flag_of(etcd_of(overlay), "--initial-cluster").split(",")
    assert peers == [f"{host.partition('.')[0]}=https://{host}:2380" for host in hosts]


def test_etcd_of_tests_and_manifests_is_the_same() -> None:
    for folder in set(FOLDERS) - {"claim"}:
        text = yaml.safe_dump_all(build(manifests() / folder))
        assert set(re.findall(r"/etcd:([\d.]+)-\d+", text)) == {ETCD_VERSION}
    if not DEPLOYED.exists():
        pytest.skip("`make tools` could not get this etcd")
    done = subprocess.run([BINARY, "--version"], capture_output=True, check=True, text=True)
    assert done.stdout.splitlines()[0] == f"etcd Version: {ETCD_VERSION}"


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
    training, high = (
        one(objects, "PriorityClass", f"elastic-{n}") for n in ("training", "control")
    )
    assert training["value"] < 0 < high["value"] and training["preemptionPolicy"] == "Never"
    classes = {
        pod["spec"]["containers"][0]["name"]: pod["spec"]["priorityClassName"]
        for pod in pods(objects)
        if "priorityClassName" in pod["spec"]
    }
    control_class, training_class = "elastic-control", "elastic-training"
    control = dict.fromkeys(("coordinator", "end", "etcd"), control_class)
    assert classes == {"agent": training_class, **control}


def test_grace_is_shorter_than_the_notice() -> None:
    """Spot machines of some clouds give 25 s to their pods."""
    for overlay, limit in (("spot-pool", 25), ("shared-inference", 60)):
        spec = one(job(overlay), "Deployment", "demo-agent")["spec"]["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] <= limit
    for overlay in OVERLAYS:
        spec = one(job(overlay), "Deployment", "demo-agent")["spec"]["template"]["spec"]
        (grace,) = (e["value"] for e in spec["containers"][0]["env"] if e["name"] == "PET_GRACE")
        assert 0 < int(grace) < spec["terminationGracePeriodSeconds"]


# ---- machines ----


def agent_container(objects: list[Object]) -> Object:
    (found,) = (
        c for pod in pods(objects) for c in pod["spec"]["containers"] if c["name"] == "agent"
    )
    return dict(found)


def domain_of(*words: str, overlay: str = "local", kind: str = "job") -> str:
    env = agent_container(job(overlay, kind, *words))["env"]
    (entry,) = (entry for entry in env if entry["name"] == "PET_DOMAIN")
    return str(entry["valueFrom"]["fieldRef"]["fieldPath"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_zones_are_failure_domains(overlay: str, kind: str) -> None:
    zone = "topology.kubernetes.io/zone"
    assert domain_of(overlay=overlay, kind=kind) == f"metadata.labels['{zone}']"
    for pod in pods(job(overlay, kind)):
        if component(pod) in ("agent", "coordinator"):
            spread = pod["spec"]["topologySpreadConstraints"]
            assert zone in {entry["topologyKey"] for entry in spread}


def test_failure_domains_can_be_chosen() -> None:
    assert domain_of("--domain", "zone") == "metadata.labels['topology.kubernetes.io/zone']"
    assert domain_of("--domain", "machine") == "spec.nodeName"
    assert domain_of("--domain", "example.com/rack") == "metadata.labels['example.com/rack']"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_agents_tolerate_the_taint_of_gpu_machines(overlay: str, kind: str) -> None:
    (spec,) = (pod["spec"] for pod in pods(job(overlay, kind)) if component(pod) == "agent")
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert gpu in spec["tolerations"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_autoscalers_leave_the_job_alone(overlay: str, kind: str) -> None:
    marked = {"karpenter.sh/do-not-disrupt": "true",
              "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}  # fmt: skip
    found = {component(pod): pod["metadata"].get("annotations") for pod in pods(job(overlay, kind))}
    for cheap in ("end", "snapshot"):  # their loss costs nothing
        found.pop(cheap, None)
    assert found == dict.fromkeys(("agent", "coordinator", "etcd"), marked)


def test_pods_may_ask_a_resolver_on_their_machine() -> None:
    """NodeLocal DNSCache listens at 169.254.20.10, in the network of the machine."""
    (spec,) = (item["spec"] for item in job() if name_of(item) == ("NetworkPolicy", "demo-names"))
    (rule,) = spec["egress"]
    (network,) = [ip_network(p["ipBlock"]["cidr"]) for p in rule["to"] if "ipBlock" in p]
    assert ip_address("169.254.20.10") in network
    assert {(port["protocol"], port["port"]) for port in rule["ports"]} == {
        ("UDP", 53),
        ("TCP", 53),
    }


@pytest.mark.parametrize(("kind", "controller"), [
    ("job", ("Deployment", "demo-agent")),
    ("statefulset", ("StatefulSet", "demo-agent")),
    ("jobset", ("JobSet", "demo")),
])  # fmt: skip
def test_agents_wait_in_a_queue_of_kueue(kind: str, controller: tuple[str, str]) -> None:
    label = "kueue.x-k8s.io/queue-name"
    queued = {name_of(item): item["metadata"]["labels"].get(label)
              for item in job("local", kind, "--queue", "team-a")}  # fmt: skip
    assert {name for name, queue in queued.items() if queue} == {controller}
    assert queued[controller] == "team-a" and label not in str(job("local", kind))


def test_agents_get_rdma_devices_and_huge_pages() -> None:
    objects = job("rdma", "job", "--gpus", "8", "--memory", "64GiB")
    container = agent_container(objects)
    limits = container["resources"]["limits"]
    assert limits["rdma/rdma_shared_device_a"] == "1" and limits["nvidia.com/gpu"] == "8"
    (spec,) = (pod["spec"] for pod in pods(objects) if component(pod) == "agent")
    (volume,) = (v["emptyDir"] for v in spec["volumes"] if v["name"] == "hugepages")
    assert volume == {"medium": "HugePages-2Mi", "sizeLimit": limits["hugepages-2Mi"]}
    assert "/dev/hugepages" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"cpu", "memory"} <= set(container["resources"]["requests"]), "huge pages need them"


# ---- metrics ----


def test_a_pod_monitor_scrapes_running_pods_with_the_certificates_of_the_job() -> None:
    (item,) = printed("monitor", "--name", "demo", "--namespace", "train", "--label", "release=x")
    assert (item["apiVersion"], item["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    assert item["metadata"]["namespace"] == "train" and item["metadata"]["labels"]["release"] == "x"
    objects = job()
    selected = [pod for pod in pods(objects) if item["spec"]["selector"]["matchLabels"].items()
                <= pod["metadata"]["labels"].items()]  # fmt: skip
    ports = {port["name"]: component(pod) for pod in selected
             for port in pod["spec"]["containers"][0].get("ports", ())}  # fmt: skip
    endpoints = {entry["port"]: entry for entry in item["spec"]["podMetricsEndpoints"]}
    assert set(endpoints) == {"metrics", "health"} <= set(ports) and ports["health"] == "etcd"
    assert all(entry["filterRunning"] is True for entry in endpoints.values())
    tls = endpoints["metrics"]["tlsConfig"]
    assert endpoints["metrics"]["scheme"] == "https" and tls["serverName"] == "demo"
    files = {"ca.crt": tls["ca"]["secret"], "tls.crt": tls["cert"]["secret"],
             "tls.key": tls["keySecret"]}  # fmt: skip
    assert files == {key: {"name": "demo-scrape-certs", "key": key} for key in files}
    assert item["kind"] not in {item["kind"] for item in objects}, "it needs the operator"


@pytest.mark.parametrize(
    ("words", "named"),
    [([], "--name"), (["--name", "demo", "--label", "release"], "--label"),
     (["--name", "demo", "--namespace", "A"], "--namespace")],
)  # fmt: skip
def test_wrong_monitors_are_one_line(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["kubernetes", "monitor", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and named in err


def test_ended_pods_are_no_scrape_targets() -> None:
    text = (manifests().parent / "prometheus" / "kubernetes.yml").read_text()
    phase = {"source_labels": ["__meta_kubernetes_pod_phase"], "regex": "Running", "action": "keep"}
    for scrape in yaml.safe_load(text)["scrape_configs"]:
        assert phase in scrape["relabel_configs"], scrape["job_name"]


# ---- images and package ----


def test_the_image_is_of_this_version() -> None:
    for folder in set(FOLDERS) - {"claim"}:
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
    assert "torch" not in names and {"etcd3", "grpcio", "numpy", "click", "pyyaml"} <= names


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
