"""Quantities as people write them."""

import pytest

from engine import units
from engine.errors import UserError

pytestmark = pytest.mark.unit


def test_counts_bytes_and_durations() -> None:
    assert units.parse_tokens("4Mi-tokens") == 4 * 2**20
    assert units.parse_tokens("2M") == units.parse_tokens(2_000_000) == units.parse_tokens("2e6") == 2_000_000
    assert units.parse_bytes("70GiB") == 70 * 2**30
    assert units.parse_bytes("1.5GB") == 1_500_000_000
    assert units.parse_duration("10m") == 600
    assert units.parse_interval("200steps") == units.Interval(num_steps=200)
    assert units.parse_interval("30s") == units.Interval(seconds=30)


def test_batches_round_to_the_nearest_legal_value_and_say_so() -> None:
    assert units.parse_batch("512-seqs", 1024) == units.BatchSize(512)
    assert units.parse_batch("4Mi-tokens", 8192) == units.BatchSize(512)
    rounded = units.parse_batch("1M-tokens", 1024, multiple_of=8)
    assert rounded.num_sequences == 976
    assert "rounded to 976" in rounded.note


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("4M", "did you mean 4M-tokens? Write 4M-seqs"), ("4Mi-token", "did you mean 4Mi-tokens?"),
        ("512seqs", "did you mean 512-seqs?"), ("512-sequences", "512-seqs?"), ("4Mi tokens", "4Mi-tokens?"),
        ("100-tokens", "give 8192-tokens or more"),
    ],
)  # fmt: skip
def test_batches_that_mean_something_else_are_refused(text: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        units.parse_batch(text, 8192)
    assert hint in str(error.value.hint)


def test_large_batches_may_be_meant() -> None:
    assert units.parse_batch("4M-seqs", 8192).num_sequences == units.parse_batch(4_000_000, 8192).num_sequences
    assert units.parse_batch("8Ki", 8192) == units.BatchSize(8192)
    assert units.parse_batch("6000-tokens", 8192).num_sequences == 1


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.parse_tokens, "many"), (units.parse_tokens, "1.5"), (units.parse_tokens, "-3"),
        (units.parse_tokens, "1e400"), (units.parse_bytes, "70 parsecs"),
        (units.parse_duration, "0s"), (units.parse_duration, "soon"), (units.parse_interval, "0steps"),
        (units.parse_interval, "1.5steps"), (lambda text: units.parse_batch(text, 64), "0"),
    ],
)  # fmt: skip
def test_other_words_are_refused_with_examples(parse, text: str) -> None:
    with pytest.raises(UserError) as error:
        parse(text)
    assert repr(text) in error.value.message
    assert "example" in str(error.value.hint)


@pytest.mark.parametrize(
    ("text", "told"),
    [("7b", "did you mean 7B?"), ("1t", "did you mean 1T?"), ("2m", "did you mean 2M?"), ("4mi", "did you mean 4Mi?"),
     ("5x", "no suffix 'x'"), ("7b", "7B (10^9)"), ("many", "1T (10^12)")],
)  # fmt: skip
def test_a_suffix_in_the_wrong_case_is_told_with_the_right_one(text: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        units.parse_count(text)
    assert told in str(error.value.hint)


def test_formats() -> None:
    assert units.format_bytes(3 * 2**30) == "3.00 GiB"
    assert units.format_bytes(2**20) == "1.0 MiB"
    assert [units.format_bytes(size) for size in (0, 8, -2048, 99 * 2**10)] == [
        "0 B",
        "8 B",
        "-2.0 KiB",
        "99.0 KiB",
    ]
    assert units.format_count(1_240_000_000) == "1.24B"
    assert [units.format_count(n) for n in (512, 865.186, 999.4, 999.6, 999_600)] == ["512", "865", "999", "1k", "1M"]
    assert [units.format_duration(seconds) for seconds in (0.08, 12.5, 200, 7500)] == [
        "80ms",
        "12.5s",
        "3m20s",
        "2h05m",
    ]
