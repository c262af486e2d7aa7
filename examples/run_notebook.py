"""Runs the code of a notebook in one process and keeps in the file what it prints and shows; without Jupyter.

python examples/run_notebook.py examples/quickstart.ipynb
"""

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import PIL.Image

from prism_match.files import write_json


def run(notebook: dict[str, Any]) -> None:
    """Fills in the outputs, from the first cell to the last. What a cell raises is raised."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(cells, 1):
        printed, value = run_cell("".join(cell["source"]), names)
        cell["execution_count"], cell["outputs"] = count, []
        if printed:
            text = printed.splitlines(keepends=True)
            cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": text})
        if value is not None:
            shown = {"data": as_data(value), "metadata": {}, "output_type": "execute_result"}
            cell["outputs"].append({**shown, "execution_count": count})


def run_cell(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What it prints, and the value of its last line, if that has one."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    return printed.getvalue(), value


def as_data(value: Any) -> dict[str, Any]:
    if not isinstance(value, PIL.Image.Image):
        return {"text/plain": repr(value).splitlines(keepends=True)}
    file = io.BytesIO()
    value.convert("RGB").save(file, "JPEG", quality=80)
    picture = base64.b64encode(file.getvalue()).decode()
    return {"image/jpeg": picture, "text/plain": [f"<picture of {value.width}x{value.height} pixels>"]}


def main(path: Path) -> None:
    path = path.resolve()
    notebook = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:  # what it leaves behind is not for this place
        os.chdir(folder)
        run(notebook)
        os.chdir(path.parent)
    write_json(path, notebook)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
