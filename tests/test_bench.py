"""`prism bench`: what it reports and how it fails; never how long anything takes."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from prism_match import cli
from prism_match.config import PRESETS
from prism_match.engine import Matcher
from prism_match.errors import UserError
from prism_match.evaluation import peers, speed
from prism_match.evaluation.speed import OURS, Row, SpeedOptions, measure
from prism_match.images import write_png
from prism_match.stages import stage

TINY = SpeedOptions(sizes=(64, 96), device="cpu", repeats=2, batch=1, config=PRESETS["tiny"])


@pytest.fixture
def few_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that runs, one that fails when it is run, one that cannot be opened and one that is not here."""

    def good(device: torch.device, dtype: torch.dtype) -> peers.Opened:
        return lambda a, b: torch.stack([a.sum(), b.sum(), a.mean()]), peers.UNTRAINED

    def failing(device: torch.device, dtype: torch.dtype) -> peers.Opened:
        return lambda a, b: torch.ones(2) @ torch.ones(3), ""

    def broken(device: torch.device, dtype: torch.dtype) -> peers.Opened:
        raise OSError("its files are not here\nand so on")

    known = {"Good": good, "Failing": failing, "Broken": broken}
    found = {name: ("json", build) for name, build in known.items()}
    monkeypatch.setattr(peers, "PEERS", found | {"Absent": ("a_package_that_nobody_has", good)})


@pytest.mark.usefixtures("few_peers")
def test_report(tmp_path: Path) -> None:
    report = measure(replace(TINY, sizes=(64,), precisions=("fp32", "bf16")))
    summary = json.loads(json.dumps(report.summary))
    assert set(summary) == {"benchmark", "machine", "settings", "rows", "stages", "skipped", "notes"}
    assert summary["machine"]["torch"] == torch.__version__ and summary["machine"]["threads"] == 1
    assert summary["settings"]["sizes"] == [64] and summary["settings"]["photos"] == "bundled"
    rows = summary["rows"]
    assert all(set(row) == {f.name for f in fields(Row)} for row in rows)
    assert len(rows) == 2 * 5
    assert {(r["width"], r["height"]) for r in rows} == {(64, 48)}
    kinds = [(r["method"], r["what"]) for r in rows[:5]]
    assert kinds == [
        (OURS, "model"),
        (OURS, "match"),
        ("Good", "model"),
        ("Failing", "model"),
        (OURS, "files"),
    ]
    for row in rows:
        if row["method"] == "Failing":
            assert row["milliseconds"] is None and row["note"].startswith("not run: RuntimeError")
        else:
            assert row["milliseconds"] > 0 and row["matches"] is not None and row["memory_mib"] is None
            assert row["pairs_per_second"] == pytest.approx(1000 / row["milliseconds"])
            assert row["milliseconds_95"] is None or row["milliseconds_95"] >= row["milliseconds"]
    assert rows[2]["matches"] == 3 and rows[2]["note"] == peers.UNTRAINED
    assert rows[0]["kept_cells"] == rows[1]["kept_cells"] and 0 < rows[0]["kept_cells"][0] <= 48
    assert [s["precision"] for s in summary["stages"]] == ["fp32", "bf16"]
    assert summary["skipped"]["Absent"] == "a_package_that_nobody_has is not installed"
    assert summary["skipped"]["Broken"] == "cannot be opened (OSError: its files are not here)"
    text = str(report)
    assert "compare the ratios" in text and "/ Good" in text and "not measured on a CPU" in text
    assert "Absent skipped: a_package_that_nobody_has is not installed" in text
    assert "weights are random too" in text and "enlarged" not in text


def test_range_without_peers() -> None:
    report = measure(replace(TINY, whole_range=True, peers=False, repeats=1))
    assert [(r["what"], r["width"]) for r in report.summary["rows"]] == [("model", 64), ("model", 96)]
    assert report.summary["stages"] == [] and report.summary["skipped"] == {}
    assert "kept cells" in str(report)


def test_stages_and_the_rest_make_the_whole(tmp_path: Path) -> None:
    def match(*_: object) -> None:
        with stage("backbone"):
            time.sleep(0.004)
        with stage("prepare", host=True):
            time.sleep(0.002)
        time.sleep(0.002)

    matcher = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, match=match)
    found = speed.split(matcher, [np.zeros((48, 64))] * 2, (tmp_path, tmp_path), 3)  # type: ignore[arg-type]
    assert list(found.stages) == ["prepare", "backbone"]
    assert found.stages["backbone"] >= 4 and found.stages["prepare"] >= 2 and found.other >= 2
    assert sum(found.stages.values()) + found.other == pytest.approx(found.total)
    table = str(speed.stage_table([found]))
    assert "decode, prepare" in table and "polish" in table


def test_images_have_the_size_that_is_said(photo: np.ndarray) -> None:
    gray = photo.astype(np.float32) / 255
    for size, shape in ((640, (480, 640)), (832, (624, 832)), (1152, (864, 1152)), (1600, (1200, 1600))):
        assert speed.fit(gray, size, four_to_three=True).shape == shape
    assert speed.fit(gray[:300], 256, four_to_three=False).shape == (150, 256)
    whole = speed.fit(gray, 512, four_to_three=False)
    assert np.abs(whole.astype(int) - photo).max() <= 1


def test_no_two_files_are_the_same(photo: np.ndarray, tmp_path: Path) -> None:
    pairs = speed.write_pairs([photo, photo], tmp_path, 3)
    assert len({path.read_bytes() for pair in pairs for path in pair}) == 6


def test_each_photo_of_a_set_is_in_as_many_pairs(tmp_path: Path) -> None:
    pairs = speed.crossed([(tmp_path / f"{n}a", tmp_path / f"{n}b") for n in range(12)])
    assert len(set(pairs)) == 120
    assert set(Counter(path for pair in pairs for path in pair).values()) == {10}


def test_own_photos_are_enlarged_and_it_says_so(tmp_path: Path) -> None:
    photos = speed.ASSETS / "astronaut0.jpg", speed.ASSETS / "astronaut1.jpg"
    options = replace(TINY, photos=photos, sizes=(600,), peers=False)
    notes = speed.explain(options, speed.load_pair(photos), [], on_cpu=True)
    assert any(note.startswith("The photos are enlarged for 600 px") for note in notes)


def test_what_would_fill_the_memory_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = Matcher(device="cpu", rescale="never", config=PRESETS["tiny"], rotate="never")
    images = [np.zeros((64, 96), np.uint8)] * 2
    run: list[int] = []
    dense = peers.Peer("Dense", "json", lambda a, b: run.append(1), dense=True)  # type: ignore[arg-type,return-value]
    contenders = speed.theirs(matcher, [dense], images)
    assert contenders[0].bytes == speed.MATRICES * 4 * (8 * 12) ** 2
    monkeypatch.setattr(speed, "free_memory", lambda: 1000)
    (row,) = speed.race(contenders, matcher, images, 1)
    assert not run and row.milliseconds is None and "MemoryError" in row.note
    assert speed.free_memory() == 1000


def test_ratios() -> None:
    def row(method: str, precision: str, ms: float | None, what: str = "model") -> Row:
        return Row(method, "", what, 64, 48, precision, ms)

    ours = [row(OURS, "fp32", 100), row(OURS, "bf16", 50), row(OURS, "bf16", None, "match")]
    assert speed.ratio(ours) == ("fp32", ["1.00", "0.50", ""])
    assert speed.ratio(ours[1:]) == ("", ["", ""])
    theirs = [row("A", "fp32", 200), row("B", "bf16", 5), row("A", "bf16", 25)]
    assert speed.ratio([*ours, *theirs]) == ("A", ["0.50", "2.00", "", "1.00", "0.20", "1.00"])


def test_peers_see_both_images_on_one_canvas() -> None:
    canvas = peers.on_one_canvas(torch.ones(1, 1, 48, 64), torch.ones(1, 1, 60, 50))
    assert canvas.shape == (1, 2, 3, 64, 64)
    assert canvas[0, 0, 0].sum() == 48 * 64 and canvas[0, 1, 2].sum() == 60 * 50


@pytest.mark.parametrize("name", list(peers.PEERS))
def test_peers_that_are_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, _ = peers.PEERS[name]
    pytest.importorskip(package)
    monkeypatch.setattr(peers, "PEERS", {name: peers.PEERS[name]})
    found, skipped = peers.open_peers(torch.device("cpu"), torch.float32)
    assert not skipped
    with torch.inference_mode():
        assert len(found[0].run(torch.rand(1, 1, 96, 128), torch.rand(1, 1, 96, 128))) >= 0


def test_lightglue_without_weights_has_points_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class LightGlue(torch.nn.Module):
        def __init__(self, features: str | None, **conf: object):
            super().__init__()
            assert features is None and conf == {"mp": True, "depth_confidence": -1, "width_confidence": -1}

        def forward(self, data: dict[str, dict[str, torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
            assert data["image1"]["descriptors"].shape == (1, peers.KEYPOINTS, 256)
            assert data["image1"]["image_size"].tolist() == [[128, 96]]
            assert data["image1"]["keypoints"][..., 0].max() > 96
            return {"matches": [torch.zeros(7, 2)]}

    monkeypatch.setitem(sys.modules, "lightglue", SimpleNamespace(LightGlue=LightGlue, SuperPoint=None))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    run, note = peers.open_lightglue(torch.device("cpu"), torch.bfloat16)
    assert len(run(torch.rand(1, 1, 64, 64), torch.rand(1, 1, 96, 128))) == 7
    assert note.startswith(peers.UNTRAINED) and "no detector" in note


@pytest.mark.gpu
@pytest.mark.usefixtures("few_peers")
def test_on_a_gpu() -> None:
    report = measure(replace(TINY, device="cuda", precisions=("fp32", "bf16"), sizes=(96,)))
    rows = [r for r in report.summary["rows"] if r["milliseconds"]]
    assert len(rows) == 2 * 4 and all(r["memory_mib"] > 0 for r in rows)
    assert report.summary["machine"]["memory_gib"] > 0 and "ratios" not in str(report)


# ---- the command


def bench(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prism", "bench", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
        raise SystemExit(0)
    return int(stop.value.code or 0)


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "speed.json"
    options = ["--sizes", "64,64", "--repeats", 1, "--batch", 1, "--device", "cpu", "--model-config", "tiny"]
    assert bench(monkeypatch, *options, "--no-peers", "--json", out) == 0
    assert "64x48 pixels" in capsys.readouterr().out
    assert [r["what"] for r in json.loads(out.read_text())["rows"]] == ["model", "match", "files"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--sizes", "640,many"], "--sizes is a list of pixels"),
        (["--sizes", "640,,832"], "--sizes is a list of pixels"),
        (["--sizes", "32"], "from 64 to 8192 pixels, not 32"),
        (["--precisions", "fp32,fp8"], "not 'fp8'"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--batch", "-1"], "--batch must be at least 1"),
        (["--device", "toaster"], "no such device"),
        (["--json", "."], "is a folder; --json is a file"),
        (["--plot", "speed.doc"], "plots are written as .png, .svg, .pdf"),
        (["a.jpg"], "a second photo is needed"),
        (["a.jpg", "b.jpg"], "a.jpg: no such file"),
        (["--weights", "nowhere.safetensors"], "nowhere.safetensors"),
        (["long.png", "long.png", "--sizes", "64,640"], "at 64 pixels a photo is 64x20"),
    ],
)
def test_mistakes_get_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_png("long.png", np.zeros((100, 320), np.uint8))
    assert bench(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("prism: ") and error.count("\n") == 1


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install"):
        speed.check_plot(tmp_path / "speed.png")


@pytest.mark.parametrize("whole_range, memory", [(False, None), (True, None), (True, 10.0)])
def test_plot(whole_range: bool, memory: float | None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        vars(Row(method, "x 1", "model", size, size * 3 // 4, "fp32", size / 10, memory_mib=memory,
                 kept_cells=(size, size) if method == OURS else None))
        for method in (OURS, "Other") for size in (64, 96)
    ]  # fmt: skip
    rows.append(vars(Row("Failed", "x 1", "model", 64, 48, "fp32")))
    summary = {"rows": rows, "settings": {"range": whole_range}, "machine": {"device": "cpu", "torch": "2"}}
    for suffix in speed.PICTURES:
        speed.draw(summary, tmp_path / f"speed{suffix}")
        assert (tmp_path / f"speed{suffix}").stat().st_size > 1000
