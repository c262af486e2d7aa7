"""Patch Pruning: the estimator of the NMI, and the rule by which it takes cells away."""

from __future__ import annotations

from torch import Tensor, nn


class PatchPruning(nn.Module):
    """sigma = Sigmoid(Phi_l(F_l)): how much each cell shares with the other image (Eq. 6)."""

    def __init__(self, dim: int):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(dim, dim // 2), nn.GELU(), nn.Linear(dim // 2, 1))

    def forward(self, tokens: Tensor, other: Tensor, other_mask: Tensor | None) -> Tensor:
        """tokens: b n c. Returns the NMI before the sigmoid, b n, float32. The other image's tokens
        are not needed: cross attention has already brought them in."""
        del other, other_mask
        return self.phi(tokens).squeeze(-1).float()


def remaining(keep: Tensor, logit: Tensor, theta_p: float, protect: Tensor | None) -> Tensor:
    """M_l from M_{l-1} (b h w): cells of an NMI below theta_p leave, but for those in `protect`."""
    keep = keep & (logit.sigmoid() >= theta_p)
    return keep if protect is None else keep | protect
