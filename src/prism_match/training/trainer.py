"""The training loop. Read `Trainer.fit` first, then `Trainer.update`."""

from __future__ import annotations

import copy
import json
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from prism_match.errors import UserError
from prism_match.files import lock_folder, writable_folder
from prism_match.images import write_png
from prism_match.model.prism import PRISM
from prism_match.training.checkpoint import (
    Checkpoint,
    check_architecture,
    checkpoints,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from prism_match.training.config import TrainConfig
from prism_match.training.difficulty import Difficulty
from prism_match.training.distributed import join_processes
from prism_match.training.feed import Feed, Mixer, Weighted, recording
from prism_match.training.moments import MEAN, PARTS, SQUARE, packed, unpacked
from prism_match.training.pairs import PairBatch, shape_of
from prism_match.training.samples import draw_predictions
from prism_match.training.step import METRICS, TrainingStep, Work
from prism_match.weights import load_state
from prism_match.weights.store import export_weights

log = logging.getLogger(__name__)

SAMPLES = 4  # pairs that are drawn
MAX_BAD = 40  # updates in a row without a finite gradient before training gives up
Validate = Callable[[PRISM], dict[str, float]]


class Trainer:
    """Trains a PRISM on weighted sources and keeps everything of the run in the folder `run`."""

    def __init__(
        self,
        config: TrainConfig,
        sources: Sequence[Weighted],
        run: str | Path,
        device: str | torch.device = "cpu",
        validate: Validate | None = None,
    ):
        if config.steps is None and config.minutes is None:
            raise UserError("give a budget: --minutes or --steps")
        self.config, self.validate = config, validate
        self.run = writable_folder(run)
        self.known = checkpoints(self.run)  # those that were there when this was made, and its own
        self.world, self.device = join_processes(torch.device(device))
        parts = config.accumulate * self.world.size
        for phase in config.phases:
            if phase.batch % parts:
                raise UserError(f"a batch of {phase.batch} cannot be split into {parts} equal parts")
        torch.manual_seed(config.seed)
        self.model = PRISM(config.model).to(self.device)
        self.model.backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average = copy.deepcopy(self.model).eval().requires_grad_(False)  # the EMA of the weights
        self.optimizer = make_optimizer(self.model, config)
        self.mixer = Mixer(sources, config.seed, self.device)
        self.module = self._wrap()
        self.difficulty: Difficulty | None = None
        if config.difficulty > 0 and self.mixer.binned is not None:
            bins = self.mixer.binned.bins
            self.difficulty = Difficulty(bins, config.difficulty, self.device, self.world)

        self.step = 0  # updates done
        self.pairs = 0  # pairs seen, in all processes
        self.elapsed = 0.0  # seconds, over all resumptions, without those of validation
        self.started = 0.0  # when the clock would have begun if training had never stood still
        self.stopping = ""  # the signal that asked for an end
        self.skipped = torch.zeros((), device=self.device)  # updates without a finite gradient
        self.skipped_running = torch.zeros((), device=self.device)  # of these, the latest in a row
        self.sums = torch.zeros(len(METRICS) + 2, device=self.device)  # since the last reading; norm, count
        self.last: dict[str, Any] = {}
        self.validation: dict[str, float] = {}
        self.latest: PairBatch | None = None  # to draw

    def _wrap(self) -> nn.Module:
        """The model with its losses, compiled and distributed as asked."""
        if self.world.size > 1 and self.device.type == "cuda":
            self.model.backbone = nn.SyncBatchNorm.convert_sync_batchnorm(self.model.backbone)
        step = TrainingStep(self.model, self.config.loss, self.config.bf16).train()
        if self.config.compile:
            step.compile_parts()
        if self.world.size == 1:
            return step
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(step, ids, broadcast_buffers=False, gradient_as_bucket_view=True)

    # ---- the loop

    def fit(self) -> dict[str, Any]:
        """Trains until the budget is spent or a signal asks for an end; returns the last metrics."""
        if not self.world.first:
            return self._fit()
        with lock_folder(self.run):
            if checkpoints(self.run) != self.known:
                raise UserError(f"{self.run}: another run has ended here meanwhile; go on with --resume")
            return self._fit()

    def _fit(self) -> dict[str, Any]:
        self.started = time.monotonic() - self.elapsed
        timers = dict.fromkeys(("save", "samples", "validate"), self.elapsed)
        ordered = begun = self.step
        feed = Feed(self.mixer)
        bar = progress_bar(self.world.first, self.step, self.config.steps)
        with self._signals(), fast_arithmetic(self.device):
            try:
                while True:
                    now = time.monotonic() - self.started
                    self.elapsed, stop = self.world.agree([now, bool(self.stopping)])
                    if self.world.any(bool(stop or self.stopping)) or self.progress(self.step) >= 1:
                        break
                    while feed.wanting:
                        self._order(feed, ordered)
                        ordered += 1
                    work = feed.next()
                    with recording:  # not while a source is being recorded
                        self.update(work)
                        bar.update()
                        if self.step % self.config.log_every == 0:
                            self.report(bar)
                        self._now_and_then(timers)
            except Exception:  # whatever it was, the weights are those of the last whole update
                if self.step > begun:
                    self._try(self.save)
                raise
            finally:
                feed.close()
                bar.close()
        self.finish()
        return self.last

    def progress(self, step: int) -> float:
        """The share of the budget that is spent when `step` updates are done."""
        by_steps = step / self.config.steps if self.config.steps else 0.0
        by_time = self.elapsed / (60 * self.config.minutes) if self.config.minutes else 0.0
        return max(by_steps, by_time)

    def _order(self, feed: Feed, step: int) -> None:
        """Has the part of update `step` made that belongs to this process."""
        phase, c = self.config.phase(min(self.progress(step), 1.0), step), self.config
        pieces = c.accumulate * self.world.size
        mine = range(self.world.rank * c.accumulate, (self.world.rank + 1) * c.accumulate)
        feed.order(step, mine, phase.batch // pieces, phase.size, self.difficulty)

    def update(self, pieces: Sequence[Work]) -> None:
        """One step of the optimizer. Nothing here waits for the device."""
        c = self.config
        progress = self.progress(self.step)
        rate = learning_rate(c, self.step, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        statistics = [b.clone() for b in self.model.buffers()]
        metrics = torch.zeros(len(METRICS), device=self.device)
        for i, piece in enumerate(pieces):
            with self._synchronised(i == len(pieces) - 1):
                loss, values, found = self.module(piece, prune=progress >= c.prune_from)
                (loss / len(pieces)).backward()
            if self.difficulty is not None and piece.batch.bins is not None:
                self.difficulty.add(piece.batch.bins, found)
            metrics += values / len(pieces)
            self.pairs += len(piece.batch) * self.world.size
        self.latest = pieces[-1].batch
        norm, bad = self._clip()
        # A step without a finite gradient changes nothing: neither weights, nor moments, nor statistics.
        self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        self.optimizer.step()
        for old, new in zip(statistics, self.model.buffers(), strict=True):
            new.copy_(torch.where(bad, old, new))
        self._average()
        self.skipped += bad
        self.skipped_running = (self.skipped_running + 1) * bad
        values = torch.cat([metrics, torch.stack([norm, torch.ones_like(norm)])])
        self.sums += torch.where(bad, torch.zeros_like(values), values)
        self.step += 1
        if self.difficulty is not None:
            self.difficulty.step_done(self.step)

    def _synchronised(self, last: bool) -> AbstractContextManager:
        """Processes exchange gradients once per update, with its last piece."""
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return nullcontext()

    @torch.no_grad()
    def _clip(self) -> tuple[Tensor, Tensor]:
        """Scales the gradient down to the norm allowed. Returns its norm and whether that is no number."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, (self.config.clip / (norm + 1e-6)).clamp(max=1.0))
        return norm, ~torch.isfinite(norm)

    @torch.no_grad()
    def _average(self) -> None:
        """EMA of weights and statistics, short at first so that the start is soon forgotten."""
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
        ours: list[Tensor] = list(self.average.parameters())
        theirs: list[Tensor] = list(self.model.parameters())
        torch._foreach_lerp_(ours, theirs, 1 - decay)
        for mine, new in zip(self.average.buffers(), self.model.buffers(), strict=True):
            if mine.is_floating_point():
                mine.lerp_(new, 1 - decay)
            else:
                mine.copy_(new)

    # ---- what is seen of it

    def report(self, bar: tqdm) -> None:
        """Reads the metrics since the last reading, which waits for the device, and writes them down."""
        *sums, norm, count, skipped, running = torch.cat(
            [self.sums, torch.stack([self.skipped, self.skipped_running])]
        ).tolist()
        self.sums.zero_()
        count = max(count, 1.0)
        seconds = self.elapsed - self.last.get("seconds", 0.0)
        speed = (self.pairs - self.last.get("pairs", 0)) / max(seconds, 1e-6)
        phase = self.config.phase(min(self.progress(self.step - 1), 1.0), self.step - 1)
        self.last = {
            "step": self.step, "seconds": round(self.elapsed, 2), "pairs": self.pairs, "size": phase.size,
            "pairs_per_s": round(speed, 2), "lr": self.optimizer.param_groups[0]["lr"],
            **{k: round(x / count, 5) for k, x in zip(METRICS, sums, strict=True)},
            "grad_norm": round(norm / count, 4),
            "skipped_steps": int(skipped), "skipped_samples": self.mixer.skipped,
        }  # fmt: skip
        if self.world.first:
            self._write(self.last)
            bar.set_postfix_str(bar_text(self.last), refresh=False)
        if running >= MAX_BAD:
            raise UserError(f"{int(running)} updates in a row had no finite gradient: lower the rate (--lr)")

    def _write(self, row: dict[str, Any]) -> None:
        """One line in log.jsonl, and TensorBoard where it is installed."""
        try:
            with open(self.run / "log.jsonl", "a", encoding="utf-8") as f:
                f.write(json.dumps(row) + "\n")
        except OSError as error:  # a full disk is no reason to end the run
            log.error("%s: %s", self.run / "log.jsonl", error)
        if self._board is not None:
            for key, value in row.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(key, value, self.step)

    @cached_property
    def _board(self) -> Any:
        """A writer, or None where TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
        return SummaryWriter(str(self.run / "tensorboard"))

    def _now_and_then(self, timers: dict[str, float]) -> None:
        """Checkpoints, pictures and validation, each after its minutes have passed."""
        c = self.config
        jobs: dict[str, tuple[float, Callable[[], object]]] = {
            "save": (c.save_minutes, partial(self._try, self.save)),
            "samples": (c.samples_minutes, self.draw_samples),
            "validate": (c.validate_minutes, self.run_validation),
        }
        for name, (minutes, job) in jobs.items():
            if self.elapsed - timers[name] >= 60 * minutes:
                timers[name] = self.elapsed
                job()

    def run_validation(self) -> None:
        """Scores of the averaged weights, by whatever the caller measures. The clock stands still."""
        if self.validate is not None and self.world.first:
            before = time.monotonic()
            self.validation = self.validate(self.average)
            self.started += time.monotonic() - before
            self._write({"step": self.step, "seconds": round(self.elapsed, 2), **self.validation})

    def draw_samples(self) -> None:
        """samples.png: what the averaged weights find in some pairs of the latest batch."""
        if self.world.first and self.latest is not None:
            chosen = torch.linspace(0, len(self.latest) - 1, min(SAMPLES, len(self.latest))).long()
            some = self.latest.map(lambda t: t[chosen.to(t.device)])
            try:
                write_png(self.run / "samples.png", draw_predictions(self.average, some))
            except UserError as error:  # a full disk is no reason to end the run
                log.error("%s", error)

    # ---- what stays of it

    def _try(self, write: Callable[[], object]) -> None:
        """A checkpoint that cannot be written is no reason to end a run that could still write the next."""
        try:
            write()
        except (UserError, RuntimeError) as error:  # RuntimeError: a device that no longer answers
            log.error("%s", error)

    def save(self) -> None:
        """A checkpoint, and the weights as they are to be used."""
        if not self.world.first:
            return
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"ema.{k}": v for k, v in self.average.state_dict().items()}
        if self.difficulty is not None:
            tensors |= {f"difficulty.{k}": v for k, v in self.difficulty.state().items()}
        if self.config.save_optimizer:
            tensors |= {f"optimizer.{k}": v for k, v in self._moments().items()}
        state = {
            "step": self.step, "pairs": self.pairs, "elapsed": self.elapsed, "skipped": int(self.skipped),
            "model": self.config.model.to_dict(), "training": self.config.to_dict(),
        }  # fmt: skip
        try:
            save_checkpoint(self.run, self.step, Checkpoint(tensors, state), self.config.shard_mib)
        except UserError:  # the weights are a fraction of a checkpoint, and may fit where it does not
            self._try(self.export)
            raise
        finally:
            self.known = checkpoints(self.run)
        self.export()

    def resume(self, path: str | Path | None = None) -> None:
        """Goes on from the newest checkpoint of the run (or of `path`). A budget in minutes counts those
        spent before; without the optimizer's state its moments begin anew."""
        where = Path(path or self.run)
        checkpoint = load_checkpoint(where)
        check_architecture(where, checkpoint.state["model"], self.config.model)
        load_state(self.model, checkpoint.group("model"), str(where))
        load_state(self.average, checkpoint.group("ema"), str(where))
        self._load_moments(where, checkpoint)
        if self.difficulty is not None:
            self.difficulty.load(checkpoint.group("difficulty"))
        state = checkpoint.state
        self.step, self.pairs, self.elapsed = state["step"], state["pairs"], state["elapsed"]
        self.skipped.fill_(state["skipped"])
        self.last = {"pairs": self.pairs, "seconds": self.elapsed}

    def start_from(self, path: str | Path) -> None:
        """Weights of another run to begin with, and its optimizer's moments where `path` is its folder; the
        schedule begins anew."""
        where = Path(path)
        checkpoint = load_checkpoint(where) if where.is_dir() else None
        weights, config = load_weights(path) if checkpoint is None else checkpoint.weights()
        check_architecture(where, config, self.config.model)
        load_state(self.model, weights, str(path))
        load_state(self.average, weights, str(path))
        if checkpoint is not None:
            self._load_moments(where, checkpoint)

    def _moments(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                small = self.config.moment_bits == 8 and key in (MEAN, SQUARE)
                parts = packed(key, value) if small else {key: value}
                tensors |= {f"{name}.{part}": x for part, x in parts.items()}
        return tensors

    def _load_moments(self, where: Path, checkpoint: Checkpoint) -> None:
        """What `_moments` gave, of those parameters that it had."""
        tensors = checkpoint.group("optimizer")
        for name, p in self.model.named_parameters():
            if f"{name}.step" not in tensors:
                continue
            own = {k: tensors[f"{name}.{k}"] for k in PARTS if f"{name}.{k}" in tensors}
            step = tensors[f"{name}.step"]
            try:
                found = {key: unpacked(key, own) for key in (MEAN, SQUARE)}
                whole = step.shape == () and all(x.shape == p.shape for x in found.values())
            except (KeyError, RuntimeError):
                whole = False
            if not whole:
                raise UserError(f"{where}: damaged checkpoint: the moments of {name}")
            moments = {key: torch.zeros_like(p).copy_(x) for key, x in found.items()}
            self.optimizer.state[p] = {"step": step.to(self.device), **moments}

    def export(self) -> list[Path]:
        """The averaged weights in 16 bit, with the model's settings and a summary of the run."""
        path = self.run / "weights.safetensors"
        summary = {**self.last, **self.validation, "step": self.step, "pairs": self.pairs,
                   "minutes": round(self.elapsed / 60, 2), "settings": self.config.to_dict(),
                   "sources": {s.source.name: s.weight for s in self.mixer.sources}}  # fmt: skip
        weights = self.average.state_dict()
        return export_weights(path, weights, self.config.model, summary, self.config.shard_mib)

    def finish(self) -> None:
        """Saves everything and says so."""
        self.save()
        if self.world.first:
            if not self.stopping:
                if self.latest is None and self.step:  # killed after its last update: that one's pairs again
                    feed = Feed(self.mixer)
                    self._order(feed, self.step - 1)
                    self.latest = feed.next()[-1].batch
                    feed.close()
                self.draw_samples()
                self.run_validation()
                self.export()  # again, now that the scores are known
            reason = f"stopped by {self.stopping}" if self.stopping else "finished"
            print(f"{reason} after {self.step} steps and {self.pairs} pairs; saved in {self.run}")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the run after the step at hand; a second SIGINT ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask_to_stop(number: int, _frame: Any) -> None:
            self.stopping = signal.Signals(number).name
            signal.signal(signal.SIGINT, signal.default_int_handler)

        old = {s: signal.signal(s, ask_to_stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW without decay of norms, biases and the frequencies of the rotary encoding."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        (free if p.dim() < 2 or name.endswith("rotary.b") else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, fused=True)


def learning_rate(config: TrainConfig, step: int, progress: float) -> float:
    """Linear warm-up over the first updates times a cosine over the last part of the budget."""
    warm = min(1.0, (step + 1) / max(config.warmup, 1))
    falling = (progress - (1 - config.decay)) / config.decay
    cosine = 0.5 * (1 + math.cos(math.pi * min(max(falling, 0.0), 1.0)))
    return config.lr * warm * (config.final_lr + (1 - config.final_lr) * cosine)


@contextmanager
def fast_arithmetic(device: torch.device) -> Iterator[None]:
    """TF32 for the products that stay in float32, the fastest kernels for fixed shapes; undone afterwards."""
    if device.type != "cuda":
        yield
        return
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    old = torch.get_float32_matmul_precision(), cudnn.benchmark, cuda.cudnn_sdp_enabled()
    torch.set_float32_matmul_precision("high")
    cudnn.benchmark = True
    # On Hopper, the backward pass of cuDNN's attention gives NaN once the scores of a query are all strongly
    # negative (pytorch/pytorch#196678), which happens after about a thousand steps. FlashAttention does not.
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(old[0])
        cudnn.benchmark = old[1]
        cuda.enable_cudnn_sdp(old[2])


def progress_bar(shown: bool, done: int, total: int | None) -> tqdm:
    """Redrawn twice a second on a terminal; a line every half minute where the output is a file."""
    every = 0.5 if sys.stderr.isatty() else 30.0
    return tqdm(disable=not shown, unit="step", initial=done, total=total, mininterval=every, miniters=1)


def bar_text(row: dict[str, Any]) -> str:
    height, width = shape_of(row["size"])
    size = f"{width}" if width == height else f"{width}x{height}"
    return (
        f"{size}px {row['pairs_per_s']:.0f} pairs/s | loss {row['loss']:.2f} = {row['coarse']:.2f}c"
        f" {row['fine']:.3f}f {row['pruning']:.2f}p | accuracy {row['accuracy']:.1%}"
        f" error {row['error_px']:.2f} px | kept {row['kept']:.0%} recall {row['recall']:.1%}"
        f" | skipped {row['skipped_steps']}"
    )
