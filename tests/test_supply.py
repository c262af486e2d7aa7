"""What the package trusts, and what it is made of."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import prism_match
from prism_match.weights import SHIPPED, SHIPPED_SHA256, SUBPIXEL, SUBPIXEL_SHA256

ROOT = Path(__file__).parents[1]
SOURCE = Path(prism_match.__file__).parent
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


@cache
def parsed() -> dict[str, ast.Module]:
    paths = sorted(SOURCE.rglob("*.py"))
    return {str(p.relative_to(SOURCE)): ast.parse(p.read_text(encoding="utf-8")) for p in paths}


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Every call in the package: where, what is called (as `np.load`), and the call."""
    for path, module in parsed().items():
        for node in ast.walk(module):
            if isinstance(node, ast.Call):
                yield f"{path}:{node.lineno}", ast.unparse(node.func), node


def has(call: ast.Call, name: str, value: object) -> bool:
    return any(
        k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is value for k in call.keywords
    )


def test_nothing_is_unpickled_but_where_it_is_safe() -> None:
    importing = set()
    for path, module in parsed().items():
        for node in ast.walk(module):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] in UNPICKLERS for name in names):
                importing.add(path)
    assert importing == {"files.py"}  # the unpickler that makes arrays and nothing else
    found = {"torch.load": [], "np.load": []}
    for where, name, call in calls():
        assert not name.endswith(("pickle.load", "pickle.loads", "read_pickle")), where
        if name in found:
            found[name].append(where)
            safe = ("weights_only", True) if name == "torch.load" else ("allow_pickle", False)
            assert has(call, *safe), where
        if name.endswith("format.read_array"):
            assert has(call, "allow_pickle", False), where
    assert len(found["torch.load"]) == 1 and found["torch.load"][0].startswith("training/convert.py")
    assert found["np.load"]


def test_no_text_is_run() -> None:
    for where, name, call in calls():
        assert name not in ("eval", "exec", "os.system", "os.popen", "yaml.load"), where
        assert not has(call, "shell", True), where


def test_no_duration_is_measured_by_a_clock_that_jumps() -> None:
    for where, name, _ in calls():
        assert name not in ("time.time", "datetime.now", "datetime.datetime.now", "datetime.utcnow"), where


def test_weights_have_the_hashes_that_are_published() -> None:
    expected = {"prism.safetensors": SHIPPED_SHA256, "subpixel.safetensors": SUBPIXEL_SHA256}
    for path in (SHIPPED, SUBPIXEL):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == expected[path.name]
    for published in (SHIPPED.parent / "SHA256SUMS", ROOT / "SECURITY.md"):
        lines = re.findall(r"^([0-9a-f]{64})  (\S+)$", published.read_text(encoding="utf-8"), re.MULTILINE)
        assert {name: digest for digest, name in lines} == expected, published


def test_the_files_that_people_look_for_are_there() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in changes and f"## [{prism_match.__version__}]" in changes
    for name in ("SECURITY.md", "CONTRIBUTING.md", "LICENSE", "README.md"):
        assert (ROOT / name).stat().st_size > 500
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(
        r"make ([\w-]+)", "".join((ROOT / n).read_text() for n in ("SECURITY.md", "CONTRIBUTING.md"))
    )
    assert set(named) <= targets and {"sbom", "audit", "test-wheel"} <= targets
