"""Trains the network of `subpixel.py`, on pairs whose truth is exact: photos under homographies and worlds;
and on real ones, of which less is known (`consensus.py`).

The matches it is shown are true ones, moved by about what the refinement of a trained model gets wrong, with
the affine maps around them a little off as well.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from prism_match.config import check_seed
from prism_match.corners import corners
from prism_match.files import atomic_path
from prism_match.subpixel import Pyramid, Subpixel, approach
from prism_match.training.feed import seed_of
from prism_match.training.pairs import (
    CELL,
    PairBatch,
    PairSource,
    between_cells,
    cell_centres,
    warp_between_cells,
)
from prism_match.weights import load_state
from prism_match.weights.store import read_weights, write_tensors

if TYPE_CHECKING:
    from prism_match.training.consensus import ConsensusPairs

CALM = 0.8  # share of pairs in ordinary light: what is learnt here is to be exact
LARGEST_ZOOM = 6.0  # between two images; beyond it a window shows too little
BENT = 0.1  # pixels by which four cells may not fit a plane for a point between them to be known exactly
ONE_WAY = math.pi / 2  # an error in the plane is so many times what is seen of it along one axis
ROUND_WEIGHTS = (0.5, 0.75, 1.0)  # of the loss after each round


@dataclass(frozen=True)
class SubpixelConfig:
    minutes: float = 8.0
    size: int = 480  # of the images
    pairs: int = 10  # of each source that are drawn at a time
    real_pairs: int = 20  # the same of real photos
    cells: int = 1200  # of each pair, at most
    parts: int = 3  # updates that a draw is good for
    lr: float = 1e-3
    warmup: int = 100
    ema: float = 0.998
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)


@dataclass(frozen=True)
class Examples:
    """n true matches of b pairs."""

    first: Pyramid
    second: Pyramid
    image: Tensor  # n, int64: the pair
    points0: Tensor  # n 2
    points1: Tensor  # n 2, the truth
    stretch: Tensor  # n 2 2, the truth about the neighbourhood
    pixel: Tensor  # n: pixels of image 1 that are one of the coarser image
    across: Tensor | None = None  # n 2: the only direction in which the truth is known, of length 1

    def parts(self, count: int) -> list[Examples]:
        """All of them, at random, in so many parts."""
        order = torch.randperm(len(self.image), device=self.image.device)
        return [self.some(rows) for rows in order.tensor_split(count)]

    def some(self, rows: Tensor) -> Examples:
        tensors = {f: getattr(self, f) for f in ("image", "points0", "points1", "stretch", "pixel", "across")}
        return replace(self, **{name: t[rows] for name, t in tensors.items() if t is not None})

    def errors(self, points1: Tensor) -> Tensor:
        """n: of points1 (n 2), as far as they are known, in pixels of the coarser image."""
        off = points1 - self.points1
        if self.across is None:
            return (off.square().sum(1) + 1e-6).sqrt() / self.pixel
        return ((off * self.across).sum(1).square() + 1e-6).sqrt() / self.pixel


def train_subpixel(
    sources: Sequence[PairSource],
    out: Path,
    config: SubpixelConfig,
    device: torch.device,
    init: Path | None = None,
    real: ConsensusPairs | None = None,
) -> dict[str, float]:
    """Writes the averaged weights to `out`; returns the last metrics, those of real pairs by "real_..."."""
    torch.manual_seed(config.seed)
    network = Subpixel().to(device)
    if init is not None:
        load_state(network, read_weights(init)[0], str(init))
    average = torch.optim.swa_utils.AveragedModel(
        network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(config.ema)
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.lr, weight_decay=1e-3)
    started, step = time.monotonic(), 0
    metrics: dict[str, float] = {}
    bar = tqdm(unit="step", mininterval=10)
    # At least once, however slow the machine is.
    while (progress := (time.monotonic() - started) / (60 * config.minutes)) < 1 or step == 0:
        examples = draw_examples(sources, config, step, device)
        parts = examples.parts(config.parts)
        others: Iterable[Examples | None] = [None] * len(parts)
        if real is not None:
            generator = torch.Generator().manual_seed(seed_of(config.seed, step, len(sources)))
            others = real.sample(config.real_pairs, config.cells, generator).parts(config.parts)
        fall = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))
        for part, other in zip(parts, others, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = config.lr * min(1, (step + 1) / config.warmup) * fall
            loss, metrics = subpixel_loss(network, part)
            if other is not None:
                more, found = subpixel_loss(network, other)
                loss, metrics = loss + more, metrics | {f"real_{k}": v for k, v in found.items()}
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            average.update_parameters(network)
            step += 1
            bar.update()
        bar.set_postfix({k: f"{v:.3f}" for k, v in metrics.items()}, refresh=False)
    bar.close()
    summary = {**asdict(config), "steps": step, **{k: round(v, 4) for k, v in metrics.items()}}
    with atomic_path(out) as temporary:
        write_tensors(temporary, average.module.state_dict(), {"training": json.dumps(summary)})
    return metrics


@torch.no_grad()
def draw_examples(
    sources: Sequence[PairSource], config: SubpixelConfig, step: int, device: torch.device
) -> Examples:
    batches = []
    for n, source in enumerate(sources):
        generator = torch.Generator(device).manual_seed(seed_of(config.seed, step, n))
        batches.append(source.sample(config.pairs, config.size, generator))
    return examples_of(batches, config.cells)


def examples_of(batches: Sequence[PairBatch], cells: int) -> Examples:
    """At most `cells` matches of each pair, drawn at random: at corners of cells of image 0, as those that
    are polished, where the cells around tell exactly where these are in image 1, and at centres elsewhere."""

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(b, name) for b in batches])

    image0, image1, warp, seen = (joined(n) for n in ("image0", "image1", "warp0", "visible0"))
    stretch, known = true_stretch(warp, seen)
    scale = scale_between(stretch)
    usable = (seen & known & within_reach(scale)).flatten(1)
    keys, cell = (torch.rand(usable.shape, device=warp.device) + usable).topk(min(cells, usable.shape[1]))
    chosen = keys > 1
    pair = torch.arange(len(warp), device=warp.device)[:, None].expand_as(cell)[chosen]
    cell = cell[chosen]
    centres = cell_centres(image0.shape[-2], image0.shape[-1], warp.device).view(-1, 2)
    points0, points1 = centres[cell], warp.flatten(1, 2)[pair, cell]
    found = torch.stack([corners(gray) for gray in image0[:, 0]]).flatten(1, 2)[pair, cell]
    place, bend = warp_between_cells(warp, pair, found)
    pixel = scale.flatten(1)[pair, cell].clamp(min=1.0)
    exact = between_cells(seen, pair, found)[0].all(0) & (bend < BENT * pixel)
    return Examples(
        Pyramid.of(image0[:, 0]), Pyramid.of(image1[:, 0]), pair,
        torch.where(exact[:, None], found, points0), torch.where(exact[:, None], place, points1),
        stretch.flatten(1, 2)[pair, cell], pixel,
    )  # fmt: skip


def scale_between(stretch: Tensor) -> Tensor:
    """...: of maps ... 2 2, pixels of image 1 that are one of image 0."""
    return torch.linalg.det(stretch).abs().sqrt()


def within_reach(scale: Tensor) -> Tensor:
    return (scale > 1 / LARGEST_ZOOM) & (scale < LARGEST_ZOOM)


def true_stretch(warp: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """warp: b h w 2 of the centres of cells; seen: b h w. How offsets in image 0 become offsets in image 1,
    by the differences to the cells beside it that are seen too (b h w 2 2), and whether there are such."""
    columns, known = [], []
    for dim in (2, 1):  # along x, along y
        n = warp.shape[dim]
        at = torch.arange(n, device=warp.device).view([n if d == dim else 1 for d in range(3)])
        after = torch.roll(seen, -1, dim) & (at < n - 1)
        before = torch.roll(seen, 1, dim) & (at > 0)
        high = torch.where(after[..., None], torch.roll(warp, -1, dim), warp)
        low = torch.where(before[..., None], torch.roll(warp, 1, dim), warp)
        steps = after.long() + before.long()
        columns.append((high - low) / (CELL * steps.clamp(min=1))[..., None])
        known.append(steps > 0)
    return torch.stack(columns, dim=-1), known[0] & known[1]


def disturbed(examples: Examples) -> tuple[Tensor, Tensor]:
    """points1 as a model finds them, and the stretch as its matches around a point tell it."""
    truth, stretch = examples.points1, examples.stretch
    n, device = len(truth), truth.device

    def uniform(*more: int) -> Tensor:
        return torch.rand(n, *more, device=device)

    deviation = 0.15 + 1.1 * uniform(1).square()
    deviation = torch.where(uniform(1) < 0.08, 3.0 * uniform(1), deviation)
    start = truth + deviation * torch.randn_like(truth) * examples.pixel[:, None]
    identity = torch.eye(2, device=device)
    noise = 0.05 * torch.randn_like(stretch) * (uniform(1, 1) < 0.7)
    wrong = torch.where(uniform(1, 1) < 0.04, identity, stretch @ (identity + noise))
    return start, wrong


def subpixel_loss(network: Subpixel, examples: Examples) -> tuple[Tensor, dict[str, float]]:
    """The likelihood of the true points where errors fall off exponentially: being exact pays, and so does a
    stated error that is neither too small nor too large."""
    with torch.no_grad():
        start, wrong = disturbed(examples)
    e, loss = examples, torch.zeros((), device=start.device)
    found = approach(network, e.first, e.second, e.points0, start, wrong, len(ROUND_WEIGHTS), e.image)
    for weight, (points1, expected) in zip(ROUND_WEIGHTS, found, strict=True):
        error, stated = e.errors(points1), expected / e.pixel
        likelihood = ONE_WAY * error / stated + stated.log()
        if e.across is None:
            likelihood = 2 * error / stated + 2 * stated.log()
        loss = loss + weight * likelihood.mean()
    before = e.errors(start)
    medians = {"before": before, "after": error.detach(), "stated": stated.detach()}
    return loss, {"loss": loss.item(), **{k: v.median().item() for k, v in medians.items()}}
