"""PRISM, Algorithm 1 of the paper from top to bottom. Read `PRISM.match` first.

The parts, in the order of the algorithm: `backbone`; `mpm`, made of `attention` (with `position`) and
`pruning` over the cells that `tokens` gathers; `matching`; `refinement`. Beside them, `ablations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from prism_match.config import ModelConfig
from prism_match.model.ablations import absolute_encoding
from prism_match.model.backbone import ResNetFPN
from prism_match.model.matching import coarse_matches
from prism_match.model.mpm import MPM, LayerState
from prism_match.model.refinement import Refinement, expectation

CELL = 8  # image pixels along the side of a coarse cell
STRIDE = 32  # sides of the images inside the model are multiples of the coarsest level's cell
# Bounds memory, and attention kernels take no more than 65,535 windows.
REFINED_AT_ONCE = 16384
# Not cuDNN's, which plans anew for every number of kept cells.
ATTENTION_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Features:
    """What the backbone sees in b images: independent of what they are matched with."""

    coarse: Tensor  # b h/8 w/8 c
    fine: Tensor  # b c h/2 w/2
    valid: Tensor  # b h/8 w/8, bool: False where the image is padding

    def looked_at(self, keep: Tensor | None) -> Tensor:
        """M_0: the cells that are not padding, of those in `keep` (b h/8 w/8) alone if it is given."""
        return self.valid if keep is None else self.valid & keep


@dataclass(frozen=True)
class PairMatches:
    """The m matches of b pairs, in pixels of the images given to the model."""

    batch: Tensor  # m, int64: the pair a match belongs to; ascending
    keypoints0: Tensor  # m 2, float32
    keypoints1: Tensor  # m 2
    confidence: Tensor  # m, P(i, j)
    std: Tensor  # m, uncertainty of the refinement in pixels
    layers: tuple[LayerState, ...]


class PRISM(nn.Module):
    def __init__(self, config: ModelConfig | None = None):
        super().__init__()
        self.config = c = config or ModelConfig()
        self.backbone = ResNetFPN(c.stage_dims, c.coarse_dim, c.fine_dim)
        self.mpms = nn.ModuleList([MPM(c, last=layer == c.layers - 1) for layer in range(c.layers)])
        self.refinement = Refinement(c.coarse_dim, c.fine_dim, c.fine_heads, c.window)

    @staticmethod
    def from_pretrained(weights: str | Path | None = None) -> PRISM:
        """The model with the weights that ship in the package, or those of a file."""
        from prism_match.weights import load_model

        return load_model(weights)

    def match(
        self,
        a: Features,
        b: Features,
        keep0: Tensor | None = None,
        keep1: Tensor | None = None,
        theta_c: float | None = None,
    ) -> PairMatches:
        """Matches between images whose features are given (from `extract`).

        keep: b h/8 w/8, cells to look at from the start (M_0); None = all."""
        mask0, mask1 = a.looked_at(keep0), b.looked_at(keep1)
        theta_c = self.config.theta_c if theta_c is None else theta_c
        with sdpa_kernel(ATTENTION_KERNELS):
            layers = self.transform(a, b, mask0, mask1)
            last = layers[-1]
            i, j, k, confidence = coarse_matches(last, a.valid, b.valid, self.config, theta_c)
            parts = zip(*(x.split(REFINED_AT_ONCE) for x in (k, i, j)), strict=True)
            heat = [self.refinement(a.fine, b.fine, last.coarse0, last.coarse1, part) for part in parts]
            offset, std = expectation(torch.cat(heat))
        keypoints0 = cell_centre(i, a.coarse.shape[2])
        keypoints1 = cell_centre(j, b.coarse.shape[2]) + offset
        return PairMatches(k, keypoints0, keypoints1, confidence, std, tuple(layers))

    def extract(self, image: Tensor, mask: Tensor | None = None) -> Features:
        """image: b 1|3 h w in [0, 1], any size; mask: b h w, 0 = padding. Padded to a multiple of 32
        on the right and at the bottom, which leaves pixel coordinates as they are."""
        gray = to_gray(image)
        height, width = gray.shape[-2:]
        right, bottom = -width % STRIDE, -height % STRIDE
        if mask is not None or right or bottom:
            mask = torch.ones_like(gray) if mask is None else mask.reshape(gray.shape).to(gray.dtype)
            gray, mask = (F.pad(x, (0, right, 0, bottom)) for x in (gray, mask))
        coarse, fine = self.backbone(gray, mask)
        coarse = coarse.permute(0, 2, 3, 1)
        if self.config.position == "absolute":
            _, rows, columns, dim = coarse.shape
            coarse = coarse + absolute_encoding(dim, rows, columns, coarse.device)
        if mask is None:
            valid = torch.ones(coarse.shape[:3], dtype=torch.bool, device=coarse.device)
        else:
            valid = mask[:, 0, ::CELL, ::CELL] > 0
            coarse = coarse * valid[..., None]
        return Features(coarse, fine, valid)

    def transform(
        self,
        a: Features,
        b: Features,
        mask0: Tensor | None,
        mask1: Tensor | None,
        protect: tuple[Tensor, Tensor] | None = None,
        prune: bool = True,
    ) -> list[LayerState]:
        """The L MPMs, from F_0, M_0 to F_L, M_L. While training, `protect` (b h w each) are cells
        that must not be pruned, whatever the estimator says. Without `prune` the NMI is estimated but
        M_0 stays; if that is None (every cell of unpadded images), attention needs no mask: faster."""
        state = LayerState(a.coarse, b.coarse, mask0, mask1)
        layers = []
        for mpm in self.mpms:
            state = mpm(state, a.valid, b.valid, protect, prune)
            layers.append(state)
        return layers

    @torch.no_grad()  # as programs that call it forget to: gradients take several times the memory
    def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """kornia's LoFTR convention. In: image0, image1 (b 1|3 h w in [0, 1]), optionally mask0,
        mask1 (b h w, 0 = padding). Out: keypoints0, keypoints1 (m 2), confidence (m), batch_indexes."""
        a = self.extract(data["image0"], data.get("mask0"))
        b = self.extract(data["image1"], data.get("mask1"))
        found = self.match(a, b)
        return {
            "keypoints0": found.keypoints0,
            "keypoints1": found.keypoints1,
            "confidence": found.confidence,
            "batch_indexes": found.batch,
        }


def to_gray(image: Tensor) -> Tensor:
    """b 1|3 h w -> b 1 h w."""
    if image.shape[1] == 1:
        return image
    weights = image.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    return (image * weights).sum(dim=1, keepdim=True)


def cell_centre(index: Tensor, columns: int) -> Tensor:
    """index: m, in a map of that many columns. Returns m 2: the pixel (x, y) of the cell's centre."""
    return torch.stack([index % columns, index // columns], dim=1) * float(CELL) + (CELL - 1) / 2
