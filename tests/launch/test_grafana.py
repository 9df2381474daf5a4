"""The Grafana board asks for existing metrics.

tests/system/trackers.py compares the names with those of a real Ray.
"""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from launch.ray_session import ray_metrics

BOARD = json.loads((Path(ray_metrics.__file__).parents[2] / "launch" / "grafana.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


def exported() -> dict[str, set[str]]:
    """Every name that Ray gives our metrics, and its labels."""
    labels = {
        name: {"run", *([ray_metrics.LABELS[name]] if name in ray_metrics.LABELS else [])} for name in everything()
    }
    labels_by_metric = {f"ray_{name}": labels[name] for name in (*ray_metrics.GAUGES, *ray_metrics.OTHER_GAUGES)}
    labels_by_metric |= {f"ray_{name}_total": labels[name] for name in ray_metrics.COUNTERS}
    labels_by_metric |= {f"ray_{ray_metrics.HISTOGRAM}_{part}": {"run"} for part in ("sum", "count")}
    return labels_by_metric | {f"ray_{ray_metrics.HISTOGRAM}_bucket": {"run", "le"}}


def everything() -> list[str]:
    return [*ray_metrics.GAUGES, *ray_metrics.OTHER_GAUGES, *ray_metrics.COUNTERS, ray_metrics.HISTOGRAM]


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{title} {i}" for i, (title, _) in enumerate(QUERIES)])
def test_a_query_asks_for_existing_metrics_and_labels(title, query):
    metrics = re.findall(r"\bray_\w+", query)
    assert metrics
    assert set(metrics) <= set(exported())
    labels = {label.strip() for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(",")}
    assert labels <= set.union(*(exported()[name] for name in metrics))
    for name in metrics:
        assert f'{name}{{run=~"$run"}}' in query, "a board shows the chosen runs only"


def test_parentheses_and_braces_are_closed():
    for title, query in QUERIES:
        assert [query.count(c) for c in "({["] == [query.count(c) for c in ")}]"], title


def test_every_metric_is_on_the_board():
    queried = {name for _, query in QUERIES for name in re.findall(r"\bray_(\w+)", query)}
    on_board = {
        re.sub(r"_(total|bucket|sum|count)$", "", name) if name not in everything() else name for name in queried
    }
    assert on_board == set(everything())


def test_a_legend_uses_labels_that_its_query_keeps():
    for panel in PANELS:
        for target in panel["targets"]:
            kept = {label.strip() for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in by.split(",")}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, panel["title"]


def test_panels_do_not_overlap():
    for one, other in combinations(BOARD["panels"], 2):
        a, b = one["gridPos"], other["gridPos"]
        side_by_side = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert side_by_side or above, (one["title"], other["title"])
        assert a["x"] + a["w"] <= 24
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_the_data_source_is_chosen_at_import():
    assert {v["name"] for v in BOARD["templating"]["list"]} == {"datasource", "run"}
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)
