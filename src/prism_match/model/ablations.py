"""What the paper's ablations put in the place of a part: linear attention, cosine similarity for the NMI,
absolute positions. The other rows of its tables are settings of the parts themselves (`config.PRESETS`)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism_match.model.attention import SADPA, merge_heads, split_heads
from prism_match.model.tokens import Cells


class LinearAttention(SADPA):
    """LoFTR's linear attention over the kept cells takes the place of the pyramid."""

    def __init__(self, dim: int, heads: int, levels: tuple[int, ...], rotary: bool):
        super().__init__(dim, heads, levels=(1,), rotary=rotary)
        self.key = nn.Linear(dim, dim)
        self.level_of_cells = levels.index(1)

    def messages(
        self, tokens: Tensor, target: Tensor, source_cells: Cells, target_cells: Cells
    ) -> list[Tensor]:
        keys = target_cells.keys[self.level_of_cells]
        context = keys.gather(target.flatten(1, 2))
        query, key, value = (
            split_heads(layer(x), self.heads).float()
            for layer, x in ((self.query, tokens), (self.key, context), (self.convs[0], context))
        )
        # Sums over thousands of keys overflow half precision.
        with torch.autocast(query.device.type, enabled=False):
            query, key = F.elu(query) + 1, F.elu(key) + 1
            if keys.mask is not None:
                key = key * keys.mask[:, None, :, None]
            norm = (query * key.sum(dim=2, keepdim=True)).sum(dim=-1, keepdim=True)
            # Turned after the norm, which must stay positive.
            query = self.turn(query, source_cells.query_centres)
            key = self.turn(key, target_cells.key_centres[self.level_of_cells])
            message = query @ (key.mT @ value) / (norm + 1e-6)
        return [merge_heads(message)]


class CosinePruning(nn.Module):
    """The best cosine similarity to any cell of the other image stands in for the NMI."""

    def forward(self, tokens: Tensor, other: Tensor, other_mask: Tensor | None) -> Tensor:
        """tokens: b n c; other: b m c; other_mask: b m or None. Returns logits, b n, float32."""
        if other.shape[1] == 0:
            return tokens.new_full(tokens.shape[:2], -20.0, dtype=torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            similarity = F.normalize(tokens.float(), dim=-1) @ F.normalize(other.float(), dim=-1).mT
        if other_mask is not None:
            similarity = similarity.masked_fill(~other_mask[:, None], -1.0)
        return torch.logit(similarity.amax(dim=-1), eps=1e-4)


def absolute_encoding(dim: int, height: int, width: int, device: torch.device) -> Tensor:
    """h w dim: sines and cosines of the row and column numbers, added to the coarse features."""
    frequency = torch.exp(torch.arange(dim // 4, device=device) * (-math.log(10000.0) / (dim // 4)))
    y = torch.arange(1, height + 1, device=device)[:, None] * frequency  # h dim/4
    x = torch.arange(1, width + 1, device=device)[:, None] * frequency
    x, y = x[None].expand(height, -1, -1), y[:, None].expand(-1, width, -1)
    return torch.stack([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1).flatten(2)
