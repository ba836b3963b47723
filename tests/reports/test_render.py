"""The page: whole, self-contained and safe for every kind of study."""

import base64
import csv
import gzip
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from reports.render import front_csv, render_report, write_report
from tests.reports.synthetic import GIB, HOSTILE, make_snapshot

pytestmark = pytest.mark.unit

VOID = {"meta", "link", "input", "br", "img"}
STUDIES = {
    "usual": make_snapshot(70, num_pending=3, num_repeats=2),
    "one objective": make_snapshot(70, names=("quality",)),
    "two objectives": make_snapshot(25, names=("speed", "memory"), bounds={"memory": 1.4 * GIB}),
    "one trial": make_snapshot(1, failure_ratio=0),
    "no trial": make_snapshot(0),
    "only pending": make_snapshot(0, num_pending=3),
    "none successful": make_snapshot(12, failure_ratio=1),
    "none feasible": make_snapshot(12, bounds={"speed": 1e9}),
    "hostile": make_snapshot(40, hostile=True, num_pending=2),
}


class Page(HTMLParser):
    """Collects elements and texts, and checks that elements nest."""

    def __init__(self, html):
        super().__init__()
        self.elements = []
        self.data = {}
        self.text = ""
        self._open = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "script":
            self.data[attributes.get("id", "program")] = data
        elif tag != "style":
            self.text += data

    @property
    def page_data(self):
        return json.loads(self.data["data"])


@pytest.fixture(scope="module", params=STUDIES)
def study(request):
    return request.param


@pytest.fixture(scope="module")
def page(study):
    return Page(render_report(STUDIES[study]))


def test_nothing_outside_the_page_is_asked_for(page):
    for tag, attributes in page.elements:
        assert tag not in {"img", "iframe", "object", "embed", "base"}
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith(("#", "data:")), attributes
        assert not any(name.startswith("on") for name in attributes)
    assert "http" not in page.data["program"]


def test_every_figure_has_a_place_and_data(page):
    places = {attributes["data-figure"] for _, attributes in page.elements if "data-figure" in attributes}
    assert places == set(page.page_data["figures"])


def test_the_table_holds_every_trial(page, study):
    assert [row[0] for row in page.page_data["rows"]] == [trial.number for trial in STUDIES[study].trials]


def test_the_library_is_there_once_where_it_is_needed(page):
    assert ("plotly" in page.data) == bool(page.page_data["figures"])
    if "plotly" in page.data:
        assert b"Plotly" in gzip.decompress(base64.b64decode(page.data["plotly"]))[:3_000_000]


def test_the_anchors_of_the_navigation_exist(page):
    targets = {attributes.get("id") for _, attributes in page.elements}
    links = {attributes["href"][1:] for tag, attributes in page.elements if tag == "a"}
    assert links <= targets


@pytest.mark.parametrize(
    ("study", "figures"),
    [
        ("usual", {"pair-speed-memory", "pair-speed-quality", "pair-memory-quality", "cloud", "history", "parallel",
                   "importance"}),
        ("one objective", {"pair-trial-quality", "history", "parallel", "importance"}),
        ("two objectives", {"pair-speed-memory", "history", "parallel"}),
        ("one trial", {"pair-speed-memory", "pair-speed-quality", "pair-memory-quality", "cloud", "history"}),
        ("none successful", set()),
    ],
)  # fmt: skip
def test_figures_of_a_study(study, figures):
    assert set(Page(render_report(STUDIES[study])).page_data["figures"]) == figures


def test_hostile_words_stay_words():
    html = render_report(STUDIES["hostile"])
    page = Page(html)
    assert HOSTILE in page.text
    assert html.count("<img") == 0
    for figure in page.page_data["figures"].values():
        for trace in figure["data"]:
            for name in [trace.get("name", ""), *(d["label"] for d in trace.get("dimensions", []))]:
                assert "<" not in name
    assert any(HOSTILE in row for row in page.page_data["rows"])


def test_the_knee_is_recommended_in_words():
    text = Page(render_report(STUDIES["usual"])).text
    assert "Recommended: the knee" in text
    assert "slower than the fastest" in text
    assert "autotune apply tiny --pick knee -o run.yaml" in text


def test_a_large_study_stays_small(tmp_path):
    path = write_report(make_snapshot(5000, num_pending=3), tmp_path / "out" / "page.html")
    assert path.stat().st_size < 4e6
    assert len(Page(path.read_text()).page_data["rows"]) == 5003


def test_front_as_csv():
    snapshot = make_snapshot(40)
    rows = list(csv.DictReader(front_csv(snapshot).splitlines()))
    values = {str(trial.number): trial.values for trial in snapshot.trials}
    assert [row["knee"] for row in rows].count("true") == 1
    for row in rows:
        assert float(row["tokens_per_second"]) == values[row["trial"]]["speed"]
        assert float(row["held_out_loss"]) == values[row["trial"]]["quality"]
    assert "hyperparameters.learning_rate" in rows[0]
    assert front_csv(make_snapshot(0)) == "trial,knee,plan,tokens_per_second,peak_memory_bytes,held_out_loss\n"


def test_the_page_of_a_program_speaks_of_no_plans():
    program = replace(make_snapshot(5), space={"objectives": [], "space": {"x": [1, 2]}})
    assert 'placeholder="words of a row' in render_report(program)
    assert 'placeholder="dp2 bf16' in render_report(make_snapshot(5))
