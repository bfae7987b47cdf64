"""Alert rules and the dashboard ask for metrics and labels that a real server has, and the alerts are raised."""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.promql import labels_in, metrics_in

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/pagemill.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]

OF_PROMETHEUS = {"job", "instance"}
WITHOUT_SAMPLES = {"tier", "tenant", "position", "finished_reason", "state"}
"""Labels of metrics that have no sample before there is a tier, or a request has ended."""
WORDS_THAT_POINT_ELSEWHERE = re.compile(r"\b(such|those|these|their|there|it)\b", re.IGNORECASE)


def queries():
    """Every query of the rules, the dashboard's panels and its variables."""
    yield from (rule["expr"] for rule in RULES)
    yield from (target["expr"] for panel in PANELS for target in panel["targets"])
    yield from (variable["definition"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query")


@pytest.fixture(scope="module")
def families(served):
    """What the real server says at /metrics."""
    httpx.get(f"{served.url}/version")
    return list(text_string_to_metric_families(httpx.get(f"{served.url}/metrics").text))


def names_of(family):
    parts = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
    return {family.name + part for part in parts}


def test_every_metric_and_label_that_is_asked_for_exists(families):
    names = {name for family in families for name in names_of(family)}
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    for query in queries():
        assert metrics_in(query) <= names, query
        assert labels_in(query) <= labels | OF_PROMETHEUS | WITHOUT_SAMPLES, query


def test_every_metric_has_the_model_and_a_help_that_makes_sense_alone(families):
    assert len(families) > 40
    for family in families:
        assert all(sample.labels["model_name"] == "smollm2-135m" for sample in family.samples), family.name
        assert len(family.documentation.split()) >= 4, family.name
        assert family.documentation.endswith("."), family.name
        assert not WORDS_THAT_POINT_ELSEWHERE.search(family.documentation), family.documentation


def test_requests_are_counted_by_path_and_status(served):
    def count(path, status):
        found = re.search(
            rf'pagemill:http_requests_total{{[^}}]*path="{re.escape(path)}",status="{status}"}} (\S+)',
            httpx.get(f"{served.url}/metrics").text,
        )
        return float(found[1]) if found else 0.0

    asked = [("/v1/models/{name:path}", 404), ("other", 404), ("/v1/completions", 400)]
    before = [count(path, status) for path, status in asked]
    httpx.get(f"{served.url}/v1/models/nobody")
    httpx.get(f"{served.url}/no/such/path")
    httpx.post(f"{served.url}/v1/completions", json={"prompt": 1.5})
    assert [count(path, status) for path, status in asked] == [value + 1 for value in before]


def test_panels_have_ids_of_their_own_places_of_their_own_and_a_word_of_help():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert all(panel["description"] for panel in PANELS)
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


def test_alerts_say_what_and_how_bad():
    for rule in RULES:
        assert rule["labels"]["severity"] in {"critical", "warning"}, rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (package prometheus) is not installed")
@pytest.mark.parametrize("command", [["check", "rules", "alerts.yml"], ["test", "rules", "alerts.test.yml"]])
def test_prometheus_takes_the_rules_and_raises_the_alerts(command):
    done = subprocess.run(["promtool", *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (package prometheus) is not installed")
def test_prometheus_takes_the_queries_of_the_dashboard(tmp_path):
    rules = [
        {"record": f"panel:{number}", "expr": target["expr"].replace("$__rate_interval", "1m")}
        for number, target in enumerate(target for panel in PANELS for target in panel["targets"])
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
