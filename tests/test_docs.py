"""What the pages say can be done: their imports are there, so are their pictures and the files they link to,
and the file of all settings has all of them."""

import ast
import importlib
import re
import runpy
import subprocess
import sys
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
    text, next_run = blocks(ROOT / "docs" / "training.md", "toml")
    file = tmp_path / "run.toml"
    for content in (next_run, text):
        file.write_text(content)
        load_train_config(file)
    values = parse_toml(text)
    settings = TrainConfig().to_dict()
    assert set(settings) - set(values) == {"steps"}  # which the comment beside `minutes` names
    assert set(settings["loss"]) == set(values["loss"])
    assert set(settings["worlds"]) == set(values["worlds"])
    quick = PRESETS["quick"].to_dict()
    assert values["loss"] == quick["loss"] and values["lr"] == quick["lr"]


def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path):
    """Strictly, so that a broken link or reference fails; the hook looks at what the pages load."""
    pytest.importorskip("mkdocstrings_handlers")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    for name in ("Matcher.match_many", "Matches.estimate", "model.prism.PRISM", "engine.MatchStore"):
        assert f'{name}"' in reference, f"{name} is in the reference"
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [page.name for page in PAGES[1:] if page.name not in nav], "every page is in the menu"


def test_what_a_page_loads_from_elsewhere_is_found(tmp_path):
    pytest.importorskip("mkdocs")
    site = runpy.run_path(str(ROOT / "docs" / "hooks" / "site.py"))
    (tmp_path / "good.html").write_text(
        '<script src="a.js"></script><a href="https://example.org">a link</a><img src="data:image/png;,AA">'
    )
    (tmp_path / "good.css").write_text("a { background: url(b.png) }")
    assert site["loaded_from_elsewhere"](tmp_path) == []
    for n, text in enumerate((
        '<script src="https://example.org/a.js"></script>', '<link rel="icon" href="//example.org/a.css">',
        '<img src="http://example.org/a.png">', "<style>@import 'https://example.org/a.css'</style>",
        '<pre class="mermaid">a</pre>',
    )):  # fmt: skip
        (tmp_path / f"{n}.html").write_text(text)
    (tmp_path / "bad.css").write_text("@font-face { src: url('https://example.org/a.woff2') }")
    found = [line.split(":")[0] for line in site["loaded_from_elsewhere"](tmp_path)]
    assert found == ["0.html", "1.html", "2.html", "3.html", "4.html", "bad.css"]
    assert site["on_page_markdown"]("[a](../src/a.py) [b](b.md)") == "`a` [b](b.md)"
