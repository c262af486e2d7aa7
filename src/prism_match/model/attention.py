"""SADPA, Scale-Aware Dynamic Pruning Attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism_match.model.position import RotaryEncoding
from prism_match.model.tokens import Cells

HIDDEN = -3e4  # times the scale of attention: no share for a key, and a number in every precision
ALIGNED = 8  # channels of a head, in multiples of which kernels take them


class SADPA(nn.Module):
    """Attention from the kept cells of a source map to a target map seen at several scales."""

    def __init__(self, dim: int, heads: int, levels: tuple[int, ...], rotary: bool):
        super().__init__()
        self.heads, self.levels = heads, levels
        self.query = nn.Linear(dim, dim)
        # Kernel and stride of Conv_i are equal, so it is a linear map of r x r patches of cells,
        # and it can be applied to just the patches that are kept.
        self.convs = nn.ModuleList([nn.Linear(level * level * dim, dim) for level in levels])
        self.rotary = RotaryEncoding(dim, heads) if rotary else None
        self.ffn = feed_forward((1 + len(levels)) * dim, dim)

    def forward(self, source: Tensor, target: Tensor, source_cells: Cells, target_cells: Cells) -> Tensor:
        """source: b h w c; target: b h' w' c; their cells. Returns the updated source; the cells of
        the source that are pruned stay as they were."""
        tokens = source_cells.queries.gather(source.flatten(1, 2))  # b k c
        messages = self.messages(tokens, target, source_cells, target_cells)
        updated = tokens + self.ffn(torch.cat([tokens, *messages], dim=-1))
        return source_cells.queries.scatter(source.flatten(1, 2), updated).unflatten(1, source.shape[1:3])

    def messages(
        self, tokens: Tensor, target: Tensor, source_cells: Cells, target_cells: Cells
    ) -> list[Tensor]:
        """m_i = Attention(Q, K_i, V_i) for each level i, each b k c."""
        query = self.turn(split_heads(self.query(tokens), self.heads), source_cells.query_centres)
        messages = []
        for conv, level, keys, centres in zip(
            self.convs, self.levels, target_cells.keys, target_cells.key_centres, strict=True
        ):
            value = split_heads(conv(keys.gather(patches(target, level))), self.heads)  # K_i = V_i
            message = attend(query, self.turn(value, centres), value, keys.mask)
            messages.append(merge_heads(message))
        return messages

    def turn(self, x: Tensor, centres: Tensor | None) -> Tensor:
        return x if self.rotary is None or centres is None else self.rotary(x, centres)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """b h n d, b h m d, b h m d -> b h n d; mask: b m. No key at all gives a message of zeros."""
    if query.numel() == 0 or key.shape[2] == 0:  # cuDNN answers None to no queries
        return torch.zeros_like(query)
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value)
    empty = ~mask.any(dim=1, keepdim=True)
    seen = mask | empty
    if query.is_cuda:  # where the fastest kernel takes no mask
        message = attend_seen(query, key, value, seen)
    else:
        message = F.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None, None])
    return message.masked_fill(empty[:, :, None, None], 0.0)


def attend_seen(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """As with a mask (b m, at least one key in each), which is one more channel of queries and keys here."""
    heads, dim = query.shape[1], query.shape[3]
    more = -(dim + 1) % ALIGNED
    hidden = torch.where(seen, 0.0, HIDDEN).to(key.dtype)[:, None, :, None].expand(-1, heads, -1, 1)
    query = F.pad(F.pad(query, (0, 1), value=1.0), (0, more))
    key = F.pad(torch.cat([key, hidden], dim=-1), (0, more))
    value = F.pad(value, (0, 1 + more))
    return F.scaled_dot_product_attention(query, key, value, scale=dim**-0.5)[..., :dim]


def patches(x: Tensor, level: int) -> Tensor:
    """b h w c -> b (h/r * w/r) (r * r * c), with r = `level`."""
    x = x.unflatten(1, (-1, level)).unflatten(3, (-1, level))  # b h/r r w/r r c
    return x.transpose(2, 3).flatten(3).flatten(1, 2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """b n (h d) -> b h n d."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """b h n d -> b n (h d)."""
    return x.transpose(1, 2).flatten(2)


def feed_forward(dim_in: int, dim_out: int) -> nn.Sequential:
    """FFN(m_1 + ... + m_n, F_s) with the concatenation done by the caller."""
    hidden = 2 * dim_out
    return nn.Sequential(
        nn.Linear(dim_in, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, dim_out)
    )
