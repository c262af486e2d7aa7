"""The notebook does what it says, and has its pictures in it."""

from __future__ import annotations

import json
import re
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def kinds(notebook: dict[str, Any]) -> list[list[str]]:
    """What comes out of each cell: text that is printed, pictures, values."""
    outputs = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [[next(iter(o.get("data", {"printed": 0}))) for o in cell] for cell in outputs]


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    runner = runpy.run_path(str(ROOT / "examples" / "run_notebook.py"))
    runner["run"](notebook)
    if find_spec("pycolmap") is not None:
        assert kinds(notebook) == kinds(stored), "run examples/run_notebook.py: the file shows something else"
    printed = "".join("".join(o.get("text", "")) for c in notebook["cells"] for o in c.get("outputs", ()))
    assert float(re.search(r"median error ([\d.]+) px", printed)[1]) < 0.6
    assert float(re.search(r"turned by ([\d.]+) degrees", printed)[1]) < 0.5
    assert "2 cameras, " in printed or "no map" in printed
    assert not list(tmp_path.iterdir()), "it takes its files away"


def test_the_notebook_has_its_pictures() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < 1.5e6 and text.count('"image/jpeg"') == 4
    assert str(ROOT) not in text
    notebook = json.loads(text)
    assert notebook["nbformat"] == 4
    counts = [c["execution_count"] for c in notebook["cells"] if c["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run from the first cell to the last"


def test_a_cell_shows_what_it_prints_and_its_last_value() -> None:
    runner = runpy.run_path(str(ROOT / "examples" / "run_notebook.py"))
    names: dict[str, Any] = {}
    assert runner["run_cell"]("a = 2\nprint(a)\na + 1", names) == ("2\n", 3)
    assert runner["run_cell"]("b = a", names) == ("", None)
    assert runner["as_data"]("x") == {"text/plain": ["'x'"]}
    with pytest.raises(ZeroDivisionError):
        runner["run_cell"]("1 / 0", names)
