"""What PyTorch has no single operation for, each in its plain form; on a GPU the one of `triton_kernels`, if
all of those give the same in a trial."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import product as product_of
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism_match.model import products
from prism_match.model.attention import attend
from prism_match.model.position import turn
from prism_match.model.processor import few_threads, has_amx
from prism_match.model.winograd import Winograd

try:
    from prism_match.model import triton_kernels
except ImportError:  # no Triton here, which is so on every machine without a GPU
    triton_kernels = None  # type: ignore[assignment]


log = logging.getLogger(__name__)

SCORES, MOST_ROWS = 2**23, 1024  # of `attend_by_rows` at a time
ANEW = 4  # times fewer where they take new memory each time, which the system clears first
LARGE_PIECE, PIECE, PIECE_STEP = 2048, 512, 64  # rows of `in_pieces`; what is left has a multiple of 64
ROW_STEP = 256  # the same of `attend_by_rows`, unless there are no more than this
POINTS_AT_ONCE = 2048  # whose distances to all others are held


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def has_kernels(x: Tensor) -> bool:
    return x.is_cuda and kernels_work(x.device)


@lru_cache
def kernels_work(device: torch.device) -> bool:
    """Tried once: Triton needs a C compiler and a GPU that it knows, and not every machine has both."""
    if triton_kernels is None:
        return False
    try:
        wrong = failed_trials(device)
    except Exception as error:  # whatever a compiler may say
        wrong = [(str(error).strip() or type(error).__name__).splitlines()[-1]]
    if wrong:
        log.warning(
            "fused kernels do not work on this GPU (%s): matching is slower without", ", ".join(wrong)
        )
    return not wrong


def failed_trials(device: torch.device) -> list[str]:
    """The names of those that do not give what their plain forms give."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = draw(1, 16, 5, 6)
    trials: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("rotate", rotate, (draw(20, 2, 16), draw(30, 2), torch.arange(20) + 3, draw(2, 8, 2))),
        ("add_upsampled", add_upsampled, (x, draw(1, 16, 3, 3))),
        (
            "activate",
            lambda y, bias, more: F.relu(y + bias.view(-1, 1, 1) + more),
            (x, draw(16), draw(1, 16, 5, 6)),
        ),
        (
            "norm_gelu",
            lambda y, weight, bias, eps: F.gelu(F.layer_norm(y, y.shape[1:], weight, bias, eps)),
            (draw(7, 64), draw(64), draw(64), 1e-5),
        ),
        ("attend_windows", attend_windows, (draw(3, 25, 2, 32), draw(3, 25, 2, 32))),
        ("log_sum_exp", log_sum_exp, (10 * draw(300, 70), 0.5)),
        ("best_of", best_of, (10 * draw(300, 70), draw(300), draw(70), 0.5)),
        *attention_trials(draw),
        (
            "best_partners",
            best_partners,
            (draw(330, 256).half() / 4, draw(330), torch.tensor([70, 70, 150, 320]), 170, 0.5),
        ),
        ("nearest", nearest, (draw(60, 2), draw(60).abs(), 5)),
    ]
    wrong = []
    for name, plain, arguments in trials:
        expected = plain(*arguments)
        there = (a.to(device) if isinstance(a, Tensor) else a for a in arguments)
        found = getattr(triton_kernels, name)(*there)
        pairs = zip(*((y,) if isinstance(y, Tensor) else y for y in (expected, found)), strict=True)
        if not all(torch.allclose(a.float(), b.cpu().float(), rtol=0.01, atol=0.02) for a, b in pairs):
            wrong.append(name)
    return wrong


def attended_in_fp32(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor, crossed: bool, most: int
) -> Tensor:
    """The plain form of what `triton_kernels.attend_segments` computes."""
    counts, key_counts = (torch.cat([x[:1], x.diff()]).tolist() for x in (ends, key_ends))
    q, k, v = q.float(), k.float(), v.float()
    return attend_segments(q, k, v, ends, key_ends, crossed, most, (counts, key_counts))


def attention_trials(draw: Callable[..., Tensor]) -> list[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """In half precision; and in bf16 of many keys, whose scores are far from each other or not."""
    trials = []
    for dtype, counts, size in (
        (torch.float16, (40, 160), 1), (torch.bfloat16, (540, 1200), 1), (torch.bfloat16, (540, 1200), 9)
    ):  # fmt: skip
        queries, keys, values = size * draw(150, 2, 32), size * draw(counts[1], 2, 32), draw(counts[1], 2, 32)
        tensors = (x.to(dtype) for x in (queries, keys, values))
        ends = torch.tensor([70, 150]), torch.tensor(counts)
        trials.append(("attend_segments", attended_in_fp32, (*tensors, *ends, True, 80)))
    return trials


def rotate(x: Tensor, centres: Tensor, rows: Tensor, b: Tensor) -> Tensor:
    """`RotaryEncoding` of x (k heads d) at centres[rows] (n 2 and k), of frequencies b (heads d/2 2)."""
    if has_kernels(x) and is_power_of_two(x.shape[-1]):
        return triton_kernels.rotate(x, centres, rows, b)
    return turn(x, b, centres[rows][:, None, None])


def add_upsampled(x: Tensor, low: Tensor) -> Tensor:
    """x (b c h w) + low (b c h/2 w/2, rounded up), bilinear, as `F.interpolate` has it."""
    if has_kernels(x):
        return triton_kernels.add_upsampled(x, low)
    up = F.interpolate(low, scale_factor=2.0, mode="bilinear", align_corners=False)
    return x + up[..., : x.shape[2], : x.shape[3]]


def convolve(
    x: Tensor,
    conv: nn.Conv2d | Winograd,
    residual: Tensor | None = None,
    slope: float = 0.0,
    gelu: bool = False,
) -> Tensor:
    """ReLU, below zero of that slope, or GELU, of the convolution of x (b c h w) and a residual."""
    if isinstance(conv, Winograd):
        return conv(x, residual, slope)
    # PyTorch adds a bias in a pass of its own, and so what comes after it.
    if not torch.is_grad_enabled() and has_kernels(x):
        y = F.conv2d(x, conv.weight, None, conv.stride, conv.padding)
        return triton_kernels.activate(y, conv.bias, residual, slope, gelu)  # type: ignore[arg-type]
    y = conv(x)
    in_place = not torch.is_grad_enabled()  # of large maps, new memory takes longer than the sum
    if residual is not None:
        y = y.add_(residual) if in_place else y + residual
    if gelu:
        return F.gelu(y)
    return F.leaky_relu(y, slope, in_place) if slope else F.relu(y, in_place)


def convolve_to(dtype: torch.dtype, x: Tensor, conv: nn.Conv2d) -> Tensor:
    """The convolution of x in its own precision, the result in another."""
    if not torch.is_grad_enabled() and has_kernels(x):
        y = F.conv2d(x, conv.weight, None, conv.stride, conv.padding)
        return triton_kernels.activate(y, conv.bias, slope=1.0, dtype=dtype)  # type: ignore[arg-type]
    return conv(x).to(dtype)


def feed_forward(layers: nn.Sequential, x: Tensor) -> Tensor:
    """`attention.feed_forward` of x (... c)."""
    widen, norm, _, narrow = layers
    hidden = widen(x)
    if has_kernels(hidden) and is_power_of_two(hidden.shape[-1]):
        flat = hidden.flatten(0, -2)
        return narrow(triton_kernels.norm_gelu(flat, norm.weight, norm.bias, norm.eps).view_as(hidden))  # type: ignore[arg-type]
    return narrow(F.gelu(norm(hidden)))


def attend_windows(query: Tensor, value: Tensor) -> Tensor:
    """Attention within n small windows, whose keys are the values: query: n k h d; value: n m h d."""
    dim, most = query.shape[-1], max(query.shape[1], value.shape[1])
    if has_kernels(query) and is_power_of_two(dim) and dim >= 16 and most <= 64:
        return triton_kernels.attend_windows(query, value)
    q, v = query.transpose(1, 2), value.transpose(1, 2)
    return attend(q, v, v, None).transpose(1, 2)


def log_sum_exp(s: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Of the rows and of the columns of scale s (n m)."""
    if has_kernels(s):
        return triton_kernels.log_sum_exp(s, scale)
    s = s if scale == 1 else scale * s
    return s.logsumexp(dim=1), s.logsumexp(dim=0)


def best_of(s: Tensor, rows: Tensor, columns: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of 2 scale s + rows (n) + columns (m): the highest of each row and where it is; and of each column."""
    if has_kernels(s):
        return triton_kernels.best_of(s, rows, columns, scale)
    total = 2 * scale * s + rows[:, None] + columns
    return *total.max(dim=1), *total.max(dim=0)


def finds_partners(device: torch.device, dtype: torch.dtype, channels: int) -> bool:
    """Whether there is `triton_kernels.best_partners` for tokens like these."""
    half = dtype in (torch.bfloat16, torch.float16)
    return (
        device.type == "cuda"
        and half
        and is_power_of_two(channels)
        and 16 <= channels <= 256
        and kernels_work(device)
    )


def best_partners(
    tokens: Tensor, bonus: Tensor, ends: Tensor, most: int, scale: float
) -> tuple[Tensor, Tensor]:
    """For each token (n c) the highest log P of those in the other image, and which one that is (n, int64);
    -inf and 0 where there are none, and after the last image.
    ends: of the images in the tokens, those of the first half being matched with those of the second; most:
    tokens of one image; bonus: n, the logarithm of sigma; scale: tau.

    On a GPU the matrix is computed in tiles that are held nowhere, once for its sums and once for the
    highest, and the host need not know how many tokens an image has."""
    if has_kernels(tokens):
        return triton_kernels.best_partners(tokens, bonus, ends, most, scale)
    image = torch.searchsorted(ends, torch.arange(len(tokens), device=ends.device), right=True)
    half = len(ends) // 2
    partner = torch.where(image < half, image + half, -1)  # of the first half's
    matched = partner[:, None] == image
    matched = matched | matched.mT
    s = (scale * tokens.float() @ tokens.float().mT).masked_fill(~matched, -torch.inf)
    term = bonus - s.logsumexp(1)
    best, arg = (2 * s + term[:, None] + term).masked_fill(~matched, -torch.inf).max(dim=1)
    return best, torch.where(best > -torch.inf, arg, 0)


def nearest(points: Tensor, behind: Tensor, count: int) -> Tensor:
    """n count: the other points (n 2) that are nearest to each, where `behind` (n) is added to the distance
    of each as a neighbour."""
    if points.dtype == torch.float32 and has_kernels(points) and len(points) <= triton_kernels.MOST_POINTS:
        return triton_kernels.nearest(points, behind, count)
    found = []
    for part in torch.arange(len(points), device=points.device).split(POINTS_AT_ONCE):
        distance = squared_distances(points[part], points).sqrt_().add_(behind)
        distance.scatter_(1, part[:, None], torch.inf)
        found.append(distance.topk(count, dim=1, largest=False).indices)
    return torch.cat(found)


def squared_distances(points: Tensor, others: Tensor) -> Tensor:
    """n m: between n 2 and m 2. Not by `torch.cdist`: its product of matrices is off by pixels where
    coordinates are large, and by tens of them in TF32; its other way takes a GPU a block of threads each."""
    x, y = (a[:, None] - b for a, b in zip(points.unbind(1), others.unbind(1), strict=True))
    return x.square_().addcmul_(y, y)


def attends_segments(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether `attend_segments` can do without knowing their lengths beforehand."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and is_power_of_two(dim) and dim >= 16 and kernels_work(device)


def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    key_ends: Tensor,
    crossed: bool,
    most: int,
    lengths: tuple[Sequence[int], Sequence[int]] | None,
) -> Tensor:
    """Attention within segments that lie one after the other: query: n h d; key, value: m h d; ends: of the
    segments; crossed: those of the first half see the keys of the second half's, and the other way round;
    most: queries of a segment; lengths: of the queries' and of the keys' segments, which the plain form
    needs. No key at all gives zeros, and what lies after the last segment anything."""
    if lengths is None:
        return triton_kernels.attend_segments(query, key, value, ends, key_ends, crossed, most)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # 1 h n d
    counts, key_counts = (list(x) for x in lengths)
    keys = list(zip(k.split(key_counts, 2), v.split(key_counts, 2), strict=True))
    if crossed:
        half = len(keys) // 2
        keys = keys[half:] + keys[:half]
    attended = attend_by_rows if goes_by_rows(query) else partial(attend, mask=None)
    parts = zip(q.split(counts, 2), keys, strict=True)
    return torch.cat([attended(each, *seen)[0].transpose(0, 1) for each, seen in parts])


def goes_by_rows(query: Tensor) -> bool:
    if query.device.type != "cpu" or not few_threads() or torch.is_grad_enabled():
        return False
    if query.dtype == torch.bfloat16:
        return not has_amx()
    return products.is_worth_it(query.device, query.dtype)


def attend_by_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`attend` (b h n d), some rows of scores at a time. PyTorch's own takes as long in bf16 as in fp32 where
    there is no AMX, although plain products of matrices are twice as fast; and in fp32 it is as slow as MKL
    where that is."""
    (batch, heads, n, dim), m = query.shape, key.shape[2]
    if n == 0 or m == 0:
        return torch.zeros_like(query)
    # Few numbers of rows and keys: see `in_pieces`.
    keys = m + -m % (PIECE_STEP if m <= PIECE else 2 * PIECE_STEP)
    by_convolving = products.is_worth_it(query.device, query.dtype)
    at_once = SCORES // ANEW if by_convolving else SCORES
    most = max(at_once // keys // PIECE_STEP, 1) * PIECE_STEP
    step = min(most, PIECE_STEP if n <= ROW_STEP else ROW_STEP)
    query = F.pad(query, (0, 0, 0, -n % step))
    rows = min(most // step * step, MOST_ROWS, query.shape[2])
    key, value = F.pad(key * dim**-0.5, (0, 0, 0, keys - m)), F.pad(value.mT, (0, keys - m))
    scores, result = query.new_empty(rows, keys), torch.empty_like(query)

    def multiply(a: Tensor, b: Tensor, place: Tensor) -> Tensor:
        """a b^T, in a place that is there already, where that can be: new memory takes time."""
        return products.multiply(a, b) if by_convolving else torch.mm(a, b.mT, out=place)

    for at in product_of(range(batch), range(heads)):
        for part, message in zip(query[at].split(rows), result[at].split(rows), strict=True):
            s = multiply(part, key[at], scores[: len(part)])
            s[:, m:] = -torch.inf
            torch.softmax(s, dim=-1, out=s)
            message.copy_(multiply(s, value[at], message))
    return result[:, :, :n]


def in_pieces(work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """work of each row of x (n c). On a CPU, where oneDNN does it, of few numbers of rows alone: it keeps
    half a MiB for every number that it has seen, and takes a millisecond for each that it has not."""
    if x.device.type != "cpu" or len(x) == 0 or not by_onednn(x):
        return work(x)
    count = len(x)
    large, some = count // LARGE_PIECE * LARGE_PIECE, count // PIECE * PIECE
    rest = F.pad(x[some:], (0, 0, 0, -count % PIECE_STEP))
    pieces = [*x[:large].split(LARGE_PIECE), *x[large:some].split(PIECE), rest]
    return torch.cat([work(piece) for piece in pieces if len(piece)])[:count]


def by_onednn(x: Tensor) -> bool:
    """Whether it is oneDNN that multiplies tensors of the CPU like this."""
    return x.dtype != torch.float32 or products.is_worth_it(x.device, x.dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T (n c and m c) in float32; of numbers in half precision it is exact but for the sums."""
    if a.is_cuda and a.dtype != torch.float32 and hasattr(torch.ops.aten.mm, "dtype"):
        # Rows that begin at multiples of 64 bytes: of other matrices it takes several times as long.
        return torch.mm(a, F.pad(b, (0, 0, 0, -len(b) % 16)).mT, out_dtype=torch.float32)[:, : len(b)]
    return a.float() @ b.float().mT
