"""Pairs of the shapes that photos have: landscape and upright, of every source, and mixed within a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pairs_for_tests import ShiftedTextures
from synthetic_scene import Scene, make_scene_with_depth

from prism_match.errors import UserError
from prism_match.frames import Frame
from prism_match.training.compiling import compiled
from prism_match.training.config import PRESETS, Phase, TrainConfig, load_train_config
from prism_match.training.data.colmap import Collection, ColmapPairs, depth_path, read_model
from prism_match.training.data.photos import PhotoPairs, PhotoStore
from prism_match.training.data.posed import PosedPairs
from prism_match.training.data.worlds import FAMILIES, Worlds
from prism_match.training.data.worlds.variety import Variety
from prism_match.training.feed import Weighted
from prism_match.training.pairs import PairBatch, PairSource, cell_centres
from prism_match.training.trainer import Trainer

SHAPES = [(64, 96), (96, 64)]


@pytest.fixture(scope="module")
def store() -> PhotoStore:
    coarse = torch.rand(12, 1, 24, 24, generator=torch.Generator().manual_seed(1))
    fine = F.interpolate(coarse, size=64, mode="bicubic").clamp(0, 1)
    return PhotoStore((fine[:, 0] * 255).to(torch.uint8))


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Scene:
    return make_scene_with_depth(tmp_path_factory.mktemp("scene"))


def photos(store: PhotoStore, scene: Scene) -> PairSource:
    return PhotoPairs(store, photometric=False, strangers=0.0)


def worlds(store: PhotoStore, scene: Scene) -> PairSource:
    plain = Variety(1, 0, 6.0, 0, 0, 0, 0, 0, 0)
    return Worlds(store, families={"facade": FAMILIES["facade"]}, photometric=False, variety=plain)


def collection(store: PhotoStore, scene: Scene) -> PairSource:
    return ColmapPairs(
        [Collection(scene.root, scene.root / "images", scene.root / "depth")], photometric=False
    )


def frames(store: PhotoStore, scene: Scene) -> PairSource:
    views = read_model(scene.root).views
    listed = [
        Frame(scene.root / "images" / v.name, depth_path(scene.root / "depth", v.name), v.K, v.T)
        for v in views
    ]
    pairs = torch.tensor([[0, 1], [1, 2], [0, 2]]).numpy()
    return PosedPairs("frames", [(listed, pairs, torch.tensor([0.4, 0.4, 0.4]).numpy())], "cpu", workers=1)


def values_at(image: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    h, w = image.shape[-2:]
    grid = (points + 0.5) * 2 / torch.tensor([w, h]) - 1
    return F.grid_sample(image, grid, align_corners=False)[:, 0]


def agreement(batch: PairBatch, shift: float) -> float:
    """Correlation of what both images show where cells are seen, the second moved by some pixels."""
    h, w = batch.image0.shape[-2:]
    centres = cell_centres(h, w).expand(len(batch), -1, -1, -1)
    a, b = values_at(batch.image0, centres), values_at(batch.image1, batch.warp0 + shift)
    scores = []
    for k in range(len(batch)):
        seen = batch.visible0[k]
        if seen.sum() > 20:
            scores.append(torch.corrcoef(torch.stack([a[k][seen], b[k][seen]]))[0, 1])
    return torch.stack(scores).median().item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [photos, worlds, collection, frames])
def test_every_source_gives_every_shape(make, shape, store: PhotoStore, scene: Scene) -> None:
    b = 2 if make is worlds else 6  # which are slow
    batch = make(store, scene).sample(b, shape, torch.Generator().manual_seed(3))
    h, w = shape
    assert batch.image0.shape == batch.image1.shape == (b, 1, h, w)
    assert batch.warp1.shape == (b, h // 8, w // 8, 2) and batch.visible0.shape == (b, h // 8, w // 8)
    landed = batch.warp0[batch.visible0]
    assert (landed > -1).all() and (landed[:, 0] < w).all() and (landed[:, 1] < h).all()
    # Both the far right and the far bottom are in use.
    assert landed[:, 0].max() > 0.8 * w * (0.7 if make is frames else 1)
    true = agreement(batch, 0.0)
    # Worlds are lit in two ways.
    assert true > (0.5 if make is worlds else 0.8) and true > agreement(batch, 5.0) + 0.1


def test_every_shape_is_compiled_and_once(store: PhotoStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also more of them than PyTorch compiles by itself, after which it would go on without."""
    made: list[str] = []

    def compile(function, **options):
        def backend(graph, _):
            made.append(function.__name__)
            return graph.forward

        return original(function, backend=backend, **options)

    def double(x):
        return 2 * x

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compile)
    twice = compiled(double)
    with torch._dynamo.config.patch(cache_size_limit=2):
        for n in (2, 3, 4, 5, 2):
            assert torch.equal(twice(torch.ones(n)), torch.full((n,), 2.0))
        assert torch._dynamo.config.cache_size_limit == 2
    assert made == ["double"] * 4
    made.clear()
    PhotoPairs(store, compile=True).sample(2, (32, 64), torch.Generator().manual_seed(0))
    assert made == ["render"]  # for both views


def test_shapes_are_mixed_within_a_run(tmp_path: Path) -> None:
    settings = tmp_path / "run.toml"
    phases = "[[0, 32, 2], [0, [32, 64], 2], [0, [64, 32], 1]]"
    settings.write_text(f'preset = "tiny"\nsteps = 6\nlog_every = 1\nphases = {phases}\n')
    config = load_train_config(settings)
    assert config.phases[1] == Phase(0.0, (32, 64), 2)
    Trainer(config, [Weighted(ShiftedTextures())], tmp_path / "run").fit()
    rows = [json.loads(x) for x in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert {json.dumps(r["size"]) for r in rows} == {"32", "[32, 64]", "[64, 32]"}
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("size, reason", [("[64, 90]", "multiple of 32, not 90"), ("[64]", "height, width")])
def test_a_shape_that_cannot_be_is_told(tmp_path: Path, size: str, reason: str) -> None:
    (tmp_path / "run.toml").write_text(f'preset = "tiny"\nphases = [[0, {size}, 2]]\n')
    with pytest.raises(UserError, match=reason):
        load_train_config(tmp_path / "run.toml")
    assert PRESETS["tiny"].phases[0].size == 64
