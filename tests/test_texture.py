"""What shows nothing is unknown, on both sides of a match."""

from __future__ import annotations

import torch

from prism_match.training.data.texture import flat_cells, forget_flat
from prism_match.training.pairs import PairBatch, cell_centres
from prism_match.training.supervision import coarse_ground_truth


def test_flat_cells() -> None:
    image = torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    image[..., :32] = 0.5 + 0.02 * image[..., :32]  # a hint of noise
    flat = flat_cells(image)[0]
    assert flat[:, :3].all() and not flat[:, 3:].any(), "next to texture a cell is not flat"
    ramp = torch.linspace(0, 1, 64).expand(1, 1, 64, 64)
    assert not flat_cells(ramp).any()


def test_flat_cells_are_unknown_wherever_they_land() -> None:
    """Image 1 is image 0 moved by two cells to the left."""
    warp0 = (cell_centres(64, 64) - torch.tensor([16.0, 0.0]))[None]
    warp1 = (cell_centres(64, 64) + torch.tensor([16.0, 0.0]))[None]
    visible0, visible1 = (((w >= 0) & (w < 64)).all(-1) for w in (warp0, warp1))
    image = torch.rand(1, 1, 64, 64)
    batch = PairBatch(image, image, warp0, visible0, warp1, visible1)
    flat0, flat1 = torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    flat0[0, 2, 4] = True  # lands on (2, 2)
    flat1[0, 5, 0] = True  # comes from (5, 2)
    result = forget_flat(batch, flat0, flat1)
    assert result.unknown0.nonzero().tolist() == [[0, 2, 4], [0, 5, 2]]
    assert result.unknown1.nonzero().tolist() == [[0, 2, 2], [0, 5, 0]]
    before, after = coarse_ground_truth(batch), coarse_ground_truth(result)
    lost = (before.matchable0 & ~after.matchable0).view(8, 8).nonzero().tolist()
    assert lost == [[2, 4], [5, 2]] and not (after.matchable0 & ~before.matchable0).any()
    assert torch.equal(after.unmatchable0, before.unmatchable0), "nothing becomes unmatchable by it"
