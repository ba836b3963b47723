"""Studies made of others: nothing is lost or doubled, trials say where they came from, what does not fit is told."""

import csv
import io
import json
import math
import sqlite3
from pathlib import Path
from typing import Any

import optuna
import pytest

import autotune
from autotune.study.frame import csv_text, json_text, table_rows
from autotune.study.merge import merge_studies
from autotune.study.optuna_import import import_optuna
from autotune.study.study import load_snapshot
from engine.errors import UserError

SPACE: dict[str, Any] = {"x": {"float": [0, 1]}, "n": [1, 2]}
LOSS = {"loss": "minimize"}


def sweep(folder: Path, trials: int, seed: int = 0, space: dict[str, Any] = SPACE) -> None:
    def function(x: float, n: int, trial: autotune.Trial) -> float:
        if trial.number == 1:
            raise ValueError("as asked")
        return x + n

    with autotune.Study(space, LOSS, folder=folder, sampler="random", seed=seed) as study:
        study.run(function, trials=trials)


def test_a_merge_renumbers_trials_and_says_where_they_came_from(tmp_path: Path) -> None:
    sweep(tmp_path / "a", 3)
    sweep(tmp_path / "b", 4, seed=1)
    merged = merge_studies([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    rows = load_snapshot(tmp_path / "c").trials
    assert (merged.num_trials, merged.num_repeats, merged.num_unfinished) == (7, 0, 0)
    assert [row.number for row in rows] == list(range(7))
    assert [row.origin for row in rows] == ["a/0", "a/1", "a/2", "b/0", "b/1", "b/2", "b/3"]
    assert [row.outcome.kind for row in rows if row.outcome] == ["ok", "user", "ok", "ok", "user", "ok", "ok"]
    before = [row.values for name in "ab" for row in load_snapshot(tmp_path / name).trials]
    assert [row.values for row in rows] == before


def test_a_merged_study_goes_on_and_counts_what_it_has(tmp_path: Path) -> None:
    sweep(tmp_path / "a", 3)
    sweep(tmp_path / "b", 3, seed=1)
    merge_studies([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    with autotune.Study.open(tmp_path / "c") as study:
        assert len(study.run(lambda x, n: x, trials=8).trials) == 8


def test_what_stands_in_both_is_there_once_and_equal_candidates_are_repeats(tmp_path: Path) -> None:
    discrete = {"x": [0.25, 0.5], "n": [1, 2]}
    sweep(tmp_path / "a", 4, space=discrete)
    sweep(tmp_path / "b", 4, seed=1, space=discrete)
    merge_studies([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    merged = merge_studies([tmp_path / "c", tmp_path / "a"], tmp_path / "d")
    rows = load_snapshot(tmp_path / "d").trials
    assert (merged.num_trials, merged.num_repeats, merged.num_same) == (4, 4, 4)
    repeats = [row for row in rows if row.repeat_of is not None]
    assert [row.origin.partition("/")[0] for row in repeats] == ["b"] * 4
    assert all(row.parameters == rows[row.repeat_of].parameters for row in repeats if row.repeat_of is not None)


def test_studies_of_one_seed_do_not_repeat_each_other(tmp_path: Path) -> None:
    """Their trials of one candidate have one seed: a mean over them would be one of equals."""
    sweep(tmp_path / "a", 3)
    sweep(tmp_path / "b", 4)
    merged = merge_studies([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert (merged.num_trials, merged.num_repeats, merged.num_same) == (4, 0, 3)


def test_unfinished_trials_are_left_out_and_mixed_states_are_a_table(tmp_path: Path) -> None:
    sweep(tmp_path / "a", 2)
    with autotune.Study(SPACE, LOSS, folder=tmp_path / "b", sampler="random") as study:
        study.run(lambda x, n: math.nan if n == 1 else x, trials=4)
        assert study.ask() is not None
        snapshot = load_snapshot(tmp_path / "b")
        states = [row["state"] for row in table_rows(snapshot)]
        assert states[-1] == "running"
        assert set(states) == {"ok", "nan", "running"}
        read = list(csv.DictReader(io.StringIO(csv_text(snapshot))))
        assert [row["state"] for row in read] == states
        assert read[-1]["value.loss"] == ""
        data = json.loads(json_text(snapshot))
        assert [row["param.n"] for row in data["trials"]] == [row.parameters["n"] for row in snapshot.trials]
        assert merge_studies([tmp_path / "a", tmp_path / "b"], tmp_path / "c").num_unfinished == 1


def test_unequal_spaces_are_not_merged(tmp_path: Path) -> None:
    sweep(tmp_path / "a", 1)
    sweep(tmp_path / "b", 1, space={"x": {"float": [0, 2]}, "n": [1, 2]})
    with pytest.raises(UserError, match=r"space\.x\.float"):
        merge_studies([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    with pytest.raises(UserError, match="two different"):
        merge_studies([tmp_path / "a", tmp_path / "a"], tmp_path / "c")
    with pytest.raises(UserError, match="already"):
        merge_studies([tmp_path / "a", tmp_path / "b"], tmp_path / "a")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "note.txt").write_text("mine")
    with pytest.raises(UserError, match="something else"):
        merge_studies([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_an_optuna_study_keeps_values_failures_and_pruned_trials(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/optuna.db"
    source = optuna.create_study(study_name="old", storage=url, direction="maximize")
    source.set_metric_names(["val/accuracy"])

    def objective(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("learning rate", 1e-4, 1e-1, log=True)
        trial.suggest_int("layers", 2, 8, step=2)
        trial.suggest_int("width", 4, 4096, log=True)
        trial.suggest_categorical("kind", ["a", "b"])
        trial.suggest_float("dropout", 0.0, 0.5, step=0.1)
        trial.set_user_attr("seconds", 1.5)
        if trial.number == 2:
            raise ValueError("as asked")
        if trial.number == 3:
            trial.report(0.25, 7)
            raise optuna.TrialPruned
        return math.inf if trial.number == 4 else rate

    source.optimize(objective, n_trials=6, catch=ValueError)
    source.ask()
    imported = import_optuna(url, None, tmp_path / "ours")
    snapshot = load_snapshot(tmp_path / "ours")
    rows = snapshot.trials
    assert (imported.num_trials, imported.num_failed, imported.num_left_out) == (6, 3, 1)
    assert imported.notes == ("val/accuracy is called val_accuracy", "learning rate is called learning_rate")
    assert [(o.name, o.direction) for o in snapshot.objectives] == [("val_accuracy", "maximize")]
    assert [row.outcome.kind for row in rows if row.outcome] == ["ok", "ok", "user", "interrupted", "nan", "ok"]
    assert rows[3].outcome is not None
    assert rows[3].outcome.detail == "pruned at step 7, with 0.25"
    for row, trial in zip(rows, source.trials, strict=False):
        assert row.origin == f"old/{trial.number}"
        assert row.parameters["learning_rate"] == trial.params["learning rate"]
        assert row.parameters["width"] == trial.params["width"]
        assert row.parameters["dropout"] == pytest.approx(trial.params["dropout"])
    with sqlite3.connect(tmp_path / "optuna.db") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",), "left as it was"
    assert rows[0].values == {"val_accuracy": source.trials[0].value}
    with autotune.Study.open(tmp_path / "ours", sampler="random") as study:
        assert len(study.run(lambda **values: 0.5, trials=8).trials) == 8


def test_several_ranges_become_one_that_holds_every_trial(tmp_path: Path) -> None:
    path = str(tmp_path / "journal.log")
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))
    source = optuna.create_study(study_name="s", storage=storage, directions=["minimize", "maximize"])
    source.optimize(lambda t: (t.suggest_int("n", 1, 4), t.suggest_float("x", 0, 1)), n_trials=2)
    source.optimize(lambda t: (t.suggest_int("n", 3, 9, step=3), t.suggest_float("x", 0, 1)), n_trials=2)
    imported = import_optuna(path, "s", tmp_path / "ours")
    assert imported.notes == ("n had several ranges; it is searched from 1 to 9",)
    snapshot = load_snapshot(tmp_path / "ours")
    assert [o.name for o in snapshot.objectives] == ["value_0", "value_1"]
    assert [row.parameters["n"] for row in snapshot.trials] == [trial.params["n"] for trial in source.trials]


def test_what_cannot_be_imported_is_told(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/optuna.db"
    with pytest.raises(UserError, match="no database"):
        import_optuna(url, "s", tmp_path / "ours")
    (tmp_path / "empty.db").touch()
    with pytest.raises(UserError, match=r"cannot open the storage .*no such table"):
        import_optuna(f"sqlite:///{tmp_path}/empty.db", "s", tmp_path / "ours")
    assert (tmp_path / "empty.db").read_bytes() == b"", "another program's database is left as it is"
    storage = optuna.storages.RDBStorage(url)
    storage.create_new_study([optuna.study.StudyDirection.NOT_SET], "vague")
    with pytest.raises(UserError, match="there is no study 's'"):
        import_optuna(url, "s", tmp_path / "ours")
    storage.create_new_study([optuna.study.StudyDirection.MINIMIZE], "other")
    with pytest.raises(UserError, match=r"holds: other, vague\)\nhint: say which: --optuna-name NAME"):
        import_optuna(url, None, tmp_path / "ours")
    with pytest.raises(UserError, match="does not say whether"):
        import_optuna(url, "vague", tmp_path / "ours")
    path = str(tmp_path / "journal.log")
    journal = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))
    mixed = optuna.create_study(study_name="mixed", storage=journal)
    numbers, words = optuna.distributions.IntDistribution(1, 4), optuna.distributions.CategoricalDistribution(["a"])
    for distribution, value in ((numbers, 2), (words, "a")):
        trial = optuna.trial.create_trial(params={"p": value}, distributions={"p": distribution}, value=1.0)
        journal.create_new_trial(mixed._study_id, trial)
    with pytest.raises(UserError, match="categorical and int"):
        import_optuna(path, "mixed", tmp_path / "ours")
    for text in ('{"a": 1}\n', "[1]\n", '{"op_code": 99, "worker_id": "x"}\n'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(UserError, match="can't be read as an Optuna journal"):
            import_optuna(str(tmp_path / "other.json"), None, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
