"""How long PRISM takes on this machine, and with how much memory; beside it every peer that is installed.

Whoever is compared takes turns: one run of each, then the next of each, so that a clock that slows down, or
another program, is everybody's. docs/speed.md says what a row means."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from prism_match import __version__
from prism_match.config import ModelConfig, Precision
from prism_match.engine import Matcher
from prism_match.errors import UserError
from prism_match.evaluation.peers import UNTRAINED, Peer, first_line, open_peers
from prism_match.evaluation.report import Report, Table
from prism_match.files import atomic_path
from prism_match.images import SMALLEST, load_image, resize
from prism_match.matcher import DTYPES, find_device
from prism_match.model.prism import Features
from prism_match.model.recorder import PATIENCE
from prism_match.runtime import open_session
from prism_match.stages import STAGES, Stopwatch

SIZES = (640, 832, 1152, 1600)
RANGE = (320, 480, 640, 832, 1152, 1600, 2048, 2560, 3072, 4096)
OURS = "PRISM"
ASSETS = Path(__file__).parents[1] / "assets"
MATRICES = 6  # of scores that a dense peer holds at a time, at least
PICTURES = (".png", ".svg", ".pdf")

Run = Callable[[], Any]  # gives what has a row for each match


@dataclass(frozen=True)
class SpeedOptions:
    photos: tuple[Path, Path] | None = None  # None: the bundled pair
    sizes: tuple[int, ...] = SIZES  # longer sides in pixels
    precisions: tuple[Precision, ...] = ("auto",)
    device: str = "auto"
    peers: bool = True
    repeats: int = 0  # 0: 20 on a GPU, 3 on a CPU
    batch: int = 0  # pairs from files at a time; 0: 8 on a GPU, 2 on a CPU
    whole_range: bool = False  # only what is drawn over the number of pixels: the models alone
    onnx: Path | None = None  # a file of `prism export onnx`, timed beside fp32 on a CPU
    onnx_backend: bool = False  # also `Matcher(backend="onnx")`, beside fp32 on a CPU
    weights: str | None = None
    config: ModelConfig | None = None

    def settled(self, device: torch.device) -> SpeedOptions:
        """For that device."""
        repeats, batch = (20, 8) if device.type == "cuda" else (3, 2)
        return replace(self, repeats=self.repeats or repeats, batch=self.batch or batch)


@dataclass(frozen=True)
class Row:
    method: str
    package: str
    what: str  # "model", "onnx", "match", "files" or "set", and "... by onnx" of a `Matcher` that runs so
    width: int
    height: int
    precision: str
    milliseconds: float | None = None  # the median; None: it could not be run
    milliseconds_95: float | None = None  # the 95th percentile
    repeats: int = 0
    memory_mib: float | None = None  # taken of a GPU above what was held before; None: a CPU
    pairs_per_second: float | None = None
    matches: int | None = None
    kept_cells: tuple[int, int] | None = None  # of either image, after the last MPM
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.method}, {self.what}" if self.method == OURS else f"{self.method} ({self.package})"


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of `Matcher.match` from two files, means of several runs."""

    width: int
    height: int
    precision: str
    stages: dict[str, float]
    total: float

    @property
    def other(self) -> float:
        return max(0.0, self.total - sum(self.stages.values()))


def measure(options: SpeedOptions, after_each: Callable[[Report], None] = lambda report: None) -> Report:
    """after_each: is given what there is after each size, so that it is not lost where the rest is."""
    device = find_device(options.device)
    options, machine = options.settled(device), describe_machine(device)
    photos = load_pair(options.photos)
    check_shapes(photos, options)
    exported = open_onnx(options.onnx) if options.onnx else None
    rows: list[Row] = []
    stages: list[StageTimes] = []
    skipped: dict[str, str] = {}
    # A bar only on a terminal.
    with tqdm(total=len(options.sizes) * len(options.precisions), unit="size", disable=None) as bar:
        for precision in options.precisions:
            matcher = Matcher(
                options.weights, device=device, precision=precision, size=max(options.sizes),
                rotate="never", rescale="never", config=options.config,
            )  # fmt: skip
            on_cpu = device.type == "cpu" and matcher.dtype == torch.float32
            by_onnx = None
            if options.onnx_backend and on_cpu:
                by_onnx = Matcher(
                    options.weights, device=device, precision=precision, backend="onnx",
                    size=max(options.sizes), rotate="never", rescale="never", config=options.config,
                )  # fmt: skip
            peers, skipped = open_peers(device, matcher.dtype) if options.peers else ([], {})
            for size in options.sizes:
                bar.set_postfix_str(f"{size} px, {precision_name(matcher)}")
                images = [fit(photo, size, options.photos is None) for photo in photos]
                contenders = [ours_alone(matcher, images), *theirs(matcher, peers, images)]
                if exported and on_cpu:
                    contenders.insert(1, exported_alone(exported, matcher, images))
                if by_onnx is not None:
                    contenders.insert(1, ours_alone(by_onnx, images))
                if not options.whole_range:
                    contenders.insert(1, ours_whole(matcher, images))
                    if by_onnx is not None:
                        contenders.insert(2, ours_whole(by_onnx, images))
                rows += race(contenders, matcher, images, options.repeats)
                if not options.whole_range:
                    with tempfile.TemporaryDirectory() as folder:
                        count = options.batch * (4 if device.type == "cuda" else 1)
                        pairs = write_pairs(images, Path(folder), count)
                        rows.append(many(matcher, images, pairs, options.batch))
                        ran = rows[-1].milliseconds is not None
                        if ran and device.type == "cuda":
                            rows.append(many(matcher, images, crossed(pairs), options.batch, "set"))
                        if ran:
                            stages.append(split(matcher, images, pairs[0], min(options.repeats, 5)))
                report = make_report(options, machine, photos, rows, stages, skipped)
                after_each(report)
                bar.update()
    return report


# ---- what is matched


def load_pair(paths: tuple[Path, Path] | None) -> list[np.ndarray]:
    """h w, float32 each."""
    first, second = paths or (ASSETS / "astronaut0.jpg", ASSETS / "astronaut1.jpg")
    return [load_image(first).gray, load_image(second).gray]


def check_shapes(photos: Sequence[np.ndarray], options: SpeedOptions) -> None:
    """Before minutes are spent: a long photo may be too narrow at a small size."""
    for size in options.sizes:
        for gray in photos:
            width, height = fitted_size(gray, size, options.photos is None)
            if min(width, height) < SMALLEST:
                raise UserError(
                    f"at {size} pixels a photo is {width}x{height}: sides of at least {SMALLEST} are needed"
                )


def fitted_size(gray: np.ndarray, size: int, four_to_three: bool) -> tuple[int, int]:
    """Width, height."""
    height, width = gray.shape
    scale = size / max(width, height)
    return (size, size * 3 // 4) if four_to_three else (round(width * scale), round(height * scale))


def fit(gray: np.ndarray, size: int, four_to_three: bool) -> np.ndarray:
    """h w, uint8, whose longer side is `size`, enlarged if need be; if asked for, what is in the middle of
    it in the shape of 4:3."""
    target = fitted_size(gray, size, four_to_three)
    if four_to_three:
        height, width = gray.shape
        w, h = min(width, height * 4 // 3), min(height, width * 3 // 4)
        top, left = (height - h) // 2, (width - w) // 2
        gray = gray[top : top + h, left : left + w]
    return (resize(np.ascontiguousarray(gray), *target) * 255).round().astype(np.uint8)


def write_pairs(images: Sequence[np.ndarray], folder: Path, count: int) -> list[tuple[Path, Path]]:
    """JPEG files, no two of equal content: features are computed once for each photo."""
    pairs = []
    for n in range(count):
        paths = folder / f"{n}a.jpg", folder / f"{n}b.jpg"
        for which, (image, path) in enumerate(zip(images, paths, strict=True)):
            image = image.copy()
            cv2.putText(image, f"{n}.{which}", (2, 12), cv2.FONT_HERSHEY_PLAIN, 0.8, 255)
            cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, 95])
        pairs.append(paths)
    return pairs


def crossed(pairs: list[tuple[Path, Path]], each: int = 10) -> list[tuple[Path, Path]]:
    """Each first photo with so many of the second ones, and the other way round."""
    return [(a, pairs[(n + k) % len(pairs)][1]) for n, (a, _) in enumerate(pairs) for k in range(each)]


# ---- who runs


@dataclass(frozen=True)
class Contender:
    method: str
    package: str
    what: str
    run: Run
    note: str = ""
    bytes: int = 0  # that it needs at least


def ours_alone(matcher: Matcher, images: Sequence[np.ndarray]) -> Contender:
    image0, image1 = to_tensors(matcher, images)
    model = matcher.model

    def run() -> Tensor:
        if image0.shape == image1.shape and matcher.images_at_once(image0.numel()) > 1:
            both = model.extract(torch.cat([image0, image1]))
            a, b = (Features(*(x[n : n + 1] for x in vars(both).values())) for n in range(2))
        else:
            a, b = model.extract(image0), model.extract(image1)
        return model.match(a, b).confidence

    return Contender(OURS, version(), named("model", matcher), torch.inference_mode()(run), note_of(matcher))


def ours_whole(matcher: Matcher, images: Sequence[np.ndarray]) -> Contender:
    what = named("match", matcher)
    return Contender(OURS, version(), what, lambda: matcher.match(*images), note_of(matcher))


def named(what: str, matcher: Matcher) -> str:
    return what if matcher.backend == "torch" else f"{what} by {matcher.backend}"


def open_onnx(path: Path) -> Any:
    session = open_session(str(path), str(path))
    given = {x.name for x in session.get_inputs()}
    if given != {"image0", "image1", "threshold"} or "theta_c" not in metadata(session):
        raise UserError(f"{path}: not a file of `prism export onnx` that takes two images")
    return session


def metadata(session: Any) -> dict[str, str]:
    return session.get_modelmeta().custom_metadata_map


def exported_alone(session: Any, matcher: Matcher, images: Sequence[np.ndarray]) -> Contender:
    import onnxruntime

    image0, image1 = (x.numpy() for x in to_tensors(matcher, images))
    threshold = np.array(float(metadata(session)["theta_c"]), np.float32)

    def run() -> np.ndarray:
        return session.run(["scores"], {"image0": image0, "image1": image1, "threshold": threshold})[0]

    return Contender(OURS, version(), "onnx", run, f"onnxruntime {onnxruntime.__version__}")


def note_of(matcher: Matcher) -> str:
    return "" if matcher.info.trained else UNTRAINED


def theirs(matcher: Matcher, peers: Sequence[Peer], images: Sequence[np.ndarray]) -> list[Contender]:
    image0, image1 = to_tensors(matcher, images)
    cells = [(-(-h // 8)) * (-(-w // 8)) for h, w in (image.shape for image in images)]
    return [
        Contender(
            peer.name, peer.package, "model",
            as_model(matcher, lambda peer=peer: peer.run(image0, image1)),  # type: ignore[misc]
            peer.note, MATRICES * 4 * cells[0] * cells[1] if peer.dense else 0,
        )
        for peer in peers
    ]  # fmt: skip


def to_tensors(matcher: Matcher, images: Sequence[np.ndarray]) -> list[Tensor]:
    return [torch.from_numpy(x)[None, None].to(matcher.device).float() / 255 for x in images]


def as_model(matcher: Matcher, run: Run) -> Run:
    """At the matcher's precision, and without gradients."""

    @torch.inference_mode()
    def wrapped() -> Any:
        dtype = matcher.dtype
        with torch.autocast(matcher.device.type, dtype=dtype, enabled=dtype != torch.float32):
            return run()

    return wrapped


# ---- how it is timed


def race(
    contenders: Sequence[Contender], matcher: Matcher, images: Sequence[np.ndarray], repeats: int
) -> list[Row]:
    """A row each. One that fails, as by a lack of memory, has no times, and its note says why."""
    device = matcher.device
    height, width = images[0].shape
    rows = [
        Row(c.method, c.package, c.what, width, height, precision_name(matcher), note=c.note)
        for c in contenders
    ]
    times: dict[int, list[float]] = {n: [] for n in range(len(contenders))}
    for turn in range(2 + repeats):
        for n in list(times):
            try:
                if turn == 0:
                    rows[n] = tried(contenders[n], rows[n], matcher)
                elif turn == 1:  # what others did meanwhile may have put it out of reach
                    warm_up(contenders[n].run, device, again=True)
                else:
                    times[n].append(timed(contenders[n].run, device))
            except (RuntimeError, MemoryError, TypeError, ValueError) as error:
                if contenders[n].method == OURS and not is_out_of_memory(error):
                    raise
                del times[n]
                rows[n] = replace(rows[n], note=f"not run: {first_line(error)}")
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    for n, taken in times.items():
        median, late = np.percentile(taken, [50, 95])
        rows[n] = replace(
            rows[n], milliseconds=float(median), milliseconds_95=float(late), repeats=repeats,
            pairs_per_second=1000 / float(median),
        )  # fmt: skip
    kept = kept_cells(matcher, images)
    return [replace(row, kept_cells=kept) if row.method == OURS else row for row in rows]


def tried(contender: Contender, row: Row, matcher: Matcher) -> Row:
    """With what need not be timed."""
    device = matcher.device
    if device.type == "cpu" and contender.bytes > free_memory():
        raise MemoryError(f"needs {contender.bytes / 2**30:.1f} GiB")
    memory = held_mib(lambda: warm_up(contender.run, device), matcher)
    return replace(row, memory_mib=memory, matches=len(contender.run()))


def warm_up(run: Run, device: torch.device, again: bool = False) -> None:
    for _ in range(PATIENCE + 2 if device.type == "cuda" else int(not again)):
        run()


def timed(run: Run, device: torch.device) -> float:
    """Milliseconds, until the device is done."""
    wait_for(device)
    start = time.perf_counter()
    run()
    wait_for(device)
    return 1000 * (time.perf_counter() - start)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def held_mib(run: Run, matcher: Matcher) -> float | None:
    """What this process takes of the GPU while it runs, above what it has before; what is kept for later
    calls counts too. None: a CPU, on which nobody counts."""
    device = matcher.device
    if device.type != "cuda":
        return None
    matcher.recorder.clear()
    wait_for(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    wait_for(device)
    return (torch.cuda.max_memory_reserved(device) - before) / 2**20


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or "allocate" in str(error)


def free_memory() -> int:
    """Bytes, of the CPU's."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 8 * 2**30


def kept_cells(matcher: Matcher, images: Sequence[np.ndarray]) -> tuple[int, int] | None:
    try:
        details = matcher.match(*images, details=True).details
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    return None if details is None else (int(details.keep0[-1].sum()), int(details.keep1[-1].sum()))


def many(
    matcher: Matcher,
    images: Sequence[np.ndarray],
    pairs: list[tuple[Path, Path]],
    batch: int,
    what: str = "files",
) -> Row:
    """`Matcher.match_many`, from files."""
    height, width = images[0].shape
    row = Row(OURS, version(), what, width, height, precision_name(matcher), note=f"batches of {batch}")
    found: list[int] = []

    def run() -> None:
        found[:] = [len(m) for m in matcher.match_many(pairs, batch)]

    try:
        warm_up(lambda: list(matcher.match_many(pairs[:batch], batch)), matcher.device)
        milliseconds = timed(run, matcher.device) / len(pairs)
        return replace(
            row, milliseconds=milliseconds, repeats=len(pairs), pairs_per_second=1000 / milliseconds,
            memory_mib=held_mib(run, matcher), matches=round(float(np.mean(found))),
        )  # fmt: skip
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return replace(row, note=f"not run: {first_line(error)}")


def split(
    matcher: Matcher, images: Sequence[np.ndarray], pair: tuple[Path, Path], repeats: int
) -> StageTimes:
    warm_up(lambda: matcher.match(*pair), matcher.device)
    total = 0.0
    with Stopwatch(matcher.device) as watch:
        for _ in range(repeats):
            total += timed(lambda: matcher.match(*pair), matcher.device)
    taken = {name: ms / repeats for name, ms in watch.milliseconds().items()}
    known = {name: taken[name] for name in STAGES if name in taken}
    height, width = images[0].shape
    return StageTimes(width, height, precision_name(matcher), known | taken, total / repeats)


# ---- what is said of it


def version() -> str:
    return f"prism-match {__version__}"


def precision_name(matcher: Matcher) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == matcher.dtype)


def describe_machine(device: torch.device) -> dict[str, Any]:
    machine = {
        "device": cpu_name(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "prism_match": __version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {
            "device": properties.name, "cpu": cpu_name(), "cuda": torch.version.cuda,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "float32_matmul": torch.get_float32_matmul_precision(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }  # fmt: skip
    return machine


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def make_report(
    options: SpeedOptions,
    machine: dict[str, Any],
    photos: Sequence[np.ndarray],
    rows: list[Row],
    stages: list[StageTimes],
    skipped: dict[str, str],
) -> Report:
    on_cpu = "cuda" not in machine
    reasons = dict.fromkeys(skipped.values())
    notes = [f"{', '.join(k for k, v in skipped.items() if v == why)} skipped: {why}" for why in reasons]
    failed = {f"{r.name}, {r.width}x{r.height}, {r.precision}": r.note for r in rows if not r.milliseconds}
    notes += [f"{name}: {why}" for name, why in failed.items()]
    notes += explain(options, photos, rows, on_cpu)
    summary = {
        "benchmark": "speed",
        "machine": machine,
        "settings": {
            "photos": [str(p) for p in options.photos] if options.photos else "bundled",
            "sizes": list(options.sizes), "precisions": list(options.precisions), "repeats": options.repeats,
            "batch": options.batch, "range": options.whole_range,
        },
        "rows": [asdict(row) for row in rows],
        "stages": [asdict(s) | {"other": s.other} for s in stages],
        "skipped": skipped,
        "notes": notes,
    }  # fmt: skip
    tables = [range_table(rows)] if options.whole_range else size_tables(rows)
    tables += [stage_table(stages)] if stages else []
    threads = f", threads: {machine['threads']}" if on_cpu else ""
    caveat = f"{machine['device']}, torch {machine['torch']}{threads}"
    if on_cpu:
        caveat += ". Milliseconds of a CPU that other programs use too mean little: compare the ratios"
    return Report(summary, tables, notes=notes, caveat=caveat)


def explain(
    options: SpeedOptions, photos: Sequence[np.ndarray], rows: Sequence[Row], on_cpu: bool
) -> list[str]:
    """What is compared, and how."""
    notes = []
    largest = max(max(x.shape) for x in photos)
    grown = [s for s in options.sizes if s > largest]
    if grown:
        whose = "The photos are" if options.photos else "The bundled pair is"
        notes.append(
            f"{whose} enlarged for {', '.join(map(str, grown))} px, and less sharp there than a photo"
        )
    notes.append(
        "model: from tensors on the device to matches, waiting for the device; all in turn after warming up, "
        f"runs of each: {options.repeats}; median and 95th percentile"
    )
    if not options.whole_range:
        notes.append(
            "match: Matcher.match from arrays of that size, polished, never turned; files: match_many from "
            f"JPEG files, decoded, all photos different, pairs at a time: {options.batch}"
        )
    theirs = {r.method: r.note for r in rows if r.method != OURS and r.milliseconds}
    if theirs:
        said = "; ".join(f"{name}: {note}" for name, note in theirs.items() if note)
        notes.append(
            "peers run as a model alone, on the same images at the same precision by autocast"
            + (
                f". {said}. Random weights find next to no matches, so that there is little to refine"
                if said
                else ""
            )
        )
    if any(r.note == UNTRAINED for r in rows if r.method == OURS):
        notes.append("PRISM's own weights are random too: the number of matches means nothing")
    if on_cpu:
        notes.append("memory is not measured on a CPU")
    return notes


def size_tables(rows: Sequence[Row]) -> list[Table]:
    tables = []
    for width, height in dict.fromkeys((r.width, r.height) for r in rows):
        mine = [r for r in rows if (r.width, r.height) == (width, height)]
        whose, ratios = ratio(mine)
        columns = [
            "",
            "precision",
            "ms",
            "95 %",
            *([f"/ {whose}"] if whose else []),
            "MiB",
            "pairs/s",
            "matches",
        ]
        lines = [
            [r.name, r.precision, number(r.milliseconds), number(r.milliseconds_95), *([x] if whose else []),
             number(r.memory_mib), number(r.pairs_per_second), number(r.matches)]
            for r, x in zip(mine, ratios, strict=True)
        ]  # fmt: skip
        tables.append(Table(f"{width}x{height} pixels", columns, lines))
    return tables


def ratio(rows: Sequence[Row]) -> tuple[str, list[str]]:
    """Of one size: whose time the others are divided by, the first peer's of the same precision or else ours
    in fp32, and the quotients."""
    peers = [r for r in rows if r.method != OURS and r.milliseconds]
    ours = [r for r in rows if r.what == "model" and r.precision == "fp32" and r.milliseconds]
    if peers:
        name = peers[0].method
        base = {r.precision: r.milliseconds for r in peers if r.method == name}
    else:
        name = "fp32" if ours else ""
        base = {r.precision: ours[0].milliseconds for r in rows} if ours else {}
    pairs = [(r.milliseconds, base.get(r.precision)) for r in rows]
    return name, [f"{mine / other:.2f}" if mine and other else "" for mine, other in pairs]


def range_table(rows: Sequence[Row]) -> Table:
    columns = ["", "precision", "pixels", "ms", "95 %", "MiB", "kept cells", "matches"]
    lines = []
    for r in rows:
        kept = "" if r.kept_cells is None else f"{r.kept_cells[0]}, {r.kept_cells[1]}"
        lines.append([r.name, r.precision, f"{r.width}x{r.height}", number(r.milliseconds),
                      number(r.milliseconds_95), number(r.memory_mib), kept, number(r.matches)])  # fmt: skip
    return Table("models alone, over the size of the images", columns, lines)


def stage_table(stages: Sequence[StageTimes]) -> Table:
    names = list(dict.fromkeys([*STAGES, *(name for s in stages for name in s.stages)]))
    shown = ["decode, prepare" if name == "prepare" else name for name in names]
    columns = ["", "precision", *shown, "other", "all"]
    lines = [
        [f"{s.width}x{s.height}", s.precision, *(number(s.stages.get(name)) for name in names),
         number(s.other), number(s.total)]
        for s in stages
    ]  # fmt: skip
    return Table("milliseconds of each stage of Matcher.match, from two files", columns, lines)


def number(value: float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, int) or value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# ---- the picture


def check_plot(path: Path) -> None:
    """Before minutes are spent on what cannot be drawn."""
    if path.suffix.lower() not in PICTURES:
        raise UserError(f"{path}: plots are written as {', '.join(PICTURES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError('--plot needs matplotlib: pip install "prism-match[plot]"') from error


def draw(summary: dict[str, Any], path: Path) -> None:
    """Time over pixels; of a range also memory, and both over the kept cells of one image times those of the
    other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [Row(**r) for r in summary["rows"] if r["milliseconds"]]
    time_axis = ("milliseconds", "milliseconds")
    panels = [("megapixels", time_axis)]
    if summary["settings"]["range"]:
        axes_y = [time_axis] + (
            [("memory_mib", "MiB above the weights")] if any(r.memory_mib for r in rows) else []
        )
        panels = [(x, y) for y in axes_y for x in ("megapixels", "kept cells, image 0 x image 1, millions")]
    columns = 2 if len(panels) > 1 else 1
    figure, axes = plt.subplots(
        len(panels) // columns, columns, figsize=(6.4 * columns, 4.2 * (len(panels) // columns)), dpi=110,
        squeeze=False,
    )  # fmt: skip
    for axis, (x_name, (key, y_name)) in zip(axes.flat, panels, strict=True):
        for label, line in lines_of(rows).items():
            points = [(x_of(r, x_name), getattr(r, key)) for r in line]
            points = [(x, y) for x, y in points if x is not None and y is not None]
            if points:
                ours = line[0].method == OURS
                axis.plot(*zip(*points, strict=True), "o-" if ours else "s--", label=label, markersize=4)
        axis.set(xlabel=x_name, ylabel=y_name, xlim=(0, None), ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    machine = summary["machine"]
    figure.suptitle(f"{machine['device']}, torch {machine['torch']}", fontsize=10)
    figure.tight_layout()
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower())
    plt.close(figure)


def lines_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: r.width * r.height):
        lines.setdefault(f"{row.name}, {row.precision}", []).append(row)
    return lines


def x_of(row: Row, name: str) -> float | None:
    if name == "megapixels":
        return row.width * row.height / 1e6
    return None if row.kept_cells is None else row.kept_cells[0] * row.kept_cells[1] / 1e6
