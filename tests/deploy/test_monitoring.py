"""deploy/prometheus and deploy/grafana name metrics and labels that servers and gateways have."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy import panels

RULES = panels.ROOT / "deploy" / "prometheus" / "rules.yml"
CONFIG = RULES.with_name("prometheus.yml")
RULE_GROUPS = yaml.safe_load(RULES.read_text())["groups"]
OFFERED = panels.offered()


def faults(expression: str, known: dict[str, set[str]]) -> list[str]:
    """What an expression asks for and nobody has."""
    found, all_labels = [], set(panels.OF_PROMETHEUS)
    named = list(panels.metrics_of(expression))
    for name, labels in named:
        if name not in known:
            found.append(f"no metric {name}")
            continue
        all_labels |= known[name]
        wrong = labels - known[name] - panels.OF_PROMETHEUS
        found += [f"{name} has no label {label}" for label in sorted(wrong)]
    found += [f"nothing has the label {label}" for label in panels.grouped(expression) - all_labels]
    return found if named else [f"no metric in {expression}"]


def test_the_check_finds_faults() -> None:
    bucket = "sglang:queue_time_s_bucket"
    assert not faults(f"sum by (le, instance) (rate({bucket}[1m]))", OFFERED)
    for wrong in (
        'sglang:token_usage{modelname="x"}',
        "sglang:num_requests",  # a counter: _total is missing
        "sglang:queue_time_s",
        f"sum by (worker) ({bucket})",
        "up2",
    ):
        assert faults(wrong, OFFERED), wrong


def test_every_panel_asks_for_what_is_offered() -> None:
    dashboard = panels.load()
    found = list(panels.queries(dashboard))
    assert len(found) > 60
    wrong = {(title, fault) for title, expr in found for fault in faults(expr, OFFERED)}
    assert not wrong
    names = {one["name"] for one in dashboard["templating"]["list"]}
    used = set().union(*(panels.variables(expr) for _, expr in found))
    assert used <= names | {"__rate_interval"}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert {"Recovery", "Speculation", "Gateway", "KV and radix cache"} <= set(rows)


def test_rules_ask_for_what_is_offered() -> None:
    rules = [rule for group in RULE_GROUPS for rule in group["rules"]]
    recorded = {rule["record"]: {"model_name"} for rule in rules if "record" in rule}
    for rule in rules:
        if rule["expr"] != 'up{job="radixlm"} == 0':
            assert not faults(rule["expr"], OFFERED | recorded), rule
    jobs = {job["job_name"] for job in yaml.safe_load(CONFIG.read_text())["scrape_configs"]}
    assert jobs == {"radixlm", "radixlm-gateway"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_rules_and_the_configuration() -> None:
    for kind, path in (("config", CONFIG), ("rules", RULES)):
        command = ["promtool", "check", kind, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_grafana_is_given_the_data_source_that_the_dashboard_names() -> None:
    folder = panels.DASHBOARD.parent / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    variable = panels.load()["templating"]["list"][0]
    assert (variable["name"], variable["current"]["value"]) == ("datasource", source["uid"])
    (provider,) = yaml.safe_load((folder / "dashboards" / "radixlm.yml").read_text())["providers"]
    assert Path(provider["options"]["path"]).is_absolute()
