"""3x3 convolutions on a CPU with a quarter of the products: Winograd's F(4x4, 3x3), unknown to PyTorch.

A tile of 4x4 pixels of the result comes from 6x6 pixels of the map. Seen as polynomials, of which the product
is wanted, both the map and the weights are told by their values at 6x6 points, and 36 products of these do
what takes the convolution itself 144. Small matrices of whole numbers lead to the values and back, so that
float32 loses next to nothing (1e-5 of the largest value). A band of tiles is worked through at a time, so
that what lies between stays in the caches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism_match.model.processor import MOST_THREADS, computes_512_bits, few_threads, is_x86

TILE, SEEN = 4, 6  # pixels along the side of a tile, and of what it comes from
POINTS = SEEN * SEEN
AT_ONCE = 2**19  # values of a band, for each thread
NARROWEST = 64  # channels: with fewer, the ways to the values and back are most of the work

# Of the points 0, 1, -1, 2, -2 and infinity: the map's values, the weights' ones, and the result's pixels.
OF_MAP = [
    [4, 0, -5, 0, 1, 0],
    [0, -4, -4, 1, 1, 0],
    [0, 4, -4, -1, 1, 0],
    [0, -2, -1, 2, 1, 0],
    [0, 2, -1, -2, 1, 0],
    [0, 4, 0, -5, 0, 1],
]
OF_WEIGHTS = [
    [1 / 4, 0, 0],
    [-1 / 6, -1 / 6, -1 / 6],
    [-1 / 6, 1 / 6, -1 / 6],
    [1 / 24, 1 / 12, 1 / 6],
    [1 / 24, -1 / 12, 1 / 6],
    [0, 0, 1],
]
TO_PIXELS = [
    [1, 1, 1, 1, 1, 0],
    [0, 1, -1, 2, -2, 0],
    [0, 1, 1, 4, 4, 0],
    [0, 1, -1, 8, -8, 1],
]


def is_worth_it(device: torch.device) -> bool:
    """Where it is faster: PyTorch's convolutions leave less to win the more bits a CPU computes at once."""
    return device.type == "cpu" and is_x86() and few_threads() and not computes_512_bits()


def use_winograd(module: nn.Module) -> None:
    """In the place of each convolution that has this form and enough channels, if it is faster so."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d) and fits(child) and is_worth_it(child.weight.device):
                setattr(parent, name, Winograd(child))


def fits(conv: nn.Conv2d) -> bool:
    shape = conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups
    return shape == ((3, 3), (1, 1), (1, 1), (1, 1), 1) and min(conv.weight.shape[:2]) >= NARROWEST


class Winograd(nn.Module):
    """A 3x3 convolution, with what comes after it. Maps are float32 and have their channels last."""

    values: Tensor  # 36 c k, of the weights
    of_map: Tensor  # 36 36
    to_pixels: Tensor  # 16 36
    bias: Tensor | None

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        there, of_map, back = (torch.tensor(x, dtype=torch.float64) for x in (OF_WEIGHTS, OF_MAP, TO_PIXELS))
        values = torch.einsum("ai,bj,kcij->abck", there, there, conv.weight.detach().double())
        self.register_buffer("values", values.flatten(0, 1).float())
        self.register_buffer("of_map", torch.kron(of_map, of_map).float())
        self.register_buffer("to_pixels", torch.kron(back, back).float())
        self.register_buffer("bias", None if conv.bias is None else conv.bias.detach())

    def forward(self, x: Tensor, residual: Tensor | None = None, slope: float = 1.0) -> Tensor:
        """b c h w -> b k h w: the convolution, with a residual, and what is below zero times `slope`."""
        batch, c, height, width = x.shape
        k = self.values.shape[2]
        rows, columns = -(-height // TILE), -(-width // TILE)
        values = AT_ONCE * min(torch.get_num_threads(), MOST_THREADS // 2)
        band = min(max(values // (POINTS * columns * max(c, k)), 1), rows)
        room = Room(x, band, columns, c, k)
        result = x.new_empty(batch, rows * TILE, columns * TILE, k)
        for n in range(batch):
            for top in range(0, rows, band):
                count = min(band, rows - top)
                y = self.band(room, x[n].permute(1, 2, 0), top * TILE, count)
                place = result[n].view(rows, TILE, columns, TILE, k)[top : top + count]
                if self.bias is None:
                    place.copy_(y)
                else:
                    torch.add(y, self.bias, out=place)
                inside = slice(top * TILE, min((top + count) * TILE, height))
                part = result[n, inside, :width]
                if residual is not None:
                    part += residual[n].permute(1, 2, 0)[inside]
                if slope != 1:
                    F.leaky_relu_(part, slope) if slope else F.relu_(part)
        return result[:, :height, :width].permute(0, 3, 1, 2)

    def band(self, room: Room, image: Tensor, top: int, count: int) -> Tensor:
        """The result from row `top` of the image (h w c) on, as rows of tiles: count 4 columns 4 k."""
        height, width, c = image.shape
        columns, k = room.columns, self.values.shape[2]
        # The image with a pixel of zeros around it, as far as this band sees it.
        start, stop = max(top - 1, 0), min(top + count * TILE + 1, height)
        room.padded[: start - top + 1] = 0
        room.padded[start - top + 1 : stop - top + 1, 1 : width + 1] = image[start:stop]
        room.padded[stop - top + 1 :] = 0
        down, right, _ = room.padded.stride()
        strides = (down, right, TILE * down, TILE * right, 1)
        windows = room.padded.as_strided((SEEN, SEEN, count, columns, c), strides)
        tiles = count * columns
        seen, values = (x[: POINTS * tiles * c].view(POINTS, -1) for x in (room.seen, room.values))
        products = room.products[: POINTS * tiles * k].view(POINTS, -1)
        pixels = room.pixels[: TILE * TILE * tiles * k].view(TILE * TILE, -1)
        seen.view(windows.shape).copy_(windows)
        torch.mm(self.of_map, seen, out=values)
        torch.bmm(values.view(POINTS, tiles, c), self.values, out=products.view(POINTS, tiles, k))
        torch.mm(self.to_pixels, products, out=pixels)
        return pixels.view(TILE, TILE, count, columns, k).permute(2, 0, 3, 1, 4)


class Room:
    """For what lies between the map and the result of a band, the same for all of them."""

    def __init__(self, x: Tensor, band: int, columns: int, c: int, k: int):
        tiles, self.columns = band * columns, columns
        self.padded = x.new_zeros(band * TILE + 2, columns * TILE + 2, c)
        self.seen, self.values = (x.new_empty(POINTS * tiles * c) for _ in range(2))
        self.products, self.pixels = x.new_empty(POINTS * tiles * k), x.new_empty(TILE * TILE * tiles * k)
