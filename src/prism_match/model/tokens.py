"""Which cells of an image take part in an MPM, and the gathering of their tokens.

Pruning is real work saved: a `Selection` takes the pruned cells out of queries and keys before
anything is computed for them. While training, shapes must stay fixed and every cell needs a gradient,
so there the same `Selection` keeps all cells in place and carries a mask instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prism_match.model.position import normalised_centres


@dataclass(frozen=True)
class Selection:
    """The tokens of a flattened map (b n c) that take part: b k of them, k <= n."""

    index: Tensor | None  # b k, int64; None = all tokens in order (k = n)
    mask: Tensor | None  # b k, bool; False = a filler or a masked token; None = all True

    @staticmethod
    def of(keep: Tensor | None, gather: bool) -> Selection:
        """keep: b n, bool; None = all, known without a look. With `gather`, k is the largest number of
        kept tokens in the batch, and shorter rows are filled up with tokens that were not kept (so that
        no index repeats)."""
        if keep is None:
            return WHOLE
        if not gather:
            return Selection(None, keep)
        counts = keep.sum(dim=1)
        fewest, most = torch.stack([counts.min(), counts.max()]).tolist()
        if fewest == keep.shape[1]:
            return WHOLE
        index = torch.argsort(keep, dim=1, descending=True, stable=True)[:, :most]
        return Selection(index, None if fewest == most else keep.gather(1, index))

    def gather(self, tokens: Tensor) -> Tensor:
        """b n c -> b k c."""
        if self.index is None:
            return tokens
        return tokens.gather(1, self.index[..., None].expand(-1, -1, tokens.shape[-1]))

    def scatter(self, tokens: Tensor, updated: Tensor) -> Tensor:
        """tokens (b n c) with the selected ones replaced by `updated` (b k c)."""
        if self.mask is not None:
            updated = torch.where(self.mask[..., None], updated, self.gather(tokens).to(updated.dtype))
        if self.index is None:
            return updated
        return tokens.to(updated.dtype).scatter(1, self.index[..., None].expand_as(updated), updated)


WHOLE = Selection(None, None)


@dataclass(frozen=True)
class Cells:
    """The cells of one image that take part in an MPM, as queries and, per level, as keys."""

    queries: Selection
    keys: tuple[Selection, ...]
    query_centres: Tensor | None = None  # b k 2; None where there is no rotary encoding
    key_centres: tuple[Tensor | None, ...] = (None,)

    @staticmethod
    def of(keep: Tensor | None, valid: Tensor, levels: tuple[int, ...], gather: bool) -> Cells:
        """keep: b h w, the pruning mask M; valid: b h w, False where the image is padding. None: nothing
        is pruned and there is no padding, so that attention runs without a mask.

        The coarsest level of a pyramid is never pruned, so that the whole scene stays in sight.
        The others see the mask down-sampled to their size by nearest neighbour."""
        height, width = valid.shape[1:]
        extent = map_extent(valid)
        queries = Selection.of(None if keep is None else keep.flatten(1), gather)
        keys, centres = [], []
        for i, level in enumerate(levels):
            unpruned = i == 0 and len(levels) > 1
            if keep is None or (level == 1 and not unpruned):
                selection = queries
            else:
                mask = (valid if unpruned else keep)[:, ::level, ::level]
                selection = Selection.of(mask.flatten(1), gather)
            keys.append(selection)
            centres.append(selection.gather(normalised_centres(extent, height, width, level)))
        query_centres = queries.gather(normalised_centres(extent, height, width, level=1))
        return Cells(queries, tuple(keys), query_centres, tuple(centres))


def map_extent(valid: Tensor) -> Tensor:
    """valid: b h w. Returns b 2: the number of rows and columns up to the last valid one."""
    rows = torch.arange(1, valid.shape[1] + 1, device=valid.device) * valid.any(dim=2)
    columns = torch.arange(1, valid.shape[2] + 1, device=valid.device) * valid.any(dim=1)
    return torch.stack([rows.amax(dim=1), columns.amax(dim=1)], dim=1)
