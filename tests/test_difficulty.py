"""Hard pairs are drawn more often, and a run that is resumed draws the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pairs_for_tests import ShiftedTextures

from prism_match.errors import UserError
from prism_match.training import difficulty as module
from prism_match.training.config import PRESETS, Phase
from prism_match.training.difficulty import RANGE, Difficulty
from prism_match.training.distributed import Processes
from prism_match.training.feed import Weighted
from prism_match.training.pairs import ImageSize, PairBatch
from prism_match.training.step import METRICS, TrainingStep, Work
from prism_match.training.trainer import Trainer

EASY, HARD = 0, 1


class TwoBins(ShiftedTextures):
    """Pairs of two bins, drawn by their weights."""

    bins = 2

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.ones(2)
        self.drawn: list[int] = []

    def weigh(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def sample(self, batch: int, size: ImageSize, generator: torch.Generator) -> PairBatch:
        pairs = super().sample(batch, size, generator)
        bins = torch.multinomial(self.weights, batch, replacement=True, generator=generator)
        self.drawn += bins.tolist()
        return replace(pairs, bins=bins)


def test_bins_in_which_less_is_found_weigh_more() -> None:
    found = Difficulty(4, 1.0, torch.device("cpu"), Processes())
    assert found.of(0).tolist() == [1, 1, 1, 1]
    bins = torch.tensor([0, 1, 2, -1]).repeat(200)
    shares = torch.tensor([[99, 100], [60, 100], [0, 100], [0, 100]]).repeat(200, 1).float()
    found.add(bins, shares)
    found.add(torch.tensor([2]), torch.tensor([[0.0, 0.0]]))  # without a true match: says nothing
    found.step_done(module.BLOCK - module.AHEAD)
    easy, middle, hard, unseen = found.of(module.BLOCK).tolist()
    assert RANGE[0] <= easy < middle < hard <= RANGE[1] and unseen == pytest.approx(1)
    assert found.of(module.BLOCK - 1).tolist() == [1, 1, 1, 1]  # not before its block


def test_hard_pairs_are_drawn_more_often_and_the_same_after_resuming(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 12)
    monkeypatch.setattr(module, "PRIOR", 1.0)

    def as_if(self: TrainingStep, work: Work, prune: bool) -> tuple[torch.Tensor, ...]:
        """All matches of easy pairs are found and none of hard ones, and nothing is learnt."""
        loss = sum(p.sum() for p in self.parameters()) * 0
        found = torch.stack([(work.batch.bins == EASY).float(), torch.ones(len(work.batch))], 1)
        return loss, torch.zeros(len(METRICS)), found

    monkeypatch.setattr(TrainingStep, "forward", as_if)
    config = PRESETS["tiny"].replace(phases=(Phase(0.0, 32, 4),), difficulty=1.0, log_every=100, bf16=False)

    def run(name: str, steps: int, resume: bool = False) -> list[int]:
        source = TwoBins()
        trainer = Trainer(config.replace(steps=steps), [Weighted(source)], tmp_path / name)
        if resume:
            trainer.resume()
        trainer.fit()
        return source.drawn

    whole = run("whole", 30)[: 4 * 30]
    first = run("parts", 17)[: 4 * 17]
    assert first + run("parts", 30, resume=True)[: 4 * 13] == whole
    assert sum(whole[4 * 12 :]) / len(whole[4 * 12 :]) > 0.7 > 0.62 > sum(whole[: 4 * 12]) / (4 * 12)


def test_a_run_may_begin_to_weigh_pairs_when_it_is_resumed(tmp_path: Path, monkeypatch) -> None:
    """With other settings, or with its first collection."""
    monkeypatch.setattr(module, "BLOCK", 10)
    config = PRESETS["tiny"].replace(phases=(Phase(0.0, 32, 4),), steps=12)
    Trainer(config, [Weighted(TwoBins())], tmp_path).fit()
    trainer = Trainer(config.replace(steps=25, difficulty=1.0), [Weighted(TwoBins())], tmp_path)
    trainer.resume()
    trainer.fit()
    assert trainer.step == 25 and trainer.difficulty is not None
    assert trainer.difficulty.weights.keys() == {2, 3} and trainer.difficulty.found[1].sum() > 0


def test_without_difficulty_nothing_is_weighed(tmp_path: Path) -> None:
    config = PRESETS["tiny"].replace(phases=(Phase(0.0, 32, 2),), steps=1)
    assert Trainer(config, [Weighted(TwoBins())], tmp_path / "a").difficulty is None
    assert (
        Trainer(config.replace(difficulty=1.0), [Weighted(ShiftedTextures())], tmp_path / "b").difficulty
        is None
    )
    with pytest.raises(UserError, match="difficulty"):
        config.replace(difficulty=-1.0)
