"""Each token is predicted once, never across documents, and its bytes are counted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.sequences import IGNORED_LABEL, TokenSet
from engine.errors import UserError

pytestmark = pytest.mark.unit

END = 256


def token_set(documents: list[list[int]], *, pad_tail: bool) -> TokenSet:
    tokens = np.array([token for document in documents for token in [*document, END]], dtype=np.uint16)
    return TokenSet(tokens, np.where(tokens == END, 0, 1 + tokens % 3).astype(np.uint8), END, pad_tail)


def test_labels_by_hand() -> None:
    batch = token_set([[1, 2, 3], [4, 5]], pad_tail=True).sequences(4).batch(np.array([0, 1]))
    assert batch.tokens.tolist() == [[1, 2, 3, END], [4, 5, END, END]]
    assert batch.labels.tolist() == [[2, 3, END, IGNORED_LABEL], [5, END, IGNORED_LABEL, IGNORED_LABEL]]
    assert batch.ids.tolist() == [0, 1]


@pytest.mark.parametrize(("num_tokens", "padded", "dropped"), [(8, 2, 1), (9, 2, 2), (5, 1, 1), (4, 1, 1), (2, 1, 1)])
def test_the_tail_is_padded_for_evaluation_and_left_out_of_training(num_tokens: int, padded: int, dropped: int) -> None:
    document = [list(range(num_tokens - 1))]
    assert len(token_set(document, pad_tail=True).sequences(4)) == padded
    assert len(token_set(document, pad_tail=False).sequences(4)) == dropped


@given(
    st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=12), min_size=1, max_size=8),
    st.integers(1, 9),
)
def test_every_token_but_the_first_of_each_document_is_predicted_once(documents: list[list[int]], length: int) -> None:
    source = token_set(documents, pad_tail=True)
    sequences = source.sequences(length)
    ids = np.arange(len(sequences))
    batch = sequences.batch(ids)
    labels = batch.labels.numpy()
    predicted = labels[labels != IGNORED_LABEL].tolist()
    assert predicted == [token for document in documents for token in [*document[1:], END]]
    expected = sum(1 + token % 3 for document in documents for token in document[1:])
    assert sequences.num_bytes_predicted(ids) == expected
    assert sum(sequences.num_bytes_predicted(ids[i : i + 1]) for i in ids) == expected


def test_sequences_do_not_depend_on_the_batch_they_are_in() -> None:
    sequences = token_set([list(range(50)), list(range(30))], pad_tail=True).sequences(7)
    together = sequences.batch(np.array([5, 0, 11]))
    for row, i in enumerate((5, 0, 11)):
        alone = sequences.batch(np.array([i]))
        assert together.tokens[row].equal(alone.tokens[0])
        assert together.labels[row].equal(alone.labels[0])


def test_one_token_is_too_few() -> None:
    with pytest.raises(UserError, match="two tokens"):
        token_set([[]], pad_tail=True).sequences(4)
