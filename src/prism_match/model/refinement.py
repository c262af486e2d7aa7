"""Sub-pixel refinement after LoFTR: a coarse match becomes a point in each image.

The point in image A is the centre of its cell. Around it and around the centre of the matched cell of
image B, windows of the fine maps are cut out and attend to themselves and to each other. The middle
of window A is correlated with window B; the expectation of the resulting heat map is the offset of the
point in image B, its spread the uncertainty.

A cell is 4x4 pixels of the fine map, so its centre lies between them. The fine pixel (2, 2) of each cell
is taken to stand for that centre: the features learn this half-pixel shift, windows of odd size are
centred, and they reach as far as the cell does, to every side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism_match.model.attention import SADPA
from prism_match.model.tokens import WHOLE, Cells

FINE_PER_CELL = 4  # fine pixels along the side of a coarse cell
FINE_PIXEL = 2  # image pixels along the side of a fine pixel


class Refinement(nn.Module):
    def __init__(self, coarse_dim: int, fine_dim: int, heads: int, window: int):
        super().__init__()
        self.window = window
        self.coarse_to_fine = nn.Linear(coarse_dim, fine_dim)
        self.merge = nn.Linear(2 * fine_dim, fine_dim)
        self.self_attention = SADPA(fine_dim, heads, levels=(1,), rotary=False)
        self.cross_attention = SADPA(fine_dim, heads, levels=(1,), rotary=False)

    def forward(
        self,
        fine0: Tensor,
        fine1: Tensor,
        coarse0: Tensor,
        coarse1: Tensor,
        match: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """fine: b c h/2 w/2; coarse: b h/8 w/8 c, after the MPMs; match: (batch, cell of A, cell of
        B), each m. Returns the logarithm of each match's heat map (m window window), float32; `expectation`
        tells what it means."""
        batch, cell0, cell1 = match
        window0 = self.cut_windows(fine0, coarse0, batch, cell0)
        window1 = self.cut_windows(fine1, coarse1, batch, cell1)
        cells = Cells(queries=WHOLE, keys=(WHOLE,))
        window0, window1 = (self.self_attention(w, w, cells, cells) for w in (window0, window1))
        window0, window1 = (
            self.cross_attention(window0, window1, cells, cells),
            self.cross_attention(window1, window0, cells, cells),
        )
        return self.heat(window0[:, self.window // 2, self.window // 2], window1)

    def cut_windows(self, fine: Tensor, coarse: Tensor, batch: Tensor, cell: Tensor) -> Tensor:
        """m window window c: the fine features around each cell's centre, told what the cell knows."""
        columns = coarse.shape[2]
        reach = torch.arange(self.window, device=fine.device) + FINE_PER_CELL // 2 - self.window // 2
        y = (cell // columns)[:, None] * FINE_PER_CELL + reach
        x = (cell % columns)[:, None] * FINE_PER_CELL + reach
        # Zeros beyond the border, as for a convolution.
        low, high = max(0, self.window // 2 - FINE_PER_CELL // 2), max(0, self.window // 2 - 1)
        padded = F.pad(fine, (low, high, low, high)).permute(0, 2, 3, 1)
        window = padded[batch[:, None, None], y[:, :, None] + low, x[:, None, :] + low]
        context = self.coarse_to_fine(coarse.flatten(1, 2)[batch, cell])
        context = context[:, None, None].expand(-1, self.window, self.window, -1)
        return self.merge(torch.cat([window, context.to(window.dtype)], dim=-1))

    @staticmethod
    def heat(middle: Tensor, window: Tensor) -> Tensor:
        """middle: m c; window: m w w c. The logarithm of the softmax of their correlation: m w w."""
        with torch.autocast(middle.device.type, enabled=False):
            score = torch.einsum("mc,myxc->myx", middle.float(), window.float()) * middle.shape[-1] ** -0.5
            return score.flatten(1).log_softmax(dim=1).view_as(score)


def expectation(log_heat: Tensor) -> tuple[Tensor, Tensor]:
    """log_heat: m w w. The offset (x, y) of each match in image B from the centre of its cell (m 2) and its
    standard deviation (m), in image pixels."""
    heat = log_heat.exp()
    steps = torch.arange(heat.shape[-1], device=heat.device, dtype=heat.dtype) - heat.shape[-1] // 2
    along_x, along_y = heat.sum(dim=1), heat.sum(dim=2)  # m w
    # Sums of products, since autocast would take a matrix product in 16 bit.
    mean = torch.stack([(along * steps).sum(1) for along in (along_x, along_y)], dim=1)
    square = torch.stack([(along * steps**2).sum(1) for along in (along_x, along_y)], dim=1)
    std = (square - mean**2).clamp(min=1e-10).sqrt().sum(dim=1)
    return mean * FINE_PIXEL, std * FINE_PIXEL
