"""The files of docs/deploy: schemas, and agreement with each other and setup.py.

Nothing is built or run.
"""

import functools
import json
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

from counts import DOCS, promtool
from vllm_mars.options import overrides
from vllm_mars.options.config import split_speculative_config
from vllm_mars.options.requests import check_overrides

ROOT = Path(__file__).parents[1]
DEPLOY = DOCS / "deploy"


def read(name):
    return yaml.safe_load((DEPLOY / name).read_text())


COMPOSE = read("compose.yaml")
BUILT = [name for name, service in COMPOSE["services"].items() if "build" in service]


def mounts(service):
    """Maps files of this repository to their paths in the service."""
    volumes = [volume.split(":") for volume in COMPOSE["services"][service]["volumes"]]
    return {(DEPLOY / host).resolve(): there for host, there, *_ in volumes if host[0] == "."}


def test_built_and_mounted_files_exist():
    assert BUILT == ["cuda", "cpu"]
    for name in BUILT:
        build = COMPOSE["services"][name]["build"]
        context = (DEPLOY / build["context"]).resolve()
        assert context == ROOT
        dockerfile = (context / build["dockerfile"]).read_text()
        for sources in re.findall(r"^COPY (.+) \S+$", dockerfile, re.M):
            assert all((context / source).exists() for source in sources.split()), sources
    for name in ("prometheus", "grafana"):
        assert mounts(name) and all(path.is_file() for path in mounts(name))


def test_vllms_image_is_of_a_release_that_fits():
    setup = (ROOT / "setup.py").read_text()
    fits = Requirement(re.search(r'"cuda": \["(.+)"\]', setup)[1]).specifier
    release = re.search(r"^ARG VLLM_VERSION=(.+)$", (DEPLOY / "cuda.Dockerfile").read_text(), re.M)
    assert release[1] in fits
    for service in COMPOSE["services"].values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service.get("image", ":1.2.3")), "a pinned version"


@pytest.mark.parametrize("service", BUILT)
def test_the_speculative_config_is_valid(service):
    model, option, config = COMPOSE["services"][service]["command"]
    assert option == "--speculative-config"
    mars, _ = split_speculative_config(json.loads(config))
    assert mars.lossy and mars.max_loss == 0.02


def test_prometheus_finds_the_server_and_grafana_finds_both():
    (job,) = read("prometheus.yml")["scrape_configs"]
    (target,) = job["static_configs"]
    host, port = target["targets"][0].split(":")
    for name in BUILT:
        service = COMPOSE["services"][name]
        assert service["networks"]["default"]["aliases"] == [host]
        assert service["ports"] == [f"127.0.0.1:{port}:{port}"]
    files = ("prometheus.yml", *read("prometheus.yml")["rule_files"])
    assert mounts("prometheus") == {DEPLOY / file: f"/etc/prometheus/{file}" for file in files}
    (source,) = read("grafana-datasources.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    assert source["jsonData"]["timeInterval"] == read("prometheus.yml")["global"]["scrape_interval"]
    # The dashboard's data source is a variable of this type, which selects the default.
    dashboard = json.loads((DOCS / "grafana-mars.json").read_text())
    (variable,) = (v for v in dashboard["templating"]["list"] if v["type"] == "datasource")
    assert variable["query"] == source["type"]
    (provider,) = read("grafana-dashboards.yml")["providers"]
    mounted = Path(mounts("grafana")[DOCS / "grafana-mars.json"])
    assert str(mounted.parent) == provider["options"]["path"]
    environment = COMPOSE["services"]["grafana"]["environment"]
    assert environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == str(mounted)


# Counts of a server per minute, with 1,000 tokens in 50 answers.
HEALTHY = {"lost_nats": 25, "drift_up_nats": 30, "gained_acceptance": 5, "relaxable_positions": 50}
HEALTHY |= {"verified_positions": 60, "up": "1x120"}
# Nine requests in ten are strict.
MIXED = {"verified_positions": 1000, "relaxable_positions": 100}


def series_of(prefix, labels, changes):
    """Returns two hours of a server in promtool's notation."""
    rates = HEALTHY | changes
    counters = {f"mars_{name}": rates[name] for name in HEALTHY if name != "up"}
    counters |= {"generation_tokens": 1000, "request_success": 50, "mars_drift_down_nats": 5}
    values = {
        f"{prefix}{name}_total": f"0+{value}x120" for name, value in counters.items() if value
    }
    values[f"{prefix}mars_max_loss_nats_per_token"] = "0.02+0x120"
    up = {"series": f'up{{{labels}, job="vllm-mars"}}', "values": rates["up"]}
    series = [{"series": f"{name}{{{labels}}}", "values": line} for name, line in values.items()]
    return [*series, up]


def ten_servers(prefix, label, changes, fires):
    """Returns a test for promtool: one of ten servers differs, which fires one alert or none."""
    series = []
    for number in range(10):
        labels = f'{label}="{number}", instance="node", model_name="m"'
        series += series_of(prefix, labels, changes if number == 7 else {})
    firing = f'count by (alertname, {label}) (ALERTS{{alertstate="firing"}})'
    samples = [{"labels": f'{{alertname="{fires}", {label}="7"}}', "value": 1}] if fires else []
    expected = {"expr": firing, "eval_time": "110m", "exp_samples": samples}
    return {
        "name": f"{prefix} {changes}",
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [expected],
    }


@pytest.mark.parametrize(("prefix", "label"), [("vllm:", "pod"), ("ray_vllm_", "ReplicaId")])
def test_an_alert_names_the_one_server_of_ten(tmp_path, prefix, label):
    no_gain = {"gained_acceptance": 0}
    cases = [
        ({}, None),
        # Allowed: 0.02 nats for 5/6 of 1,000 tokens, and for 100 more in each of 50 answers: 117.
        ({"lost_nats": 140}, "MarsLossAboveBound"),
        ({"drift_up_nats": 60}, "MarsTextDrifts"),
        # Strict requests dilute neither: 102 nats are allowed, and 7 are 0.07 of each lossy token.
        (MIXED | {"lost_nats": 115, "drift_up_nats": 6}, "MarsLossAboveBound"),
        (MIXED | {"drift_up_nats": 12}, "MarsTextDrifts"),
        (MIXED | {"drift_up_nats": 6}, None),
        (no_gain, "MarsGainsNothing"),
        (no_gain | {"verified_positions": 10, "relaxable_positions": 10}, None),
        # All requests are strict.
        (no_gain | {"relaxable_positions": 0, "lost_nats": 0, "drift_up_nats": 0}, None),
        ({"up": "1x100 0x19"}, "MarsServerDown"),
        # A server that is loading.
        ({"up": "0x120"}, None),
    ]
    tests = [ten_servers(prefix, label, *case) for case in cases]
    file = tmp_path / "case.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "alerts.yml")], "tests": tests}))
    promtool("test", "rules", file)


def test_each_alert_has_a_severity_and_a_runbook():
    page = (DOCS / "operating.md").read_text()
    section = re.search(r"^## When an alert fires$.*?^## ", page, re.M | re.S)[0]
    titles = re.findall(r"^### (\w+)$", section, re.M)
    (group,) = read("alerts.yml")["groups"]
    assert [rule["alert"] for rule in group["rules"]] == titles
    for rule in group["rules"]:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "https://docs.example.com/docs/operating.html"
        assert anchor == rule["alert"].lower()
        assert rule["labels"]["severity"] in ("critical", "warning")


DOCUMENTS = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
MANIFESTS = {manifest["kind"]: manifest for manifest in DOCUMENTS}
OF_THE_OPERATOR = {"PodMonitor", "PrometheusRule"}


@pytest.mark.parametrize("kind", sorted(MANIFESTS.keys() - OF_THE_OPERATOR))
def test_manifests_fit_the_schemas_of_kubernetes(kind):
    check = functools.partial(kubernetes_validate.validate, desired_version="1.37", strict=True)
    check(MANIFESTS[kind])
    for wrong in ({"metadta": {}}, {"metadata": {"name": 1}}):
        with pytest.raises(kubernetes_validate.ValidationError):
            check(MANIFESTS[kind] | wrong)


def in_schema(manifest):
    """Returns the part of a manifest that its schema knows; ValueError if something is missing."""
    from cloudcoil import resources

    model = resources.get_model(manifest["kind"], api_version=manifest["apiVersion"])
    known = model.model_validate(manifest)
    return known.model_dump(mode="json", by_alias=True, exclude_unset=True)


@pytest.mark.parametrize("kind", sorted(OF_THE_OPERATOR))
def test_manifests_fit_the_schemas_of_the_prometheus_operator(kind):
    assert in_schema(MANIFESTS[kind]) == MANIFESTS[kind]
    misspelt = {**MANIFESTS[kind], "metadta": {}}
    assert in_schema(misspelt) != misspelt


def test_a_pod_is_selected_probed_overridden_and_drained():
    deployment = MANIFESTS["Deployment"]["spec"]
    labels, pod = deployment["template"]["metadata"]["labels"], deployment["template"]["spec"]
    (server,) = pod["containers"]
    monitor, service = MANIFESTS["PodMonitor"]["spec"], MANIFESTS["Service"]["spec"]
    assert deployment["selector"]["matchLabels"] == labels == service["selector"]
    assert monitor["selector"]["matchLabels"] == labels
    (port,) = server["ports"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    (endpoint,), (served,) = monitor["podMetricsEndpoints"], service["ports"]
    assert endpoint["port"] == served["targetPort"] == port["name"]
    (job,) = read("prometheus.yml")["scrape_configs"]
    assert labels[monitor["jobLabel"]] == job["job_name"]

    model, timeout, option, config = server["args"]
    assert option == "--speculative-config"
    shutdown = int(timeout.removeprefix("--shutdown-timeout="))
    sleep = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > sleep + shutdown

    # The patch for an existing Deployment has the same settings.
    for spec in (pod, read("patch.yaml")["spec"]["template"]["spec"]):
        (server,) = spec["containers"]
        mars, _ = split_speculative_config(json.loads(server["args"][-1]))
        assert not mars.lossy and (mars.max_loss, mars.limit) == (0, 0.02)
        env = {variable["name"]: variable.get("value") for variable in server["env"]}
        path = Path(env[overrides.VARIABLE])
        (mount,) = (m for m in server["volumeMounts"] if m["mountPath"] == str(path.parent))
        assert "subPath" not in mount
        (volume,) = (v for v in spec["volumes"] if v["name"] == mount["name"])
        assert volume["configMap"]["name"] == MANIFESTS["ConfigMap"]["metadata"]["name"]
        assert check_overrides(json.loads(MANIFESTS["ConfigMap"]["data"][path.name]), mars) == {}


def test_kubernetes_has_the_alerts_of_prometheus():
    assert MANIFESTS["PrometheusRule"]["spec"] == read("alerts.yml")
