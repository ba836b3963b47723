"""Estimates against measurements."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.search.forecast import Forecasted
from reports import info
from reports.forecasts import get_forecasts
from reports.render import render_report
from tests.reports.synthetic import make_snapshot, make_trial

pytestmark = pytest.mark.unit


def test_each_estimated_objective_with_its_errors() -> None:
    forecasts = {forecast.axis.name: forecast for forecast in get_forecasts(make_snapshot(60, estimated=True))}
    assert list(forecasts) == ["speed", "memory"]
    assert 0.03 < forecasts["speed"].median_error_ratio < 0.15
    assert forecasts["speed"].within_ratio > 0.8
    assert forecasts["speed"].rank_correlation is not None
    assert "of" in forecasts["memory"].summary


def test_a_study_without_estimates_has_none() -> None:
    snapshot = make_snapshot(20)
    assert get_forecasts(snapshot) == ()
    assert not any(column.key.startswith("estimated") for column in info.get_table(snapshot).columns)


def test_the_page_and_the_table_show_them() -> None:
    snapshot = make_snapshot(40, estimated=True)
    assert "estimated and measured" in render_report(snapshot)
    table = info.get_table(snapshot)
    column = [column.key for column in table.columns].index("estimated.memory")
    assert np.isfinite([row[column] for row in table.rows]).all()


def test_equal_values_have_no_rank_correlation() -> None:
    trials = tuple(make_trial(n, forecast={"speed": Forecasted(1.0, 1.0, 1.0)}) for n in range(4))
    (forecast,) = get_forecasts(replace(make_snapshot(4), trials=trials))
    assert forecast.rank_correlation is None
