"""What the pages say can be done: their imports are there, so are their pictures and the files they link to,
and the file of all settings has all of them."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from prism_match.config import parse_toml
from prism_match.training.config import PRESETS, TrainConfig, load_train_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_what_the_pages_import_is_there(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prism_match"):
                module = importlib.import_module(node.module or "")
                missing = [a.name for a in node.names if not hasattr(module, a.name)]
                assert not missing, f"{node.module} has no {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_what_the_pages_link_to_is_there(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_file_of_all_settings_has_all_of_them(tmp_path):
    (text,) = blocks(ROOT / "docs" / "training.md", "toml")
    file = tmp_path / "run.toml"
    file.write_text(text)
    load_train_config(file)
    values = parse_toml(text)
    settings = TrainConfig().to_dict()
    assert set(settings) - set(values) == {"steps"}  # which the comment beside `minutes` names
    assert set(settings["loss"]) == set(values["loss"])
    quick = PRESETS["quick"].to_dict()
    assert values["loss"] == quick["loss"] and values["lr"] == quick["lr"]
