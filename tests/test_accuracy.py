"""`benchmarks/accuracy.py`: what counts as worse, what is recorded, and what cannot be compared."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from prism_match import UserError
from prism_match.evaluation.runner import Result, Score

FILE = Path(__file__).parents[1] / "benchmarks" / "accuracy.py"


@pytest.fixture
def accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with two measurements that take no time, and a record of its own."""
    spec = importlib.util.spec_from_file_location("accuracy", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "accuracy", module)
    spec.loader.exec_module(module)
    module.RECORD = tmp_path / "accuracy.json"
    info = SimpleNamespace(sha256="0" * 64)
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, info=info)
    monkeypatch.setattr(module, "Matcher", lambda *args, **kwargs: model)
    monkeypatch.setattr(module, "MEASUREMENTS", {})
    return module


def measure(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str, pairs: int = 9, **ours: float
) -> int:
    def score(name: str, value: float) -> object:
        return module.Score(value, 1.0, smaller_is_better=name == "error")

    for name, value in ours.items():
        scores = {"number": score(name, value)}
        module.MEASUREMENTS[name] = lambda bench, scores=scores: (pairs, scores)
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *words])
    return module.main()


def test_worse_is_noticed(accuracy: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert measure(accuracy, monkeypatch, auc=50, error=5) == 0
    assert "nothing to compare with" in capsys.readouterr().out and not accuracy.RECORD.exists()
    assert measure(accuracy, monkeypatch, "--record", auc=50, error=5) == 0
    for auc, error, worse in ((50, 5, 0), (49.1, 5.9, 0), (60, 1, 0), (48.9, 5, 1), (50, 6.1, 1)):
        assert measure(accuracy, monkeypatch, auc=auc, error=error) == worse
    assert "WORSE" in capsys.readouterr().out
    assert measure(accuracy, monkeypatch, auc=10, error=5, pairs=3) == 0, "other pairs cannot be compared"
    assert "not compared: 9 pairs were recorded" in capsys.readouterr().out


def test_only_what_is_measured_is_recorded(accuracy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(accuracy, monkeypatch, "--record", auc=50, error=5)
    assert measure(accuracy, monkeypatch, "--record", "--only", "auc", auc=40, error=4) == 0
    record = json.loads(accuracy.RECORD.read_text())
    assert record["auc"]["scores"]["number"] == {"ours": 40, "tolerance": 1}
    assert record["error"]["scores"]["number"]["ours"] == 5
    assert record["auc"]["pairs"] == 9 and record["auc"]["device"] == "CPU, float32"


def test_auc_is_a_mean_with_its_luck(accuracy: ModuleType) -> None:
    def result(*errors: float) -> Result:
        scores = tuple(Score(f"{n}", "", f"v_{n}", e) for n, e in enumerate(errors))
        return Result("pose", "x", {}, (10,), scores, {}, None)

    ours, sift = [result(0, 10), result(0, 0)], [result(0, 100), result(0, 100)]
    score = accuracy.auc_scores(ours, sift, (90,))["AUC@10"]
    assert score.ours == pytest.approx(75, abs=1) and score.sift == pytest.approx(50, abs=1)
    spread = abs(ours[0].auc["10"] - ours[1].auc["10"]) / 2**0.5
    assert score.tolerance == pytest.approx(3 * spread)
    assert score.reached is False and accuracy.auc_scores(ours, sift)["AUC@10"].reached
    assert accuracy.auc_scores(sift, sift)["AUC@10"].reached is False, "as good is not better"
    assert accuracy.working(sift) == {"v_0"} and accuracy.working(ours) == {"v_0", "v_1"}


def test_missing_data_is_named(accuracy: ModuleType, tmp_path: Path) -> None:
    for data, word in ((tmp_path, "oxford"), (None, "--data")):
        bench = accuracy.Bench(None, data, None, 1, True, None)
        with pytest.raises(UserError, match=word):
            accuracy.oxford(bench)
