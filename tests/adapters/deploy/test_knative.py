"""`medusa deploy knative`: manifests under the real CRD, read strictly, and kubectl as the command that it is."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import deploying
import jsonschema
import kubernetes_validate
import pytest
import yaml
from deploying import CRD, knative_service
from medusa_adapters.deploy.manifests.kubernetes import features, node_agent, scaling
from medusa_adapters.deploy.manifests.measured import MeasuredStart, read_measured_start
from medusa_adapters.trial import Trial
from medusa_runtime.errors import NodeRefusedError
from medusa_runtime.node.callers.peer import Caller, Peer
from medusa_runtime.node.callers.policy import Policy
from medusa_runtime.node.settings import node_settings

EVERYTHING = [
    *("--model=s3://bucket/qwen", "--timeout-s=600", "--max-concurrency=16", "--cpu=2", "--memory=12Gi", "--gpu=1"),
    *("--min-scale=1", "--max-scale=9", "--node-selector=nvidia.com/gpu.product=A10", "--runtime-class=nvidia"),
    *("--toleration=nvidia.com/gpu:NoSchedule", "--toleration=pool=gpu", "--service-account=reader"),
    *("--secret=aws-keys", "--env=MEDUSA_LOG_LEVEL=warning", "--node-agent", "--namespace=models"),
]

KNATIVES = ("containerConcurrency", "timeoutSeconds", "responseStartTimeoutSeconds")


def timeline(folder: Path, *, ready_s: float = 2.0, token_s: float | None = 2.5) -> Path:
    """A /timeline as an instance answers it, its clock far from zero."""
    origin = 7_000_000_000_000
    stages = [{"name": "bind", "process": "supervisor", "start_ns": origin, "end_ns": origin + 1_000_000}]
    # Something goes on until the token: the request has waited for it.
    moments = {"ready": ready_s} | ({"first_token": token_s} if token_s is not None else {})
    stages.append(
        {
            "name": "fetch",
            "process": "prefetcher",
            "start_ns": origin,
            "end_ns": origin + int(max(moments.values()) * 1e9),
        }
    )
    for name, at_s in moments.items():
        at = origin + int(at_s * 1e9)
        stages.append({"name": name, "process": "engine", "start_ns": at, "end_ns": at, "detail": {}})
    path = folder / "timeline.json"
    path.write_text(json.dumps({"clock": "CLOCK_MONOTONIC", "origin_ns": origin, "stages": stages}))
    return path


deploy = partial(deploying.deploy, "knative")
rendered = partial(deploying.rendered, "knative")
refused = partial(deploying.refused, "knative")


@pytest.mark.parametrize("arguments", [[], EVERYTHING])
def test_service_fits_the_crd(arguments: list[str], tmp_path: Path) -> None:
    _, documents = rendered(
        "qwen", "--image=registry.example:5000/a/qwen:1", *arguments, f"--timeline={timeline(tmp_path)}"
    )
    knative_service().validate(documents[-1])


def test_the_check_against_the_crd_is_strict() -> None:
    _, (service,) = rendered("qwen", "--image=qwen:1")
    for path, key, value in [
        (("spec", "template", "spec"), "timeoutSecond", 3),
        (("spec", "template", "spec", "containers", 0), "reedinessProbe", {}),
        (("spec", "template", "spec", "containers", 0, "readinessProbe", "httpGet"), "paht", "/"),
        (("spec", "template", "spec"), "timeoutSeconds", "300"),
        (("spec", "template", "metadata", "annotations"), "autoscaling.knative.dev/min-scale", 3),
    ]:
        broken = copy.deepcopy(service)
        inner: Any = broken
        for step in path:
            inner = inner[step]
        inner[key] = value
        with pytest.raises(jsonschema.ValidationError):
            knative_service().validate(broken)


def test_what_knatives_own_admission_checks() -> None:
    """Beyond the CRD (serving's fieldmask and probe validation)."""
    _, (service,) = rendered("qwen", "--image=qwen:1", "--timeout-s=120")
    pod = service["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["ports"] == [{"name": "http1", "containerPort": 8080}]
    # Without a period, failureThreshold and timeoutSeconds must not be there; with it, kubelet's seconds rule.
    assert container["readinessProbe"] == {"httpGet": {"path": "/readyz", "port": 8080}, "successThreshold": 1}
    assert pod["responseStartTimeoutSeconds"] <= pod["timeoutSeconds"] == 120
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert not {"PORT", "K_SERVICE"} & set(env)
    assert float(env["MEDUSA_DRAIN"]) + 30 < 120
    assert float(env["MEDUSA_HOLD"]) < 120
    assert env["MEDUSA_MAX_CONCURRENCY"] == str(pod["containerConcurrency"])
    assert env["MEDUSA_PLATFORM"] == "knative"
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]


def test_needed_flags_are_printed_and_are_the_ones_that_the_crd_names() -> None:
    text, documents = rendered("qwen", "--image=qwen:1", *EVERYTHING)
    needed = features.required(documents[-1])
    assert set(needed.values()) == {"nodeSelector", "tolerations", "runtimeClassName", "volumes.hostPath"}
    crd = CRD.read_text()
    for flag in needed:
        assert f"#   {flag}: enabled" in text
        assert f"behind a feature flag - {flag}\n" in crd
    plain, (service,) = rendered("qwen", "--image=qwen:1")
    assert "Needs no feature flag" in plain
    # Nothing else in the plain one is gated: no key of its pod has a flag in the CRD.
    assert not set(service["spec"]["template"]["spec"]) & {"nodeSelector", "tolerations", "securityContext", "affinity"}


def test_node_agent_is_one_that_kubernetes_knows() -> None:
    _, documents = rendered("qwen", "--image=qwen:1", "--node-agent", "--toleration=gpu", "--node-selector=pool=gpu")
    kinds = [document["kind"] for document in documents]
    assert kinds == ["Namespace", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "DaemonSet", "Service"]
    for document in documents[:-1]:
        kubernetes_validate.validate(document, "1.30", strict=True)
    daemon, service = documents[-2]["spec"]["template"]["spec"], documents[-1]["spec"]["template"]["spec"]
    # Both see one folder at one path; the function may not write, and the agent is not privileged.
    assert service["volumes"][1]["hostPath"]["path"] == daemon["volumes"][0]["hostPath"]["path"] == node_agent.FOLDER
    assert service["containers"][0]["volumeMounts"][1]["readOnly"] is True
    assert {"name": "MEDUSA_NODE_SOCKET", "value": "/run/medusa/node.sock"} in service["containers"][0]["env"]
    assert {"name": "MEDUSA_NODE_SOCKET", "value": "/run/medusa/node.sock"} in daemon["containers"][0]["env"]
    assert "privileged" not in daemon["containers"][0]["securityContext"]
    assert not {"hostIPC", "hostPID", "hostNetwork"} & set(daemon)
    assert documents[0]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"
    # An agent that is up but answers nobody is replaced; nobody connects to its pod, whose socket is in the folder.
    probe = daemon["containers"][0]["livenessProbe"]
    assert probe["exec"]["command"] == ["medusa", "node", "ping"]
    policy = documents[-3]["spec"]
    assert policy == {
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "medusa-node"}},
        "policyTypes": ["Ingress"],
        "ingress": [],
    }
    labels = documents[-2]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()


def test_a_function_is_reached_through_knative_and_from_its_namespace() -> None:
    _, (policy, service) = rendered("qwen", "--image=qwen:1", "--namespace=team", "--network-policy")
    kubernetes_validate.validate(policy, "1.30", strict=True)
    assert policy["metadata"]["namespace"] == service["metadata"]["namespace"] == "team"
    assert policy["spec"]["podSelector"] == {"matchLabels": {"serving.knative.dev/service": "qwen"}}
    (rule,) = policy["spec"]["ingress"]
    knative, own = rule["from"]
    assert own == {"podSelector": {}}
    (namespaces,) = knative["namespaceSelector"]["matchExpressions"]
    assert "knative-serving" in namespaces["values"]


def test_the_node_agents_pod_is_told_what_to_keep_warm() -> None:
    more = ["--node-agent-prewarm=torch=2,vllm=1", "--node-agent-cpu=2", "--node-agent-secret=s3-keys"]
    _, documents = rendered("qwen", "--image=qwen:1", "--node-agent", *more)
    kubernetes_validate.validate(documents[-2], "1.30", strict=True)
    (container,) = documents[-2]["spec"]["template"]["spec"]["containers"]
    assert {"name": "MEDUSA_NODE_PREWARM", "value": "torch=2,vllm=1"} in container["env"]
    assert container["resources"]["requests"]["cpu"] == "2"
    assert container["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]
    refused = deploy("qwen", "--image=qwen:1", "--node-agent", "--node-agent-prewarm=jax=1")
    assert refused.returncode == 2
    assert "--node-agent-prewarm='jax=1' cannot be used: expected engine=count" in refused.stderr


def test_the_agents_metrics_are_open_to_all_pods() -> None:
    _, documents = rendered("qwen", "--image=qwen:1", "--node-agent", "--node-agent-metrics-port=9400")
    policy, daemon = documents[-3], documents[-2]
    for document in (policy, daemon):
        kubernetes_validate.validate(document, "1.30", strict=True)
    assert policy["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": 9400}]}]
    assert node_agent.variables(daemon)["MEDUSA_NODE_METRICS_PORT"] == "9400"
    template = daemon["spec"]["template"]
    assert template["spec"]["containers"][0]["ports"] == [{"name": "metrics", "containerPort": 9400}]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == "9400"


def test_the_agent_gives_out_the_functions_model_and_nothing_else() -> None:
    """Read as `medusa node` reads it: without --allow it would refuse the function, which is another user to it."""
    text, documents = rendered(
        "qwen",
        "--image=qwen:1",
        "--model=s3://bucket/qwen",
        *("--node-agent", "--node-agent-allow=s3://shared/", "--node-agent-trust-state=s3://bucket/qwen"),
    )
    environ = node_agent.variables(documents[-2])
    settings = node_settings(environ, {})
    policy = Policy(settings.allow, settings.quota)
    uid = documents[-1]["spec"]["template"]["spec"]["containers"][0]["securityContext"]["runAsUser"]
    function, stranger = (Caller(Peer(7, user, user, same_pid_namespace=False)) for user in (uid, uid + 1))
    policy.check("s3://bucket/qwen", function)
    policy.check("s3://shared/other", function)
    for caller, model in ((function, "s3://bucket/other"), (stranger, "s3://bucket/qwen")):
        with pytest.raises(NodeRefusedError):
            policy.check(model, caller)
    assert settings.trust_state == "s3://bucket/qwen"
    assert "gives out s3://bucket/qwen=1000, s3://shared/" in text
    # A folder is read by the function itself, and needs no rule.
    text, documents = rendered("qwen", "--image=qwen:1", "--model=/models/qwen", "--node-agent")
    assert "MEDUSA_NODE_ALLOW" not in node_agent.variables(documents[-2])
    assert "will give out no model of a store" in text


def test_credentials_of_the_agent_are_given_or_said_to_be_missing() -> None:
    base = ("qwen", "--image=qwen:1", "--node-agent", "--secret=aws-keys")
    text, documents = rendered(*base)
    assert "The node agent has no credentials: --secret aws-keys is the function's alone." in text
    assert "envFrom" not in documents[-2]["spec"]["template"]["spec"]["containers"][0]
    text, documents = rendered(*base, "--node-agent-secret=aws-keys", "--node-agent-secret=HF_TOKEN=hub/token")
    assert "no credentials" not in text
    (container,) = documents[-2]["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "aws-keys"}}]
    entry = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert entry in container["env"]
    kubernetes_validate.validate(documents[-2], "1.30", strict=True)


def test_pull_secrets_labels_annotations_and_one_entry_of_a_secret() -> None:
    _, (service,) = rendered(
        *("qwen", "--image=qwen:1", "--pull-secret=registry", "--label=team=search"),
        *("--annotation=example.com/note=a b", "--annotation=autoscaling.knative.dev/initial-scale=2"),
        *("--secret=HF_TOKEN=hub/token", "--secret=aws-keys"),
    )
    knative_service().validate(service)
    template = service["spec"]["template"]
    assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert service["metadata"]["labels"]["team"] == template["metadata"]["labels"]["team"] == "search"
    # Knative refuses autoscaling annotations on the Service itself.
    assert service["metadata"]["annotations"] == {"example.com/note": "a b"}
    assert template["metadata"]["annotations"]["autoscaling.knative.dev/initial-scale"] == "2"
    (container,) = template["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "aws-keys"}}]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in container["env"]


def test_gated_fields_which_the_crd_leaves_open_are_a_pods_own() -> None:
    _, documents = rendered("qwen", "--image=qwen:1", *EVERYTHING)
    spec = documents[-1]["spec"]["template"]["spec"]
    pod = {name: value for name, value in spec.items() if name not in KNATIVES}
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "qwen"}, "spec": pod}, "1.30", strict=True
    )
    # Knative accepts a hostPath only so.
    paths = {volume["name"] for volume in pod["volumes"] if "hostPath" in volume}
    (container,) = pod["containers"]
    assert [mount["readOnly"] for mount in container["volumeMounts"] if mount["name"] in paths] == [True]
    assert [toleration.get("effect", "NoSchedule") for toleration in pod["tolerations"]] == ["NoSchedule"] * 2


def test_scaling_follows_the_measured_start(tmp_path: Path) -> None:
    found = read_measured_start(str(timeline(tmp_path, ready_s=12, token_s=12.5)))
    assert (found.cold_start_s, found.ttft_s) == (12.0, 12.5)
    slow = scaling.scale(found, concurrency=8, min_scale=0, max_scale=0)
    fast = scaling.scale(MeasuredStart(0.4, 0.5, "x"), concurrency=8, min_scale=0, max_scale=0)

    def seconds(annotations: dict[str, str], key: str) -> int:
        return int(annotations[f"autoscaling.knative.dev/{key}"].removesuffix("s"))

    for key in ("window", "scale-to-zero-pod-retention-period", "scale-down-delay"):
        assert seconds(slow, key) > seconds(fast, key)
    assert seconds(slow, "target-utilization-percentage") < seconds(fast, "target-utilization-percentage")
    assert seconds(slow, "target-burst-capacity") == -1
    # What Knative accepts, at both ends.
    for measured in (MeasuredStart(0, None, "x"), MeasuredStart(0.4, 0.5, "x"), MeasuredStart(590, 599, "x")):
        some = scaling.scale(measured, concurrency=1, min_scale=0, max_scale=0)
        assert 6 <= seconds(some, "window") <= 3600
        assert 0 <= seconds(some, "scale-down-delay") <= 3600
        assert 1 <= seconds(some, "target-utilization-percentage") <= 100
        assert int(some["serving.knative.dev/progress-deadline"].removesuffix("s")) >= max(600, measured.cold_start_s)
    text, (service,) = rendered("qwen", "--image=qwen:1", f"--timeline={timeline(tmp_path, ready_s=12, token_s=12.5)}")
    assert "ready after 12.00 s, first token 12.50 s" in text
    assert service["spec"]["template"]["metadata"]["annotations"]["autoscaling.knative.dev/window"] == "120s"
    env = {entry["name"]: entry["value"] for entry in service["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["MEDUSA_HOLD"] == "125"


def test_a_token_long_after_the_start_is_none_of_it(tmp_path: Path) -> None:
    path = timeline(tmp_path, ready_s=1.0, token_s=None)
    document = json.loads(path.read_text())
    at = document["origin_ns"] + 900 * 10**9
    document["stages"].append({"name": "first_token", "process": "engine", "start_ns": at, "end_ns": at, "detail": {}})
    path.write_text(json.dumps(document))
    assert read_measured_start(str(path))[:2] == (1.0, None)


def test_bad_timelines(tmp_path: Path) -> None:
    base = ("qwen", "--image=qwen:1")
    assert "No such file" in refused(*base, f"--timeline={tmp_path / 'none'}")
    (tmp_path / "page.html").write_text("<html>")
    assert "expected the JSON of /timeline" in refused(*base, f"--timeline={tmp_path / 'page.html'}")
    (tmp_path / "list.json").write_text('[{"stages": 1}]')
    assert '"stages"' in refused(*base, f"--timeline={tmp_path / 'list.json'}")
    (tmp_path / "early.json").write_text('{"stages": []}')
    assert "became ready" in refused(*base, f"--timeline={tmp_path / 'early.json'}")
    assert "cannot be read: Connection refused" in refused(*base, "--timeline=http://127.0.0.1:9/")
    late = timeline(tmp_path, ready_s=700)
    assert "no first request could be answered" in refused(*base, f"--timeline={late}")


def test_a_timeline_behind_a_token_is_to_be_saved_first(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("def handle(request):\n    return 'hello'\n")
    with Trial("--handler", str(tmp_path / "hello.py"), "--token", "secret") as function:
        said = refused("qwen", "--image=qwen:1", f"--timeline={function.url}")
    assert "cannot be read: it asks for a token; save its answer with `curl" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Qwen_1", "--image=q"], "NAME='Qwen_1'"),
        (["1qwen", "--image=q"], "NAME='1qwen'"),
        (["q" * 64, "--image=q"], "63"),
        (["qwen"], "--image is missing"),
        (["qwen", "--image=a b"], "--image='a b'"),
        (["qwen", "--image=q", "--memory=8GB"], "--memory='8GB'"),
        (["qwen", "--image=q", "--cpu=0"], "--cpu='0'"),
        (["qwen", "--image=q", "--gpu=-1"], "--gpu=-1"),
        (["qwen", "--image=q", "--timeout-s=900"], "60 to 600 seconds"),
        (["qwen", "--image=q", "--timeout-s=20"], "60 to 600 seconds"),
        (["qwen", "--image=q", "--max-concurrency=0"], "--max-concurrency=0"),
        (["qwen", "--image=q", "--max-concurrency=x"], "--max-concurrency"),
        (["qwen", "--image=q", "--min-scale=3", "--max-scale=2"], "above --max-scale"),
        (["qwen", "--image=q", "--node-selector=pool"], "--node-selector='pool'"),
        (["qwen", "--image=q", "--toleration=a=b:Never"], "toleration"),
        (["qwen", "--image=q", "--namespace=My"], "--namespace='My'"),
        (["qwen", "--image=q", "--env=PORT=80"], "Knative sets it itself"),
        (["qwen", "--image=q", "--env==secret"], "NAME=VALUE"),
        (["qwen", "--image=q", "--env=MEDUSA_DRAIN=soon"], "MEDUSA_DRAIN='soon'"),
        (["qwen", "--image=q", "--memory=1e30"], "--memory='1e30'"),
        (["qwen", "--image=q", "--toleration=:NoSchedule"], "--toleration=':NoSchedule'"),
        (["qwen", "--image=q", "--secret=a..b"], "--secret='a..b'"),
        (["qwen", "--image=q", "--secret=HF_TOKEN=hub"], "expected SECRET or VARIABLE=SECRET/KEY"),
        (["qwen", "--image=q", "--secret=a-b=hub/token"], "expected SECRET or VARIABLE=SECRET/KEY"),
        (["qwen", "--image=q", "--pull-secret=A"], "--pull-secret='A'"),
        (["qwen", "--image=q", "--label=app.kubernetes.io/name=x"], "set by medusa itself"),
        (["qwen", "--image=q", "--annotation=a"], "--annotation='a'"),
        (["qwen", "--image=q", "--node-agent-allow=s3://b/"], "--node-agent-allow needs --node-agent"),
        (["qwen", "--image=q", "--node-agent", "--node-agent-trust-state=s3:"], "--node-agent-trust-state"),
        (["qwen", "--image=q", "--node-agent", "--node-agent-image=a b"], "--node-agent-image='a b'"),
        (["qwen", "--image=q", "--node-agent-prewarm=torch=2"], "needs --node-agent"),
        (["qwen", "--image=q", "--node-agent", "--node-agent-metrics-port=0"], "expected a port from 1 to 65535"),
        (["qwen", "--image=q", "--node-agent", "--node-agent-prewarm=x=2"], "--node-agent-prewarm='x=2'"),
    ],
)
def test_bad_flags_are_named(arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)


def test_names_may_have_dots_where_kubernetes_lets_them() -> None:
    text, _ = rendered("qwen", "--image=q", "--secret=aws.keys", "--runtime-class=nvidia.com", "--service-account=a.b")
    assert "name: aws.keys" in text


def test_a_bad_variable_does_not_show_its_value() -> None:
    assert "hunter2" not in refused("qwen", "--image=q", "--env=a-b=hunter2")


@pytest.fixture
def kubectl(tmp_path: Path) -> Path:
    """A kubectl that answers like one of a cluster whose config-features are in a file, and keeps what it was given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "kubectl"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\n'
        f'case "$*" in *config-features*) cat {folder}/features ;; '
        '"get namespace"*) echo \'{"metadata": {"labels": {}}}\' ;; '
        f'"get daemonset"*) cat {folder}/daemon 2>/dev/null ;; '
        f"apply*) cat > {folder}/applied; echo service.serving.knative.dev/qwen configured ;; esac\n"
    )
    script.chmod(0o755)
    (folder / "features").write_text('{"data": {"kubernetes.podspec-nodeselector": "enabled"}}')
    return folder


def test_apply_hands_over_what_would_be_printed(kubectl: Path) -> None:
    arguments = ("qwen", "--image=qwen:1", "--node-selector=pool=gpu")
    done = deploy(*arguments, "--apply", PATH=f"{kubectl}:/usr/bin:/bin")
    assert (done.returncode, done.stdout) == (0, "service.serving.knative.dev/qwen configured\n"), done.stderr
    assert (kubectl / "applied").read_text() == rendered(*arguments)[0]


def test_apply_keeps_what_the_agent_gives_to_other_functions(kubectl: Path) -> None:
    """One agent serves the cluster: bringing a second function there must not take the first one's model away."""
    (kubectl / "features").write_text('{"data": {"kubernetes.podspec-volumes-hostpath": "enabled"}}')
    agent = ("--image=qwen:1", "--node-agent", "--secret=keys")
    _, documents = rendered("first", "--model=s3://b/first", *agent)
    (kubectl / "daemon").write_text(json.dumps(documents[-2]))
    done = deploy("second", "--model=s3://b/second", *agent, "--apply", PATH=f"{kubectl}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert "medusa: The node agent has no credentials" in done.stderr
    applied = list(yaml.safe_load_all((kubectl / "applied").read_text()))
    assert node_agent.variables(applied[-2])["MEDUSA_NODE_ALLOW"] == "s3://b/second=1000,s3://b/first=1000"


def test_apply_looks_for_the_flags_first(kubectl: Path) -> None:
    line = refused("qwen", "--image=qwen:1", "--runtime-class=nvidia", "--apply", PATH=f"{kubectl}:/usr/bin:/bin")
    assert "runtimeClassName" in line
    assert "kubectl patch configmap config-features" in line
    assert not (kubectl / "applied").exists()


def test_without_kubectl_and_with_one_that_fails(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "needs kubectl" in refused("qwen", "--image=qwen:1", "--apply", PATH=str(empty))
    (empty / "kubectl").write_text("#!/bin/sh\necho 'connection refused' >&2\nexit 1\n")
    (empty / "kubectl").chmod(0o755)
    line = refused("qwen", "--image=qwen:1", "--apply", PATH=f"{empty}:/bin")
    assert "connection refused" in line
    assert line.endswith("[Deploy.Failed]")


def test_memory_without_a_unit_is_refused() -> None:
    for value in ("8", "8GB", "500m"):
        assert f"--memory='{value}' cannot be used" in refused("qwen", "--image=qwen:1", f"--memory={value}")
    assert "such as 512Mi or 8Gi" in refused("qwen", "--image=qwen:1", "--memory=8")


def test_a_misspelt_variable_of_the_function_is_named() -> None:
    done = deploy("qwen", "--image=qwen:1", "--env=MEDUSA_MODLE=x")
    assert (done.returncode, "did you mean MEDUSA_MODEL?" in done.stderr) == (0, True)
