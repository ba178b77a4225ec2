"""Recording rules and alerts: valid, each one tested by promtool, and tested so that a wrong one is noticed."""

import shutil
from pathlib import Path

import pytest
from deployment import DEPLOY, RULE_TESTS, RULES, passes, read_yaml, rules, run


def test_promtool_takes_the_configuration_and_the_rules() -> None:
    passes("promtool", "check", "config", DEPLOY / "prometheus.yml")
    passes("promtool", "check", "rules", "--lint-fatal", *RULES)


def test_the_rules_do_what_they_say() -> None:
    passes("promtool", "test", "rules", *RULE_TESTS)


def test_no_rule_is_untested() -> None:
    tests = [test for path in RULE_TESTS for test in read_yaml(path)["tests"]]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    fires = {case["alertname"] for case in cases if case.get("exp_alerts")}
    silent = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert alerts == fires == silent
    expected = {case["expr"] for test in tests for case in test.get("promql_expr_test", []) if case.get("exp_samples")}
    assert {rule["record"] for rule in rules() if "record" in rule} == expected


def test_an_alert_says_what_is_wrong_and_what_to_do() -> None:
    for rule in (rule for rule in rules() if "alert" in rule):
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("speculation", "1 + instance:tlt_spec_accepted", "instance:tlt_spec_accepted"),
        ("speculation", "(instance:tlt_spec_drafts:rate1m > 0)", "instance:tlt_spec_drafts:rate1m"),
        ("speculation", "< 1.2", "< 1.05"),
        (
            "speculation",
            "last_over_time(instance:tlt_spec_accept_length:mean1m[5m])",
            "instance:tlt_spec_accept_length:mean1m",
        ),
        ("speculation", "and max_over_time(instance:tlt_spec_drafts:rate1m[5m]) > 1", ""),
        ("speculation", "for: 5m", "for: 1m"),
        ("speculation", "increase(tlt_watchdog_alarms_total[10m]) > 0", "tlt_watchdog_alarms_total > 0"),
        ("serving", '{priority=""}', ""),
        ("serving", 'up{job="tlt-server"}', "up"),
        ("serving", "for: 3m", "for: 5m"),
        ("serving", "deriv(instance:sglang_num_queue_reqs:sum[5m]) > 0\n          and ", ""),
        ("serving", "\n          and min_over_time(instance:sglang_num_queue_reqs:sum[5m]) > 0", ""),
    ],
)
def test_the_tests_notice_a_wrong_rule(tmp_path: Path, name: str, right: str, wrong: str) -> None:
    text = (DEPLOY / f"rules/{name}.yml").read_text()
    assert right in text
    changed = tmp_path / f"{name}.yml"
    changed.write_text(text.replace(right, wrong))
    passes("promtool", "check", "rules", changed)
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(DEPLOY / f"rules/tests/{name}.yml", tests)
    assert run("promtool", "test", "rules", tests / f"{name}.yml").returncode == 1
