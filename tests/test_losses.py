"""Losses against plain loops, on degenerate truth, and through every variant of the model."""

from __future__ import annotations

import math

import pytest
import torch
from pairs_for_tests import ShiftedTextures

from prism_match.config import PRESETS, ModelConfig
from prism_match.model.backbone import double
from prism_match.model.matching import coarse_matches
from prism_match.model.mpm import LayerState
from prism_match.model.prism import PRISM
from prism_match.model.refinement import expectation
from prism_match.training.config import PRESETS as TRAIN_PRESETS
from prism_match.training.losses import (
    Sampled,
    coarse_loss,
    found_matches,
    heat_loss,
    own_matches,
    pruning_loss,
    pruning_metrics,
    refinement_error,
    refinement_loss,
    sample_matches,
)
from prism_match.training.pairs import PairBatch
from prism_match.training.step import METRICS, LossConfig, TrainingStep, Work
from prism_match.training.supervision import CoarseTruth

B, H, W, C = 3, 4, 5, 8
N = H * W


def random_truth(generator: torch.Generator) -> CoarseTruth:
    """Pair 0 has many matches, pair 1 one, pair 2 none; some cells are neither matchable nor not."""
    match = torch.full((B, N), -1)
    for b, count in enumerate((12, 1, 0)):
        cells = torch.randperm(N, generator=generator)[:count]
        match[b, cells] = torch.randperm(N, generator=generator)[:count]
    matchable1 = torch.zeros(B, N, dtype=torch.bool)
    for b in range(B):
        matchable1[b, match[b][match[b] >= 0]] = True
    unknown = torch.rand(2, B, N, generator=generator) < 0.2
    offset = (torch.rand(B, N, 2, generator=generator) - 0.5) * 10
    return CoarseTruth(
        match, match >= 0, matchable1, ~(match >= 0) & ~unknown[0], ~matchable1 & ~unknown[1], offset
    )


def random_layer(generator: torch.Generator, keep: bool) -> LayerState:
    features = torch.randn(2, B, H, W, C, generator=generator)
    logits = torch.randn(2, B, H, W, generator=generator)
    kept = torch.rand(2, B, H, W, generator=generator) < 0.8
    return LayerState(*features, *(kept if keep else (None, None)), *logits)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_coarse_loss_is_the_mean_of_minus_log_p(generator, masked, weighted):
    truth, layer = random_truth(generator), random_layer(generator, masked)
    if masked:  # true matches are protected from pruning
        layer.keep0.flatten(1)[truth.matchable0] = True
        layer.keep1.flatten(1)[truth.matchable1] = True
    loss, order = coarse_loss(layer, truth, temperature=0.1, weighted=weighted)
    f0, f1 = layer.coarse0.flatten(1, 2).double(), layer.coarse1.flatten(1, 2).double()
    expected, right = [], 0
    for b in range(B):
        s = [[float(f0[b, i] @ f1[b, j]) / (C * 0.1) for j in range(N)] for i in range(N)]
        kept = [range(N), range(N)]
        if masked:
            kept = [[i for i in range(N) if k[b].flatten()[i]] for k in (layer.keep0, layer.keep1)]
        sigma = [x[b].flatten().double().sigmoid() for x in (layer.logit0, layer.logit1)]

        def p(i, j, s=s, kept=kept, sigma=sigma):
            rows = sum(math.exp(s[i][k]) for k in kept[1])
            columns = sum(math.exp(s[k][j]) for k in kept[0])
            weight = float(sigma[0][i] * sigma[1][j]) if weighted else 1.0
            return weight * math.exp(2 * s[i][j]) / rows / columns

        pairs = [(i, int(j)) for i, j in enumerate(truth.match0[b]) if j >= 0]
        expected.append(-sum(math.log(p(i, j)) for i, j in pairs) / max(len(pairs), 1))
        right += sum(max(kept[1], key=lambda k, i=i: p(i, k)) == j for i, j in pairs)
    assert loss.item() == pytest.approx(sum(expected) / B, rel=1e-4)
    assert found_matches(order, truth).sum(0).tolist() == [right, 13]


def test_coarse_loss_agrees_with_the_model_s_own_confidence(generator):
    """Where the truth is what the model matches, the loss is that of the confidences it tells."""
    layer = random_layer(generator, keep=True)
    every = torch.ones(B, H, W, dtype=torch.bool)
    i, j, pair, confidence = coarse_matches(layer, every, every, ModelConfig(border=0), theta_c=0.0)
    match = torch.full((B, N), -1)
    match[pair, i] = j
    known = match >= 0
    truth = CoarseTruth(match, known, known, ~known, ~known, torch.zeros(B, N, 2))
    loss, _ = coarse_loss(layer, truth, temperature=0.1, weighted=True)
    expected = [-confidence[pair == k].log().mean() for k in range(B)]
    assert len(confidence) > 2 * B
    assert loss.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)


def test_pairs_with_few_matches_weigh_less_on_request(generator):
    truth, layer = random_truth(generator), random_layer(generator, keep=False)
    all_alike, _ = coarse_loss(layer, truth, 0.1, True)
    floor, _ = coarse_loss(layer, truth, 0.1, True, fewest=1000)
    assert 0 < floor.item() < all_alike.item() / 50


def test_pruning_loss_balances_the_two_kinds(generator):
    truth = random_truth(generator)
    layers = [random_layer(generator, keep=False) for _ in range(2)]
    total = 0.0
    for layer in layers:
        for logit, yes, no in (
            (layer.logit0, truth.matchable0, truth.unmatchable0),
            (layer.logit1, truth.matchable1, truth.unmatchable1),
        ):
            for b in range(B):
                sigma = logit[b].flatten().double().sigmoid().tolist()
                m = [-math.log(x) for x, y in zip(sigma, yes[b], strict=True) if y]
                n = [-math.log(1 - x) for x, y in zip(sigma, no[b], strict=True) if y]
                total += sum(m) / max(len(m), 1) + sum(n) / max(len(n), 1)
    assert pruning_loss(layers, truth).item() == pytest.approx(total / (2 * 2 * B), rel=1e-5)


def test_no_estimator_no_pruning_loss(generator):
    layer = random_layer(generator, keep=False)
    bare = LayerState(layer.coarse0, layer.coarse1, None, None)
    assert pruning_loss([bare], random_truth(generator)).item() == 0


def test_sampled_matches_are_true_reachable_and_different(generator):
    truth = random_truth(generator)
    sampled = sample_matches(truth, torch.rand(B, N, generator=generator), count=6, reach=4.0)
    usable = [
        {(i, int(j)) for i, j in enumerate(match) if j >= 0 and offset[i].abs().max() <= 4}
        for match, offset in zip(truth.match0, truth.offset0, strict=True)
    ]
    for b in range(B):
        rows = slice(6 * b, 6 * b + 6)
        good = sampled.usable[b]
        found = list(zip(sampled.cell0[rows][good].tolist(), sampled.cell1[rows][good].tolist(), strict=True))
        assert len(set(found)) == len(found) == min(6, len(usable[b])) and set(found) <= usable[b]
        assert (sampled.batch[rows] == b).all()
        for k, (i, _) in zip(good.nonzero().flatten().tolist(), found, strict=True):
            assert torch.equal(sampled.target[b, k], truth.offset0[b, i])


def test_refinement_loss_is_weighted_by_certainty(generator):
    k = 5
    target = torch.rand(B, k, 2, generator=generator) * 6 - 3
    usable = torch.tensor([[1, 1, 1, 0, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    weight = torch.tensor([1.0, 0.1, 1.0])
    index = torch.zeros(B * k, dtype=torch.int64)
    sampled = Sampled(index, index, index, target, usable, weight)
    offset = torch.rand(B * k, 2, generator=generator) * 6 - 3
    std = torch.rand(B * k, generator=generator) + 0.1
    expected, errors = 0.0, []
    for b in range(B):
        rows = [i for i in range(k) if usable[b, i]]
        inverse = {i: 1 / float(std[b * k + i]) for i in rows}
        for i in rows:
            distance = float((offset[b * k + i].double() - target[b, i].double()).norm())
            errors.append(distance)
            mean = sum(inverse.values()) / len(rows)
            expected += float(weight[b]) * inverse[i] / mean * (distance / 4) ** 2 / len(rows) / B
    assert refinement_loss(offset, std, sampled, reach=4.0).item() == pytest.approx(expected, rel=1e-5)
    median = sorted(errors)[(len(errors) - 1) // 2]
    assert refinement_error(offset, sampled).item() == pytest.approx(median, rel=1e-5)


def test_refinement_loss_as_the_paper_writes_it(generator):
    """The mean over M_f of |j' - j'_gt| / phi^2, in units of the window's reach."""
    k, reach = 5, 4.0
    target = torch.rand(B, k, 2, generator=generator) * 6 - 3
    usable = torch.tensor([[1, 1, 1, 0, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    index = torch.zeros(B * k, dtype=torch.int64)
    sampled = Sampled(index, index, index, target, usable, torch.tensor([1.0, 0.1, 1.0]))
    offset = torch.rand(B * k, 2, generator=generator) * 6 - 3
    std = torch.rand(B * k, generator=generator) + 0.1
    expected = 0.0
    for b in range(B):
        terms = []
        for i in range(k):
            if usable[b, i]:
                distance = math.dist(offset[b * k + i].tolist(), target[b, i].tolist()) / reach
                terms.append(distance / (float(std[b * k + i]) / reach) ** 2)
        expected += float(sampled.weight[b]) * sum(terms) / max(len(terms), 1) / B
    loss = refinement_loss(offset, std, sampled, reach, form="paper")
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert loss.item() != pytest.approx(refinement_loss(offset, std, sampled, reach).item(), rel=0.1)
    std.requires_grad_(), offset.requires_grad_()
    refinement_loss(offset, std, sampled, reach, form="paper").backward()
    assert std.grad is None and offset.grad.abs().sum() > 0
    # A point that is hit exactly by a heat map of one pixel: no NaN, no infinity.
    exact = target.view(-1, 2).clone().requires_grad_()
    loss = refinement_loss(exact, torch.zeros(B * k), sampled, reach, form="paper")
    loss.backward()
    assert loss.item() < 1e-2 and torch.isfinite(exact.grad).all()


def test_the_model_s_own_matches_are_refined_towards_the_true_point():
    """Map of 3 columns. Cell 0 is matched rightly, 1 one cell too far, 2 out of reach, 3 not at all, and 4,
    which has no true match, wrongly."""
    match = torch.tensor([[0, 4, 1, 3, -1]])
    offset = torch.tensor([[[1.0, -2.0], [3.5, 0.0], [0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]])
    known = match >= 0
    truth = CoarseTruth(match, known, known, ~known, ~known, offset)
    found = (torch.tensor([0, 1, 2, 4]), torch.tensor([0, 5, 8, 7]), torch.zeros(4, dtype=torch.int64))
    refined, own = own_matches(truth, found, columns=3, reach=5.0)
    assert own.tolist() == [[True, True, False, False, False]]
    assert refined.match0.tolist() == [[0, 5, 1, 3, -1]]
    assert refined.offset0[0, 1].tolist() == [3.5 - 8, 0.0]  # the same point, seen from the next cell
    assert torch.equal(refined.offset0[0, [0, 2, 3, 4]], offset[0, [0, 2, 3, 4]])
    for seed in range(5):
        keys = torch.rand(1, 5, generator=torch.Generator().manual_seed(seed))
        assert set(sample_matches(refined, keys, 2, 5.0, first=own).cell0.tolist()) == {0, 1}
        filled = sample_matches(refined, keys, 5, 5.0, first=own)
        assert filled.usable.sum() == 4 and set(filled.cell0[:4].tolist()) == {0, 1, 2, 3}


def test_the_paper_s_preset_refines_what_the_model_found():
    torch.manual_seed(0)
    model = PRISM(PRESETS["tiny"].replace(theta_c=0.0)).train()
    step = TrainingStep(model, LossConfig(fine="paper"), bf16=False)
    work = work_of(pairs())
    a, b = step.extract(work.batch)
    last = model.transform(a, b, None, None, prune=False)[-1]
    _, own = step.own_matches(last, a, b, work.truth)
    assert own.any() and (own <= (work.truth.match0 >= 0)).all()
    assert TrainingStep(model, LossConfig(), bf16=False).own_matches(last, a, b, work.truth)[1] is None
    loss, *_ = step(work, prune=True)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert TRAIN_PRESETS["paper"].loss.fine == "paper"
    assert TRAIN_PRESETS["quick"].loss.fine == TRAIN_PRESETS["tiny"].loss.fine == "loftr"


def test_heat_loss_asks_for_the_true_point_between_pixels(generator):
    target = torch.rand(B, 2, 2, generator=generator) * 8 - 4  # pixels; a pixel of the heat map is two
    target[0, 0] = 0.0
    usable = torch.tensor([[1, 1], [0, 1], [0, 0]]).bool()
    weight = torch.tensor([0.3, 1.0, 1.0])
    index = torch.zeros(2 * B, dtype=torch.int64)
    sampled = Sampled(index, index, index, target, usable, weight)
    log_heat = torch.randn(2 * B, 5, 5, generator=generator).flatten(1).log_softmax(1).view(-1, 5, 5)
    ideal, expected = torch.zeros(2 * B, 5, 5), 0.0
    for n, (x, y) in enumerate((target.view(-1, 2) / 2 + 2).tolist()):
        for row in range(5):
            for column in range(5):
                ideal[n, row, column] = max(0.0, 1 - abs(column - x)) * max(0.0, 1 - abs(row - y))
        b = n // 2
        if usable[b, n % 2]:
            expected -= float(weight[b] * (ideal[n] * log_heat[n]).sum()) / int(usable[b].sum()) / B
    assert heat_loss(log_heat, sampled).item() == pytest.approx(expected, rel=1e-5)
    best = ideal.clamp(min=1e-12).log()
    assert torch.allclose(expectation(best)[0], target.view(-1, 2), atol=1e-4)
    assert heat_loss(best, sampled) < heat_loss(log_heat, sampled)


def test_no_gradient_flows_into_the_certainty(generator):
    index = torch.zeros(4, dtype=torch.int64)
    sampled = Sampled(
        index, index, index, torch.zeros(1, 4, 2), torch.ones(1, 4, dtype=torch.bool), torch.ones(1)
    )
    offset, std = torch.ones(4, 2, requires_grad=True), torch.ones(4, requires_grad=True)
    refinement_loss(offset, std, sampled, 4.0).backward()
    assert offset.grad.abs().sum() > 0 and std.grad is None


def test_pruning_metrics_count_what_the_estimators_would_keep(generator):
    truth = random_truth(generator)
    layers = [random_layer(generator, keep=False) for _ in range(2)]
    kept = known = found = matchable = 0
    for logits, yes, no in (
        ([x.logit0 for x in layers], truth.matchable0, truth.unmatchable0),
        ([x.logit1 for x in layers], truth.matchable1, truth.unmatchable1),
    ):
        for b in range(B):
            for i in range(N):
                keep = all(float(x[b].flatten()[i].sigmoid()) >= 0.4 for x in logits)
                kept += keep and bool(yes[b, i] | no[b, i])
                known += bool(yes[b, i] | no[b, i])
                found += keep and bool(yes[b, i])
                matchable += bool(yes[b, i])
    share, recall = pruning_metrics(layers, truth, theta_p=0.4)
    assert share.item() == pytest.approx(kept / known)
    assert recall.item() == pytest.approx(found / matchable)


# ---- through the model


def small(config: ModelConfig) -> ModelConfig:
    """The same variant with the widths of the tiny preset."""
    tiny = PRESETS["tiny"]
    names = ("stage_dims", "coarse_dim", "fine_dim", "layers", "heads", "fine_heads")
    return config.replace(**{k: getattr(tiny, k) for k in names})


def work_of(batch: PairBatch) -> Work:
    return Work.of(batch, torch.Generator().manual_seed(0))


def pairs(count: int = 2, size: int = 64) -> PairBatch:
    return ShiftedTextures().sample(count, size, torch.Generator().manual_seed(1))


def degenerate(kind: str) -> PairBatch:
    batch = pairs()
    none = torch.zeros_like(batch.visible0)
    changes = {
        "empty": {"visible0": none, "visible1": none},
        "unknown": {"visible0": none, "visible1": none, "unknown0": ~none, "unknown1": ~none},
        "full": {"warp0": batch.warp0 * 0 + batch.warp0[:1], "visible0": ~none, "visible1": ~none},
        "blank images": {"image0": batch.image0 * 0, "image1": batch.image1 * 0},
        "no numbers": {"warp0": batch.warp0 * torch.nan, "visible0": none},
        "all padding": {"mask0": torch.zeros(2, 64, 64, dtype=torch.bool)},
    }
    from dataclasses import replace

    return replace(batch, **changes[kind])


@pytest.mark.parametrize("fine", ["paper", "loftr"])
@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize("kind", ["empty", "unknown", "full", "blank images", "no numbers", "all padding"])
def test_loss_and_gradients_stay_finite(kind, prune, fine):
    torch.manual_seed(0)
    loss_config = LossConfig(refine=16, fine=fine, deep=0.5)
    step = TrainingStep(PRISM(PRESETS["tiny"]), loss_config, bf16=False).train()
    loss, metrics, _ = step(work_of(degenerate(kind)), prune)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(metrics).all() and metrics.shape == (len(METRICS),)
    for name, p in step.model.named_parameters():
        assert p.grad is None or torch.isfinite(p.grad).all(), name


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_gets_a_gradient(preset):
    torch.manual_seed(0)
    step = TrainingStep(PRISM(small(PRESETS[preset])), LossConfig(refine=16), bf16=False).train()
    loss, *_ = step(work_of(pairs()), prune=True)
    loss.backward()
    without = [n for n, p in step.model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []


def test_leaving_the_mask_out_changes_nothing():
    """Attention without a mask is the fast path: it must give what a mask of ones gives."""
    torch.manual_seed(0)
    model = PRISM(PRESETS["tiny"]).train()
    step = TrainingStep(model, LossConfig(refine=16, deep=0.5), bf16=False)
    batch = pairs()
    a, b = step.extract(batch)
    without = model.transform(a, b, None, None, prune=False)[-1]
    with_mask = model.transform(a, b, a.valid, b.valid, prune=False)[-1]
    assert torch.allclose(without.coarse0, with_mask.coarse0, atol=1e-5)
    assert torch.allclose(without.logit1, with_mask.logit1, atol=1e-5)


def test_true_matches_are_never_pruned_while_training():
    torch.manual_seed(0)
    model = PRISM(PRESETS["tiny"].replace(theta_p=0.9)).train()
    step = TrainingStep(model, LossConfig(), bf16=False)
    work = work_of(pairs())
    a, b = step.extract(work.batch)
    protect = (work.truth.matchable0.view(a.valid.shape), work.truth.matchable1.view(b.valid.shape))
    last = model.transform(a, b, a.valid, b.valid, protect)[-1]
    assert (last.keep0 | ~protect[0]).all() and not last.keep0.all()


def test_bf16_comes_near_float32():
    torch.manual_seed(0)
    model = PRISM(PRESETS["tiny"]).train()
    steps = [TrainingStep(model, LossConfig(refine=16), bf16) for bf16 in (False, True)]
    exact, fast = (step(work_of(pairs()), False)[0] for step in steps)
    assert fast.dtype == torch.float32 and fast.item() == pytest.approx(exact.item(), rel=0.05)


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (1, 2, 1, 1), (1, 1, 5, 1)])
def test_the_up_sampling_that_trains_is_the_one_that_matches(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results, gradients = [], []
    for f in (double, lambda t: torch.nn.functional.interpolate(t, scale_factor=2.0, mode="bilinear")):
        leaf = x.clone().requires_grad_()
        results.append(f(leaf))
        (results[-1] * torch.arange(results[-1].numel()).view_as(results[-1])).sum().backward()
        gradients.append(leaf.grad)
    assert torch.allclose(*results) and torch.allclose(*gradients)


def test_what_compiling_needs_is_set_for_the_step_alone(monkeypatch):
    step = TrainingStep(PRISM(PRESETS["tiny"]), LossConfig(refine=16), bf16=False)
    seen = []

    def look(self, work, prune):
        seen.append((torch._dynamo.config.suppress_errors, torch._dynamo.config.cache_size_limit))

    monkeypatch.setattr(TrainingStep, "forward", look)
    before = torch._dynamo.config.suppress_errors, torch._dynamo.config.cache_size_limit
    step.compile_parts()
    step(None, True)
    assert seen == [(True, 64)]
    assert (torch._dynamo.config.suppress_errors, torch._dynamo.config.cache_size_limit) == before
