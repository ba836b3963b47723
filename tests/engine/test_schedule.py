"""Learning-rate schedules as functions of tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.schedule import learning_rate_at
from engine.spec import Hyperparameters

pytestmark = pytest.mark.unit


def test_landmarks() -> None:
    cosine = Hyperparameters(learning_rate=1.0, schedule="cosine", warmup_ratio=0.1, min_lr_ratio=0.2)
    assert learning_rate_at(cosine, 50, 1000) == pytest.approx(0.5)
    assert learning_rate_at(cosine, 100, 1000) == pytest.approx(1.0)
    assert learning_rate_at(cosine, 550, 1000) == pytest.approx(0.6)
    assert learning_rate_at(cosine, 1000, 1000) == learning_rate_at(cosine, 2000, 1000) == pytest.approx(0.2)
    wsd = cosine.changed(schedule="wsd", decay_ratio=0.4)
    assert [learning_rate_at(wsd, tokens, 1000) for tokens in (100, 600, 800, 1000)] == pytest.approx([1, 1, 0.6, 0.2])
    constant = cosine.changed(schedule="constant")
    assert learning_rate_at(constant, 1000, 1000) == 1.0


@given(
    schedule=st.sampled_from(["constant", "cosine", "wsd"]),
    warmup=st.floats(0, 0.5),
    decay=st.floats(0, 0.5),
    done=st.floats(0, 1.5),
)
def test_it_stays_between_zero_and_the_peak_and_follows_tokens_alone(schedule, warmup, decay, done) -> None:
    hyper = Hyperparameters(learning_rate=3e-3, schedule=schedule, warmup_ratio=warmup, decay_ratio=decay)
    rate = learning_rate_at(hyper, done * 10_000, 10_000)
    assert 0 <= rate <= 3e-3
    assert rate == pytest.approx(learning_rate_at(hyper, done * 20_000, 20_000), abs=1e-12)
