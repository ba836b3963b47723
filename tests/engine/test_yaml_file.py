"""YAML as people expect it, and errors with file and line."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import UserError
from engine.yaml_file import dump_yaml, parse_yaml, read_yaml

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1E5", 1e5), ("-.5", -0.5), ("1.", 1.0), ("010", 10), ("0x1F", 31), ("0o17", 15),
        ("on", "on"), ("off", "off"), ("yes", "yes"), ("no", "no"), ("true", True), ("False", False),
        ("~", None), ("null", None), ("", None), ("'1e-4'", "1e-4"), ("1_000", "1_000"), ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"), (".inf", math.inf), ("4Mi-tokens", "4Mi-tokens"),
    ],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    read = parse_yaml(f"key: {text}").data["key"]
    assert read == value
    assert type(read) is type(value)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab1on", min_size=1, max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
@example(["a\x85b", "\u2028", "\u2029 c"])
def test_what_is_written_reads_back_equal(value: object) -> None:
    read = parse_yaml(dump_yaml({"key": value})).data["key"]
    assert read == value
    assert repr(read) == repr(value)


def test_every_value_knows_its_line() -> None:
    document = parse_yaml("a:\n  b: 1\n  c:\n    - 2\n    - 3\n", "file.yaml")
    assert document.where(("a", "c", 1)) == "file.yaml:5"
    assert document.where(("a", "missing")) == "file.yaml:1"


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("a: 1\na: 2", "stands twice", 2),
        ("a: [1, 2", "not valid YAML", 1),
        ("a: 1\n b: 2", "not valid YAML", 2),
        ("1: x", "keys must be words", 1),
        ("a: !!python/object:os.system x", "not valid YAML", 1),
    ],
)
def test_malformed_files_are_told_with_their_line(text: str, message: str, line: int) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_yaml(text, "space.yaml")
    assert error.value.where is not None
    assert error.value.where.startswith("space.yaml:")
    assert abs(int(error.value.where.split(":")[1]) - line) <= 1
    assert error.value.hint


def test_missing_files_folders_and_binaries_are_told_apart(tmp_path) -> None:
    (tmp_path / "space.yaml").write_text("a: 1")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not found") as error:
        read_yaml(tmp_path / "spaec.yaml")
    assert "space.yaml" in str(error.value.hint)
    with pytest.raises(UserError, match="folder"):
        read_yaml(tmp_path)
    with pytest.raises(UserError, match="null byte"):
        read_yaml("a\0b")
    with pytest.raises(UserError, match="UTF-8"):
        read_yaml(tmp_path / "binary")
