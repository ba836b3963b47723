"""Split, hash and cache of a corpus."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.data.corpus import CACHE_VARIABLE, Corpus, prepare_corpus
from engine.data.sequences import TokenSet
from engine.errors import UserError
from engine.spec import DataSpec

pytestmark = pytest.mark.unit


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Forty documents in JSONL, every fourth twice."""
    folder = tmp_path / "texts"
    folder.mkdir()
    documents = [f"document {i - 1 if i % 4 == 1 else i} has some text" for i in range(40)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def data(path: Path, **settings: object) -> DataSpec:
    return DataSpec(paths=(str(path),), holdout_ratio=0.3, **settings)


def documents(side: TokenSet) -> list[str]:
    tokens = np.asarray(side.tokens)
    return [
        bytes(part[part != side.end_of_document].astype(np.uint8)).decode()
        for part in np.split(tokens, np.flatnonzero(tokens == side.end_of_document) + 1)[:-1]
    ]


def corpus_folder(cache: Path) -> Path:
    (folder,) = [path for path in (cache / "corpora").iterdir() if path.is_dir()]
    return folder


def same(one: Corpus, two: Corpus) -> bool:
    return one.hash == two.hash and np.array_equal(one.train.tokens, two.train.tokens)


def test_documents_are_split_whole_and_equal_ones_stay_together(texts: Path, cache: Path) -> None:
    corpus = prepare_corpus(data(texts), cache)
    train, held_out = documents(corpus.train), documents(corpus.held_out)
    assert len(train) + len(held_out) == corpus.num_documents == 40
    assert not set(train) & set(held_out)
    assert 2 <= len(held_out) <= 25
    assert corpus.num_bytes == sum(len(text) for text in train + held_out)
    assert corpus.vocab_size == 257
    assert corpus.held_out.pad_tail
    assert not corpus.train.pad_tail


def test_a_second_call_reads_no_text(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare_corpus(data(texts), cache)
    monkeypatch.setattr("engine.data.corpus.read_documents", lambda *_: pytest.fail("read again"))
    assert same(first, prepare_corpus(data(texts), cache))


def test_the_hash_covers_text_and_split_but_not_the_place(texts: Path, cache: Path, tmp_path: Path) -> None:
    first = prepare_corpus(data(texts), cache)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "other.jsonl").write_text((texts / "a.jsonl").read_text())
    assert same(first, prepare_corpus(data(moved), cache))
    assert prepare_corpus(DataSpec(paths=(str(texts),), holdout_ratio=0.1), cache).hash != first.hash
    (texts / "a.jsonl").write_text((texts / "a.jsonl").read_text().replace("some", "more"))
    assert prepare_corpus(data(texts), cache).hash != first.hash


@pytest.mark.parametrize("ratio", [1e-9, 0.4999])
def test_two_documents_make_two_sides(tmp_path: Path, cache: Path, ratio: float) -> None:
    (tmp_path / "a.txt").write_text("one text")
    (tmp_path / "b.txt").write_text("another text")
    corpus = prepare_corpus(DataSpec(paths=(str(tmp_path),), holdout_ratio=ratio), cache)
    assert sorted(documents(corpus.train) + documents(corpus.held_out)) == ["another text", "one text"]
    assert len(documents(corpus.held_out)) == 1


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([""], "the corpus is empty"),
        (["only one"], "1 document without two different"),
        (["same", "same", "same"], "3 documents without two different"),
        (["a", "b", "c"], "no token to predict"),
    ],
)
def test_corpora_that_cannot_be_split_are_told(tmp_path: Path, cache: Path, contents: list[str], message: str) -> None:
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.txt").write_text(content)
    with pytest.raises(UserError, match=message):
        prepare_corpus(data(tmp_path), cache)
    left = [path.name for path in (cache / "corpora").iterdir() if not path.name.endswith(".lock")]
    assert left == [], "a failed build leaves nothing behind"


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "no manifest"])
def test_a_damaged_cache_is_built_again(texts: Path, cache: Path, damage: str) -> None:
    first = prepare_corpus(data(texts), cache)
    expected = np.array(first.train.tokens)
    folder = corpus_folder(cache)
    if damage == "truncate":
        (folder / "train.tokens").write_bytes(b"\0\0")
    elif damage == "remove":
        (folder / "held_out.token_bytes").unlink()
    elif damage == "manifest":
        (folder / "manifest.json").write_text('{"hash": ')
    else:
        (folder / "manifest.json").unlink()
    again = prepare_corpus(data(texts), cache)
    assert again.hash == first.hash
    assert np.array_equal(again.train.tokens, expected)


def test_leftovers_of_a_killed_builder_are_removed(texts: Path, cache: Path) -> None:
    prepare_corpus(data(texts), cache)
    folder = corpus_folder(cache)
    leftover = folder.with_name(f".{folder.name}.killed")
    leftover.mkdir()
    (leftover / "train.tokens").write_bytes(b"half")
    (folder / "manifest.json").unlink()
    prepare_corpus(data(texts), cache)
    assert not leftover.exists()


def test_several_processes_may_start_at_once(texts: Path, cache: Path, repo_root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.data.corpus import prepare_corpus; from engine.spec import "
        "DataSpec; print(prepare_corpus(DataSpec(paths=(sys.argv[1],), holdout_ratio=0.3), Path(sys.argv[2])).hash)"
    )
    command = [sys.executable, "-c", code, str(texts), str(cache)]
    children = [subprocess.Popen(command, cwd=repo_root, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    hashes = {child.communicate()[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    assert hashes == {prepare_corpus(data(texts), cache).hash}
    assert corpus_folder(cache)


def test_a_cache_that_is_no_folder_is_told(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write tokenised text"):
        prepare_corpus(data(texts), tmp_path / "file")


def test_without_a_writable_home_the_temporary_folder_is_used(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("a file, so that nothing can be written below it")
    (tmp_path / "tmp").mkdir()
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    prepare_corpus(data(texts))
    assert list((tmp_path / "tmp").glob("paretune-*/corpora/*/manifest.json"))


def test_the_variable_names_the_cache(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    prepare_corpus(data(texts))
    assert corpus_folder(cache)
