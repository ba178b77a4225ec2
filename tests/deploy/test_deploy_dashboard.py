"""The Grafana dashboards: what Grafana would refuse or draw wrongly without a word."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from deployment import DASHBOARDS, dashboard

each = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
WIDTH = 24


def panels(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = dashboard(path)["panels"]
    return found


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


def test_dashboards_have_names_of_their_own() -> None:
    for key in ("uid", "title"):
        found = [dashboard(path)[key] for path in DASHBOARDS]
        assert all(found)
        assert len(set(found)) == len(found) > 0
    assert all(len(dashboard(path)["uid"]) <= 40 for path in DASHBOARDS)  # Grafana's limit


@each
def test_panels_have_what_grafana_needs(path: Path) -> None:
    found = panels(path)
    assert len({panel["id"] for panel in found}) == len(found)
    for panel in found:
        assert panel["type"] in ("stat", "timeseries", "heatmap")
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            assert target["expr"]
            assert panel["type"] == "stat" or "{{" in target.get("legendFormat", "") or "{{" not in target["expr"]
        assert panel["type"] != "heatmap" or [target["format"] for target in panel["targets"]] == ["heatmap"]


@each
def test_panels_lie_on_the_grid_side_by_side(path: Path) -> None:
    places = [panel["gridPos"] for panel in panels(path)]
    for place in places:
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= WIDTH
        assert min(place["w"], place["h"]) > 0
    assert not [pair for pair in itertools.combinations(places, 2) if overlap(*pair)]


@each
def test_every_variable_is_known(path: Path) -> None:
    declared = {variable["name"] for variable in dashboard(path)["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", path.read_text())) - {"__rate_interval", "__all"}
    assert used == declared


@each
def test_servers_are_told_apart(path: Path) -> None:
    """Behind a fleet's front all replicas are one instance: what is shown by server is shown by replica."""
    for panel in panels(path):
        for target in panel["targets"]:
            assert target["expr"].count("$replica") == target["expr"].count("$instance")
            if "by (instance" in target["expr"]:
                assert "by (instance, replica)" in target["expr"]
                assert "{{instance}} {{replica}}" in target["legendFormat"]


def test_the_overlap_check_can_fail() -> None:
    place = {"x": 0, "y": 0, "w": 4, "h": 4}
    assert overlap(place, place | {"x": 3, "y": 3})
    assert not overlap(place, place | {"x": 4})
    assert not overlap(place, place | {"y": 4})
