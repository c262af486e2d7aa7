"""A source of pairs small enough for tests: shifted views of random textures, all known in closed form."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from prism_match.training.pairs import ImageSize, PairBatch, cell_centres, shape_of


class ShiftedTextures:
    """Image 1 is image 0 moved by a few pixels, so that about three quarters of the cells match."""

    name = "shifted textures"

    def __init__(self, fixed: bool = False, break_at: tuple[int, ...] = ()):
        self.fixed = fixed  # the same pairs every time
        self.break_at = break_at  # numbers of the calls that fail
        self.calls = 0

    def sample(self, batch: int, size: ImageSize, generator: torch.Generator) -> PairBatch:
        self.calls += 1
        if self.calls in self.break_at:
            raise ValueError("sample 17 is broken")
        if self.fixed:
            generator = torch.Generator().manual_seed(7)
        margin = 16
        height, width = shape_of(size)
        sides = height + 2 * margin, width + 2 * margin
        noise = [
            F.interpolate(
                torch.rand(batch, 1, *(n // k for n in sides), generator=generator), sides, mode="bilinear"
            )
            for k in (2, 4, 8)
        ]
        scene = (torch.stack(noise).mean(0) * 3 - 1).clamp(0, 1)  # with the contrast of photos
        shift = torch.randint(-margin, margin + 1, (batch, 2), generator=generator)
        image0 = scene[..., margin:-margin, margin:-margin]
        image1 = torch.stack(
            [
                scene[b, :, margin + y : margin + y + height, margin + x : margin + x + width]
                for b, (x, y) in enumerate(shift.tolist())
            ]
        )
        centres = cell_centres(height, width).expand(batch, -1, -1, -1)
        move = shift[:, None, None].float()
        warps = [centres - move, centres + move]
        seen = [((w >= 0) & (w <= torch.tensor([width - 1, height - 1]))).all(-1) for w in warps]
        return PairBatch(image0, image1, warps[0], seen[0], warps[1], seen[1], names=("shifted",) * batch)
