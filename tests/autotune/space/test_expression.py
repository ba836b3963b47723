"""The small language of conditions: what it computes, on scalars and columns alike, and what it refuses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.space.expression import parse_expression
from engine.errors import UserError

pytestmark = pytest.mark.unit

KNOWN = frozenset({"plan.tp", "plan.pp", "plan.recompute", "devices"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plan.tp * plan.pp <= devices", True),
        ("plan.tp > 2 or plan.recompute == 'full'", True),
        ("not plan.tp > 2", True),
        ("1 < plan.tp <= 2", True),
        ("plan.tp in [1, 4]", False),
        ("plan.tp in [plan.pp, 'full']", True),
        ("plan.recompute not in ['none', 'every_k']", True),
        ("devices % plan.tp == 0 and devices // plan.pp == 2", True),
        ("-plan.tp + 2 ** 3 == 6", True),
    ],
)
def test_conditions(text: str, value: bool) -> None:
    values = {"plan.tp": 2, "plan.pp": 2, "plan.recompute": "full", "devices": 4}
    assert bool(parse_expression(text, KNOWN)(values)) is value


@pytest.mark.parametrize(
    "text", ["8 / (plan.tp - 1) > 3", "8 % (plan.tp - 1) == 0", "8 // (plan.tp - 1) == 0", "plan.tp ** 99 > devices"]
)
def test_zero_divisors_and_large_powers_are_no_special_case(text: str) -> None:
    expression = parse_expression(text, KNOWN)
    column = expression({"plan.tp": np.array([1, 2]), "devices": 4})
    assert column.tolist() == [bool(expression({"plan.tp": tp, "devices": 4})) for tp in (1, 2)]


@pytest.mark.parametrize("recompute", ["full", np.array(["full", "none"])])
@pytest.mark.parametrize("text", ["plan.recompute < 3", "plan.recompute + 1 == 2", "-plan.recompute == 1"])
def test_words_are_no_numbers(text: str, recompute: str | np.ndarray) -> None:
    with pytest.raises(UserError, match="can't be computed") as error:
        parse_expression(text, KNOWN, where="space.yaml:3")({"plan.recompute": recompute})
    assert error.value.where == "space.yaml:3"


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=20), st.integers(1, 64))
def test_a_column_gives_what_its_rows_give(rows: list[tuple[int, int]], devices: int) -> None:
    text = "plan.tp * plan.pp <= devices and (plan.tp in [1, 2, plan.pp] or plan.pp not in [1, 3])"
    expression = parse_expression(text, KNOWN)
    tp, pp = np.array(rows).T
    columns = expression({"plan.tp": tp, "plan.pp": pp, "devices": devices})
    each = [bool(expression({"plan.tp": int(t), "plan.pp": int(p), "devices": devices})) for t, p in rows]
    assert columns.tolist() == each


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "plan.tp.real", "(lambda: 1)()", "plan.tp if devices else 1", "devices[0]",
        "f'{devices}'",
        "plan.tp =", "", "{1: 2}", "plan.tp == [1, 2]", "plan.tp in plan.pp", "[1]", "[x for x in [1]]", "devices := 3",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_expression(text, KNOWN, where="space.yaml:3")
    assert error.value.where == "space.yaml:3"
    assert error.value.hint


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown name 'plan\.pt'") as error:
        parse_expression("plan.pt > 1", KNOWN)
    assert "plan.tp" in str(error.value.hint) or "plan.pp" in str(error.value.hint)
