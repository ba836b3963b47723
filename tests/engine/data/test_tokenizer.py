"""Token ids, the end of a document, and exact byte counts."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
from engine.errors import UserError

pytestmark = pytest.mark.unit

TEXTS = ["the quick brown fox", "naïve café — 你好, мир", "👩‍🚀 in space 👩‍🚀", "  a \n\n b  ", "x"]


def byte_level(special: tuple[str, ...] = ("<|endoftext|>",)) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def saved(tokenizer: tokenizers.Tokenizer, folder: Path) -> HuggingFaceTokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(folder / "tokenizer.json")


@given(st.text())
def test_bytes_are_the_tokens_of_the_byte_tokenizer(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    encoded = ByteTokenizer().encode(text)
    assert bytes(encoded.ids.astype(np.uint8)) == text.encode()
    assert encoded.num_bytes.sum() == len(text.encode())


def test_bytes_of_a_byte_level_tokenizer_add_up_token_by_token(tmp_path: Path) -> None:
    original = byte_level()
    tokenizer = saved(original, tmp_path)
    for text in TEXTS:
        encoded = tokenizer.encode(text)
        assert encoded.num_bytes.sum() == len(text.encode())
        if text.isascii():  # no character is split: each token's own text has the bytes
            assert encoded.num_bytes.tolist() == [len(original.decode([i])) for i in encoded.ids]


def test_bytes_that_a_normaliser_drops_belong_to_the_next_token_or_the_last(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.normalizer = normalizers.Strip()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ours = saved(tokenizer, tmp_path)
    encoded = ours.encode("  a \N{EM DASH}b  ")
    assert encoded.num_bytes.sum() == len("  a \N{EM DASH}b  ".encode())
    assert encoded.num_bytes[0] == 3
    assert len(ours.encode("   ").ids) == 0


def test_the_end_is_the_customary_special_token(tmp_path: Path) -> None:
    tokenizer = saved(byte_level(), tmp_path)
    assert tokenizer.end_of_document == 0
    assert tokenizer.vocab_size == 300


def test_the_end_is_what_the_tokenizer_config_states(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert saved(byte_level(("<|endoftext|>", "<stop>")), tmp_path).end_of_document == 1


def test_the_end_is_one_id_more_without_such_a_token(tmp_path: Path) -> None:
    tokenizer = saved(byte_level(special=()), tmp_path)
    assert tokenizer.end_of_document == 300
    assert tokenizer.vocab_size == 301


def test_text_cannot_end_a_document(tmp_path: Path) -> None:
    tokenizer = saved(byte_level(), tmp_path)
    encoded = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end_of_document not in encoded.ids
    assert encoded.num_bytes.sum() == len("a<|endoftext|>b")


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    original = byte_level()
    original.enable_truncation(2)
    original.enable_padding(length=64)
    assert len(saved(original, tmp_path).encode("qqqqqq").ids) == 6


def test_equal_files_have_equal_identity(tmp_path: Path) -> None:
    one = saved(byte_level(), tmp_path)
    assert one.identity == load_tokenizer(str(tmp_path)).identity != load_tokenizer("bytes").identity


def test_no_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        load_tokenizer(str(tmp_path / "absent.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer"):
        load_tokenizer(str(tmp_path))
