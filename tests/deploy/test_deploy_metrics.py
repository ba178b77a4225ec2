"""Every metric that a rule, an alert or a panel asks for is one that the server shows."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
from deployment import DASHBOARDS, dashboard, panel_queries, rules

from tlt_server import metrics

PROMETHEUS_OWN = {"up", "ALERTS"}
SAMPLES = {
    "Counter": ("_total",),
    "Gauge": ("",),
    "GaugeHistogram": ("",),
    "Histogram": ("_bucket", "_count", "_sum"),
    "Summary": ("_count", "_sum"),
}


def sample_names(kind: str, name: str) -> set[str]:
    """Names of the series that prometheus_client shows for a metric."""
    return {name.removesuffix("_total" if kind == "Counter" else "") + suffix for suffix in SAMPLES[kind]}


def ours() -> set[str]:
    named = {each for each in vars(metrics).values() if isinstance(each, metrics.Named)}
    return {name for each in named for of in (each.name, each.alias) if of for name in sample_names(each.kind, of)}


@pytest.fixture(scope="module")
def sglangs() -> set[str]:
    """Read from SGLang's source: importing it takes seconds and torch."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("sglang is not installed: tlt-server fork install")
    source = Path(spec.origin).parent / "srt/observability/metrics_collector.py"
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SAMPLES:
            names = [word.value for word in node.keywords if word.arg == "name"]
            found.update(
                *(sample_names(node.func.id, str(name.value)) for name in names if isinstance(name, ast.Constant))
            )
    assert len(found) > 100, "the collector is not written as it was"
    return found


def asked_for(expr: str) -> set[str]:
    """Names of the metrics in a PromQL expression. Raises ValueError for one that is not PromQL."""
    found: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.add(node.name or "")

    promql_parser.walk(promql_parser.parse(expr), visit)
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of all that deploy/ asks of Prometheus."""
    yield from ((rule.get("record") or rule["alert"], rule["expr"]) for rule in rules())
    yield from panel_queries()
    for path in DASHBOARDS:
        for variable in dashboard(path)["templating"]["list"]:
            if variable["type"] == "query":
                yield variable["name"], variable["query"].removeprefix("label_values(").partition(",")[0]


def test_every_metric_exists(sglangs: set[str]) -> None:
    known = ours() | sglangs | PROMETHEUS_OWN | {rule["record"] for rule in rules() if "record" in rule}
    unknown = {where: names for where, expr in expressions() if (names := asked_for(expr) - known)}
    assert not unknown


def test_the_check_sees_through_an_expression() -> None:
    expr = 'sum by (le) (rate(a_bucket{b="c"}[5m])) / ignoring (d) group_left () (e:f > 0) or vector(0)'
    assert asked_for(expr) == {"a_bucket", "e:f"}
    assert {"tlt_spec_drafts_total", "vllm:spec_decode_num_drafts_total", "tlt_spec_accept_length_bucket"} <= ours()
    assert "tlt_spec_drafts" not in ours()
