"""The command line as a user meets it: exit codes, one line on standard error, no partial files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from test_images import broken_files

from prism_match import Matches, __version__, cli
from prism_match.config import PRESETS
from prism_match.weights import MODEL_CARD

ASSETS = Path(cli.__file__).parents[1] / "assets"
PAIR = [str(ASSETS / "astronaut0.jpg"), str(ASSETS / "astronaut1.jpg")]
FAST = ["--size", "160", "--threshold", "0", "--device", "cpu", "--rotate", "never"]


@pytest.fixture
def prism(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):  # noqa: ANN201
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(PRESETS["tiny"].to_dict()))

    def run(*words: object, tiny: bool = True) -> tuple[int, str, str]:
        extra = ["--model-config", str(config)] if tiny else []
        monkeypatch.setattr(sys, "argv", ["prism", *map(str, words), *extra])
        with pytest.raises(SystemExit) as stop:
            cli.main()
            raise SystemExit(0)
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


def test_match_writes_everything(prism, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    code, text, _ = prism("match", *PAIR, "-o", out, *FAST)
    assert code == 0
    assert {p.name for p in out.iterdir()} == {"matches.npz", "matches.png", "pruning.png"}
    matches = Matches.load(out / "matches.npz")
    assert f"matches              {len(matches)}\n" in text
    assert matches.details is not None
    for name in ("matches.png", "pruning.png"):
        assert np.asarray(PIL.Image.open(out / name)).std() > 10


def test_match_as_json_with_homography(prism, tmp_path: Path) -> None:
    code, text, _ = prism(
        "match", PAIR[0], PAIR[0], "-o", tmp_path, *FAST, "--geometry", "homography", "--json"
    )
    result = json.loads(text)
    assert code == 0
    assert result["matches"] > 20 and len(result["kept_cells0"]) == 2
    assert {Path(f).name for f in result["files"]} == {
        "matches.npz",
        "matches.png",
        "pruning.png",
        "overlay.png",
    }
    np.testing.assert_allclose(np.array(result["matrix"]) / result["matrix"][2][2], np.eye(3), atol=8)


def test_no_matches_is_no_error(prism, tmp_path: Path) -> None:
    code, _, _ = prism(
        "match", *PAIR, "-o", tmp_path, "--size", 160, "--threshold", 0.99, "--geometry", "homography"
    )
    assert code == 0
    assert len(Matches.load(tmp_path / "matches.npz")) == 0


def test_masks_and_limits(prism, tmp_path: Path) -> None:
    mask = np.zeros((512, 512), np.uint8)
    mask[:256] = 255
    PIL.Image.fromarray(mask).save(tmp_path / "mask.png")
    code, _, _ = prism(
        "match", *PAIR, "-o", tmp_path, *FAST, "--mask0", tmp_path / "mask.png", "--max-matches", 3
    )
    matches = Matches.load(tmp_path / "matches.npz")
    assert code == 0 and len(matches) == 3 and matches.keypoints0[:, 1].max() < 256


def test_limited_matches_are_spread(prism, tmp_path: Path) -> None:
    """Not one clump where the model is surest."""
    for out, limit in (("all", ()), ("some", ("--max-matches", 12))):
        assert prism("match", PAIR[0], PAIR[0], "-o", tmp_path / out, *FAST, *limit)[0] == 0
    everything, some = (Matches.load(tmp_path / out / "matches.npz") for out in ("all", "some"))
    assert len(some) == 12 < len(everything) / 2
    np.testing.assert_allclose(some.keypoints0, everything.filter(spread=12).keypoints0, atol=1e-3)
    code, _, err = prism("match", *PAIR, "-o", tmp_path / "none", *FAST, "--max-matches", 0)
    assert code == 2 and err.strip() == "prism: max_matches must be at least 1, not 0"


def test_untrained_weights_are_called_so(prism, tmp_path: Path) -> None:
    code, text, err = prism("demo", "-o", tmp_path, "--size", 160, "--device", "cpu")
    assert code == 0
    assert "untrained" in err and "matches" in text


def test_demo_matches_both_pairs(prism, tmp_path: Path) -> None:
    code, text, _ = prism("demo", "-o", tmp_path, "--size", 160, "--device", "cpu", "--json")
    results = json.loads(text)
    assert code == 0 and set(results) == {"motorcycle", "astronaut"}
    for name, result in results.items():
        assert {Path(f).parent for f in result["files"]} == {tmp_path / name}
        assert {"matches.png", "pruning.png"} <= {p.name for p in (tmp_path / name).iterdir()}
        assert result["known_truth"] <= result["matches"]


def test_info(prism) -> None:
    code, text, _ = prism("info", "--json", tiny=False)
    result = json.loads(text)
    assert code == 0
    assert result["version"] == __version__
    assert 22e6 < result["parameters"] < 24e6
    assert result["config"]["theta_p"] == 0.05
    code, text, _ = prism("info")
    assert code == 0 and "config.layers" in text and "Model card" not in text


def test_info_tells_what_the_shipped_weights_reach(prism) -> None:
    code, text, _ = prism("info", tiny=False)
    assert code == 0 and MODEL_CARD.read_text(encoding="utf-8") in text


def test_version_and_help(prism) -> None:
    assert prism("--version", tiny=False)[1] == f"prism-match {__version__}\n"
    code, text, _ = prism("match", "--help", tiny=False)
    assert code == 0 and "Examples:" in text


@pytest.mark.parametrize("case", ["missing", "folder", "text", "truncated", "empty", "bomb", "1x1", "nan"])
def test_broken_images(prism, tmp_path: Path, case: str) -> None:
    (tmp_path / "in").mkdir()
    path, word = broken_files(tmp_path / "in")[case]
    for words in ((path, PAIR[1]), (PAIR[0], path)):
        out = tmp_path / "out"
        code, text, err = prism("match", *words, "-o", out, *FAST)
        assert code == 2 and text == ""
        assert err.count("\n") == 1 and str(path) in err and word in err
        assert not out.exists(), "nothing is written"


def test_other_mistakes(prism, tmp_path: Path) -> None:
    small, bad = tmp_path / "small.png", tmp_path / "bad.safetensors"
    PIL.Image.fromarray(np.zeros((40, 40), np.uint8)).save(small)
    bad.write_bytes(b"nonsense")
    (tmp_path / "file").write_text("")
    toml = tmp_path / "bad.toml"
    toml.write_text("layers = 0")
    for words, word in (
        (["--mask0", small], "the mask is 40x40"),
        (["--weights", tmp_path / "none.safetensors"], "none.safetensors"),
        (["--weights", bad], "bad.safetensors"),
        (["--device", "cuda:7"], "cuda:7"),
        (["--device", "abacus"], "abacus"),
        (["--size", "8"], "size"),
        (["-o", tmp_path / "file"], "file"),
        (["-o", tmp_path / "file" / "below"], "below"),
        (["--model-config", toml], "bad.toml"),
        (["--model-config", "huge"], "huge"),
    ):
        extra = [] if "-o" in words else ["-o", tmp_path / "out"]
        code, text, err = prism("match", *PAIR, *FAST, *extra, *words, tiny="--model-config" not in words)
        err = "\n".join(x for x in err.splitlines() if "untrained" not in x)
        assert code == 2 and text == "", words
        assert err.startswith("prism: ") and err.count("\n") == 0 and word in err, err
    assert not (tmp_path / "out").exists()


def test_options_that_would_do_nothing_are_refused(prism, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for words, word in (
        (["sfm", tmp_path, "-o", out, "--loop", "--pairs", "exhaustive"], "--loop is for --pairs sequential"),
        (["sfm", tmp_path, "-o", out, "--matches-only", "--matches", "m.h5"], "only one of them"),
        (["info", "a.safetensors", "--weights", "b.safetensors"], "only one of them"),
    ):
        code, text, err = prism(*words, tiny=False)
        assert code == 2 and text == "" and err.count("\n") == 1 and word in err, err
    assert not out.exists()


@pytest.mark.parametrize("command, name", [("match", "pruning.png"), ("align", "aligned.png")])
def test_no_result_is_written_over_what_it_is_made_of(prism, tmp_path: Path, command: str, name: str) -> None:
    photo = tmp_path / name
    PIL.Image.open(PAIR[1]).save(photo)
    before = photo.read_bytes()
    code, text, err = prism(command, PAIR[0], photo, "-o", tmp_path, tiny=False)
    assert code == 2 and text == "" and f"{name}: is given, and would be replaced" in err
    assert photo.read_bytes() == before and list(tmp_path.glob("*.png")) == [photo]


def test_no_panorama_is_written_over_a_photo(prism, tmp_path: Path) -> None:
    for n, photo in enumerate((*PAIR, PAIR[0])):
        PIL.Image.open(photo).save(tmp_path / f"{n}.png")
    before = (tmp_path / "2.png").read_bytes()
    code, text, err = prism("stitch", tmp_path, "-o", tmp_path / "2.png", tiny=False)
    assert code == 2 and text == "" and "is there already, among the photos" in err
    assert (tmp_path / "2.png").read_bytes() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder(prism, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    code, _, err = prism("match", *PAIR, "-o", tmp_path / "out", *FAST)
    assert code == 2 and "out" in err


def test_python_m_is_the_command() -> None:
    words = [sys.executable, "-m", "prism_match"]
    done = subprocess.run([*words, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"prism-match {__version__}\n")
    done = subprocess.run([*words, "match", "a.jpg"], capture_output=True, text=True)
    assert done.returncode == 2 and "Usage: prism match" in done.stderr


def test_completion(tmp_path: Path) -> None:
    """The shell is told where to ask, and asking there answers."""
    words = [sys.executable, "-m", "prism_match"]
    told = os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    subprocess.run([*words, "--install-completion", "bash"], env=told, check=True, capture_output=True)
    (script,) = tmp_path.rglob("prism.sh")
    assert "_PRISM_COMPLETE=complete_bash" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()
    ask = os.environ | {"_PRISM_COMPLETE": "complete_bash"}
    for line, word, answer in (("prism vi", 1, "view"), ("prism sfm --ma", 2, "--mapper")):
        ask |= {"COMP_WORDS": line, "COMP_CWORD": str(word)}
        found = subprocess.run(words, env=ask, capture_output=True, text=True)
        assert answer in found.stdout.split(), found.stderr


def test_import_is_light() -> None:
    """Asking for help must not wait for PyTorch."""
    code = "import sys, prism_match.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("own", "few"), [({}, True), ({"OMP_WAIT_POLICY": "active"}, False)])
def test_threads_that_wait_leave_their_cores_to_others(own: dict[str, str], few: bool) -> None:
    """Unless the user has chosen otherwise."""
    clean = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    told = subprocess.run(
        [sys.executable, "-m", "prism_match", "info"],
        env=clean | own | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if "GOMP_SPINCOUNT" not in told.stderr:
        pytest.skip("this PyTorch has another OpenMP than GNU's")
    assert ("GOMP_SPINCOUNT = '1000'" in told.stderr) == few


def test_match_in_tiles(prism, tmp_path: Path) -> None:
    options = ["--size", "96", "--threshold", "0", "--device", "cpu", "--rotate", "never", "--tiles"]
    code, text, _ = prism(
        "match", PAIR[0], PAIR[0], "-o", tmp_path, *options, "--geometry", "homography", "--json"
    )
    assert code == 0 and json.loads(text)["matches"] > 20
    matches = Matches.load(tmp_path / "matches.npz")
    assert matches.size0 == PIL.Image.open(PAIR[0]).size and matches.name0 == PAIR[0]
    assert np.asarray(PIL.Image.open(tmp_path / "overlay.png")).std() > 10
    for words, reason in (
        (["--memory", "4"], "--memory is for --tiles alone"),
        (["--tiles", "--memory", "-1"], "positive number of GiB"),
    ):
        code, _, error = prism("match", *PAIR, "-o", tmp_path, *words)
        assert code == 2 and reason in error and error.count("\n") == 1
    code, _, error = prism("match", "none.tif", PAIR[1], "-o", tmp_path, "--tiles")
    assert code == 2 and "none.tif: no such file" in error
