"""Which files make a corpus, and what is said of those that can't."""

import json
import os
from pathlib import Path

import pytest

from engine.data.documents import find_files, read_documents
from engine.errors import UserError
from engine.spec import DataSpec

pytestmark = pytest.mark.unit


def spec(*paths: Path | str, **settings: object) -> DataSpec:
    return DataSpec(paths=tuple(map(str, paths)), **settings)


def texts(data: DataSpec) -> list[str]:
    return list(read_documents(find_files(data), data))


def test_a_text_file_is_one_document_and_a_record_too(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("whole\nfile")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n\n{"text": "second", "id": 2}\n')
    assert texts(spec(tmp_path)) == ["first", "second", "whole\nfile"]


def test_folders_are_in_the_order_of_relative_paths_without_hidden_files(tmp_path: Path) -> None:
    for name in ("z.txt", "a/b.txt", "a.txt", ".hidden.txt", ".git/c.txt", "image.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(spec(tmp_path)) == ["a.txt", "a/b.txt", "z.txt"]


def test_a_file_reached_twice_is_taken_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert texts(spec(tmp_path / "a.txt", tmp_path)) == ["text"]


def test_the_standard_library_is_a_corpus() -> None:
    data = spec("python-stdlib", max_bytes=50_000)
    files = find_files(data)
    names = [file.path.as_posix() for file in files]
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not any("site-packages" in name or "dist-packages" in name for name in names)
    assert 0 < sum(len(text.encode()) for text in texts(data)) <= 50_000


def test_max_bytes_takes_whole_documents_and_reads_no_further(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1234")
    (tmp_path / "b.txt").write_text("é678")  # five bytes
    (tmp_path / "c.txt").write_bytes(b"\0 never read")
    assert texts(spec(tmp_path, max_bytes=9)) == ["1234", "é678"]
    assert texts(spec(tmp_path, max_bytes=8)) == ["1234"]
    with pytest.raises(UserError, match="more than max_bytes = 3"):
        texts(spec(tmp_path, max_bytes=3))


def test_a_few_undecodable_bytes_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9")
    assert texts(spec(tmp_path)) == ["caf\N{REPLACEMENT CHARACTER}"]


def test_half_a_surrogate_pair_in_json_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x\\ud800"}\n')
    (text,) = texts(spec(tmp_path))
    assert text.startswith("x")
    assert text.encode().decode() == text


@pytest.mark.parametrize("content", [b"PNG\0\1\2", bytes(range(128, 256)) * 4])
def test_binary_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match="not UTF-8 text") as caught:
        texts(spec(tmp_path))
    assert "a.txt" in caught.value.message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not a JSON record"),
        ("[" * 100_000, "not a JSON record"),
        ("[1]", "must be a JSON object, got list"),
        ('{"body": "x"}', "'text' is missing; keys: body"),
        ('{"text": 3}', "'text' is not text"),
    ],
)
def test_a_bad_record_is_told_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "good"}) + f"\n{line}\n")
    with pytest.raises(UserError, match=message) as caught:
        texts(spec(path))
    assert caught.value.where == f"{path}:2"


def test_missing_paths_and_fruitless_folders_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        find_files(spec(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"matches the patterns \*\.rst"):
        find_files(spec(tmp_path, patterns=("*.rst",)))
    with pytest.raises(UserError, match="neither a file nor a folder"):
        find_files(spec("/dev/null"))


def test_unreadable_files_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    monkeypatch.setattr(os, "access", lambda *_: False)  # as for anybody but root after chmod 0
    with pytest.raises(UserError, match="no permission to read"):
        find_files(spec(path))
