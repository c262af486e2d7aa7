"""The model against slow references, and the properties its users rely on."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor

from prism_match.config import PRESETS, ModelConfig
from prism_match.model import backbone, matching, prism
from prism_match.model.ablations import LinearAttention, absolute_encoding
from prism_match.model.attention import SADPA, attend_seen
from prism_match.model.backbone import ResNetFPN
from prism_match.model.matching import away_from_border
from prism_match.model.mpm import LayerState
from prism_match.model.position import RotaryEncoding
from prism_match.model.prism import PRISM, cell_centre
from prism_match.model.refinement import Refinement, expectation
from prism_match.model.tokens import Cells, Selection


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def random_mask(*shape: int, share: float = 0.6) -> Tensor:
    return torch.rand(*shape) < share


def ablation(name: str) -> ModelConfig:
    """A preset of the paper's ablation table with the dimensions of the tiny model."""
    small = PRESETS["tiny"]
    sizes = {
        k: getattr(small, k)
        for k in ("stage_dims", "coarse_dim", "fine_dim", "layers", "heads", "fine_heads")
    }
    return PRESETS[name].replace(**sizes)


# --- backbone ---------------------------------------------------------------------------------------


def test_backbone_shapes_and_parameters() -> None:
    coarse, fine = ResNetFPN((128, 196, 256), 256, 128)(torch.rand(1, 1, 64, 96))
    assert coarse.shape == (1, 256, 8, 12)
    assert fine.shape == (1, 128, 32, 48)
    assert 22e6 < sum(p.numel() for p in PRISM().parameters()) < 24e6


def odd_backbones() -> tuple[ResNetFPN, ResNetFPN]:
    """The same weights twice: with channels added up to a multiple of 16, and as the settings say."""
    wide = ResNetFPN((16, 20, 32), 32, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backbone, "LANES", 1)
        plain = ResNetFPN((16, 20, 32), 32, 16)
    plain.load_state_dict(wide.state_dict())
    return wide, plain


def test_added_channels_change_nothing_and_are_not_stored() -> None:
    wide, plain = odd_backbones()
    assert wide.stage4[1].conv1[0].weight.shape == (32, 32, 3, 3)
    assert {k: v.shape for k, v in wide.state_dict().items()} == {
        k: v.shape for k, v in plain.state_dict().items()
    }
    image = torch.rand(2, 1, 64, 96)
    for train in (True, False):
        for ours, theirs in zip(wide.train(train)(image), plain.train(train)(image), strict=True):
            assert_close(ours, theirs)
    twin = copy.deepcopy(wide)
    twin.load_state_dict(plain.state_dict())
    assert_close(twin(image)[1], wide(image)[1])
    with pytest.raises(RuntimeError, match="size mismatch"):
        wide.load_state_dict(ResNetFPN((16, 24, 32), 32, 16).state_dict())


def test_half_precision_sees_the_shades_of_an_image() -> None:
    """bf16 has fewer digits than a photo has shades of gray: the first convolution is that of float32."""
    torch.manual_seed(0)
    net, image = ResNetFPN((16, 24, 32), 32, 16).eval(), torch.rand(1, 1, 32, 64)
    seen: list[Tensor] = []
    net.stem.register_forward_hook(lambda _layer, _given, found: seen.append(found))
    with torch.no_grad():
        net(image)
        with torch.autocast("cpu", torch.bfloat16):
            coarse, fine = net(image)
    assert torch.equal(*seen) and seen[1].dtype == torch.float32
    assert coarse.dtype == fine.dtype == torch.bfloat16


def test_added_channels_stay_zero_in_training() -> None:
    wide, plain = odd_backbones()
    for net in (wide, plain):
        optimizer = torch.optim.AdamW(net.train().parameters(), lr=1e-3, weight_decay=0.1)
        torch.manual_seed(0)
        for _ in range(3):
            coarse, fine = net(torch.rand(2, 1, 32, 32))
            optimizer.zero_grad()
            (coarse.square().mean() + (fine - 1).square().mean()).backward()
            optimizer.step()
    for name, tensor in plain.state_dict().items():
        assert_close(wide.state_dict()[name], tensor, 1e-4)
    kept = {k: v.numel() for k, v in plain.state_dict().items()}
    for name, tensor in (*wide.named_parameters(), *wide.named_buffers()):
        inside = wide.state_dict()[name]
        assert inside.numel() == kept[name]
        assert inside.abs().double().sum().item() == pytest.approx(tensor.abs().double().sum().item())


@pytest.mark.parametrize("size", [(64, 96), (50, 77), (33, 40)])
def test_padding_changes_nothing(tiny: PRISM, size: tuple[int, int]) -> None:
    """Whatever lies in the padding, and however much of it there is."""
    height, width = size
    image, other = torch.rand(1, 1, height, width), torch.rand(1, 1, 64, 64)
    plain = tiny({"image0": image, "image1": other})
    padded = torch.rand(1, 1, 96, 160)
    padded[:, :, :height, :width] = image
    mask = torch.zeros(1, 96, 160)
    mask[:, :height, :width] = 1
    result = tiny({"image0": padded, "image1": other, "mask0": mask})
    assert len(plain["confidence"]) > 0
    for key in plain:
        assert_close(result[key].float(), plain[key].float(), 1e-4)


# --- attention --------------------------------------------------------------------------------------


def test_rotary_depends_on_relative_position_as_in_the_paper() -> None:
    torch.manual_seed(0)
    encoding = RotaryEncoding(dim=16, heads=2)
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    at_q, at_k = torch.rand(1, 5, 2), torch.rand(1, 7, 2)
    fast = encoding(q, at_q) @ encoding(k, at_k).mT
    shifted = encoding(q, at_q + 0.3) @ encoding(k, at_k + 0.3).mT
    assert_close(shifted, fast, 1e-4)
    for h in range(2):
        for i in range(5):
            for j in range(7):
                turn = reference.rotation(encoding.b[h] @ (at_q[0, i] - at_k[0, j]))
                assert_close(fast[0, h, i, j], q[0, h, i] @ turn @ k[0, h, j], 1e-4)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("levels", [(4, 2, 1), (1,)])
def test_sadpa_equals_loops(levels: tuple[int, ...], rotary: bool, gather: bool) -> None:
    torch.manual_seed(1)
    layer = SADPA(dim=16, heads=2, levels=levels, rotary=rotary)
    source, target = torch.randn(2, 8, 4, 16), torch.randn(2, 4, 8, 16)
    keep_s, keep_t = random_mask(2, 8, 4), random_mask(2, 4, 8)
    valid_s, valid_t = torch.ones_like(keep_s), torch.ones_like(keep_t)
    fast = layer(
        source, target, Cells.of(keep_s, valid_s, levels, gather), Cells.of(keep_t, valid_t, levels, gather)
    )
    for n in range(2):
        slow = reference.sadpa(layer, source[n], target[n], keep_s[n], keep_t[n], valid_t[n])
        assert_close(fast[n], slow, 1e-4)
        masked = reference.masked_attention(layer, source[n], target[n], keep_s[n], keep_t[n], valid_t[n])
        assert_close(masked, slow, 1e-4)


@pytest.mark.parametrize("dim", [7, 8, 32])
def test_a_mask_as_a_channel_hides_what_a_mask_hides(dim: int) -> None:
    seen = torch.rand(3, 11) < 0.5
    seen[:, 4] = True
    tensors = [torch.randn(3, 2, n, dim, requires_grad=True) for n in (5, 11, 11)]
    grads = []
    for way in (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None]),
        lambda q, k, v: attend_seen(q, k, v, seen),
    ):
        message = way(*tensors)
        grads.append((message, *torch.autograd.grad(message.square().sum(), tensors)))
    for wanted, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted)
    assert grads[1][2][:, :, ~seen[0]][0].abs().max() == 0  # nothing flows to a key that is not seen


@pytest.mark.parametrize("gather", [True, False])
def test_attention_without_any_key_gives_no_message(gather: bool) -> None:
    """One pair of the batch has everything pruned in the target, the other nothing."""
    torch.manual_seed(2)
    layer = SADPA(dim=16, heads=2, levels=(4, 2, 1), rotary=False)
    source, target = torch.randn(2, 4, 4, 16), torch.randn(2, 4, 4, 16)
    keep = torch.ones(2, 4, 4, dtype=torch.bool)
    keep_t = keep.clone()
    keep_t[0] = False
    cells = Cells.of(keep, keep, layer.levels, gather), Cells.of(keep_t, keep, layer.levels, gather)
    fast = layer(source, target, *cells)
    for n in range(2):
        assert_close(fast[n], reference.sadpa(layer, source[n], target[n], keep[n], keep_t[n], keep[n]), 1e-4)


def test_linear_attention_equals_loops() -> None:
    torch.manual_seed(3)
    layer = LinearAttention(dim=8, heads=2, levels=(4, 2, 1), rotary=False)
    x, y = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 4, 8)
    keep = random_mask(1, 4, 4)
    valid = torch.ones_like(keep)
    cells = Cells.of(valid, valid, (4, 2, 1), True), Cells.of(keep, valid, (4, 2, 1), True)
    fast = layer(x, y, *cells)[0].flatten(0, 1)
    q, k, v = layer.query(x[0]), layer.key(y[0]), layer.convs[0](y[0])
    for i in range(16):
        message = torch.zeros(8)
        for h in (slice(0, 4), slice(4, 8)):
            phi_q = torch.nn.functional.elu(q.flatten(0, 1)[i, h]) + 1
            weights = torch.stack(
                [phi_q @ (torch.nn.functional.elu(k.flatten(0, 1)[j, h]) + 1) for j in range(16)]
            )
            weights = weights * keep.flatten()
            message[h] = weights @ v.flatten(0, 1)[:, h] / weights.sum()
        token = x[0].flatten(0, 1)[i]
        assert_close(fast[i], token + layer.ffn(torch.cat([token, message])), 1e-4)


# --- pruning ----------------------------------------------------------------------------------------


def test_pruned_model_equals_masked_reference(tiny: PRISM) -> None:
    a, b = tiny.extract(torch.rand(1, 1, 64, 96)), tiny.extract(torch.rand(1, 1, 96, 64))
    layers = tiny.transform(a, b, a.valid, b.valid)
    slow = reference.masked_mpms(tiny, a.coarse[0], b.coarse[0], a.valid[0], b.valid[0])
    for fast, expected in zip(layers, slow, strict=True):
        assert torch.equal(fast.keep0[0], expected["keep0"])
        assert torch.equal(fast.keep1[0], expected["keep1"])
        assert_close(fast.coarse0[0], expected["f0"], 1e-4)
        assert_close(fast.coarse1[0], expected["f1"], 1e-4)
    kept = layers[-1].keep0[0]
    assert 0.05 < kept.float().mean() < 0.9, "the test is empty unless something is pruned and something kept"
    assert_close(layers[-1].logit0[0][kept].sigmoid(), slow[-1]["nmi0"][kept], 1e-4)


def test_training_mode_prunes_the_same(tiny: PRISM) -> None:
    """The masks that training works with and the gathering that inference does are the same model."""
    a, b = tiny.extract(torch.rand(2, 1, 64, 64)), tiny.extract(torch.rand(2, 1, 64, 64))
    fast = tiny.transform(a, b, a.valid, b.valid)
    for mpm in tiny.mpms:
        mpm.training = True
    dense = tiny.transform(a, b, a.valid, b.valid)
    for x, y in zip(fast, dense, strict=True):
        assert torch.equal(x.keep0, y.keep0)
        assert_close(x.coarse0, y.coarse0, 1e-4)


def test_pruned_cells_stay_pruned_and_cost_nothing(tiny: PRISM, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = tiny.extract(torch.rand(1, 1, 96, 96)), tiny.extract(torch.rand(1, 1, 96, 96))
    sizes: list[tuple[int, int]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        sizes.append((query.shape[2], key.shape[2]))
        return attend(query, key, value, attn_mask=attn_mask)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    layers = tiny.transform(a, b, a.valid, b.valid)
    assert not (layers[1].keep0 & ~layers[0].keep0).any()
    kept0, kept1 = int(layers[0].keep0.sum()), int(layers[0].keep1.sum())
    assert kept0 < 144 > kept1
    second = sizes[len(sizes) // 2 :]  # self on both, then cross both ways; 1/32, 1/16, 1/8 each
    assert [q for q, _ in second] == [kept0] * 3 + [kept1] * 3 + [kept0] * 3 + [kept1] * 3
    assert [k for _, k in second[2::3]] == [kept0, kept1, kept1, kept0]
    assert {k for _, k in second[0::3]} == {9}, "the coarsest level is never pruned"


def test_everything_pruned_gives_no_match(tiny: PRISM) -> None:
    for mpm in tiny.mpms:
        mpm.pruning.phi[-1].bias.data -= 1000
    result = tiny({"image0": torch.rand(2, 1, 64, 64), "image1": torch.rand(2, 1, 64, 64)})
    assert result["keypoints0"].shape == result["keypoints1"].shape == (0, 2)


@pytest.mark.parametrize("keep", [torch.rand(3, 20) < 0.5, torch.zeros(2, 7) > 0, torch.ones(2, 7) > 0])
def test_selection_round_trip(keep: Tensor) -> None:
    tokens = torch.randn(*keep.shape, 4)
    for gather in (True, False):
        selection = Selection.of(keep, gather)
        out = selection.scatter(tokens, selection.gather(tokens) + 1)
        assert_close(out, torch.where(keep[..., None], tokens + 1, tokens))


# --- matching ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [7, 40, 10**6])
def test_matches_equal_loops(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "CHUNK_ON_CPU", chunk)
    torch.manual_seed(4)
    f0, f1 = torch.randn(9, 8), torch.randn(6, 8)
    nmi0, nmi1 = torch.rand(9), torch.rand(6)
    p = reference.confidence(f0, f1, nmi0, nmi1, temperature=0.1)
    for theta_c in (0.0, 0.02, 0.2):
        i, j, confidence = matching.mutual_matches(f0, f1, nmi0.log(), nmi1.log(), 0.1, theta_c)
        assert list(zip(i.tolist(), j.tolist(), strict=True)) == reference.mutual(p, theta_c)
        assert_close(confidence, p[i, j])


@pytest.mark.parametrize("border", [0, 1])
@pytest.mark.parametrize("weighted", [True, False])
def test_coarse_matches_equal_loops_with_pruned_cells_left_out(weighted: bool, border: int) -> None:
    """Of each pair of a batch: the cells themselves, of both images, and their confidence."""
    torch.manual_seed(5)
    f0, f1 = torch.randn(2, 3, 4, 8), torch.randn(2, 4, 3, 8)
    keep0, keep1 = random_mask(2, 3, 4, share=0.8), random_mask(2, 4, 3, share=0.8)
    logit0, logit1 = torch.randn(2, 3, 4), torch.randn(2, 4, 3)
    config = ModelConfig(weighted_softmax=weighted, border=border)
    last = LayerState(f0, f1, keep0, keep1, logit0, logit1)
    every0, every1 = torch.ones_like(keep0), torch.ones_like(keep1)
    found = matching.coarse_matches(last, every0, every1, config, theta_c=0.01)
    expected = []
    for k in range(2):
        cells0, cells1 = (m[k].flatten().nonzero().flatten().tolist() for m in (keep0, keep1))
        nmi0, nmi1 = (x[k].flatten().sigmoid() if weighted else torch.ones(12) for x in (logit0, logit1))
        p = reference.confidence(
            f0[k].flatten(0, 1)[cells0], f1[k].flatten(0, 1)[cells1], nmi0[cells0], nmi1[cells1], 0.1
        )
        for i, j in reference.mutual(p, 0.01):
            (y0, x0), (y1, x1) = divmod(cells0[i], 4), divmod(cells1[j], 3)
            inside = border == 0 or (y0 == 1 and 1 <= x0 <= 2 and 1 <= y1 <= 2 and x1 == 1)
            if inside:
                expected.append((cells0[i], cells1[j], k, float(p[i, j])))
    assert list(zip(*(x.tolist() for x in found[:3]), strict=True)) == [e[:3] for e in expected]
    assert_close(found[3], torch.tensor([e[3] for e in expected]))
    assert border or (len(expected) > 4 and len({e[2] for e in expected}) == 2)


def test_similarity_is_never_half_precision() -> None:
    f = torch.randn(4, 8) * 300
    with torch.autocast("cpu", dtype=torch.bfloat16):
        s = matching.similarity(f, f, 0.1)
    assert s.dtype == torch.float32
    assert_close(s, f @ f.T / 0.8)


def test_border_cells_give_no_match() -> None:
    valid = torch.zeros(1, 6, 8, dtype=torch.bool)
    valid[:, :5, :6] = True
    inner = away_from_border(valid, border=2)
    assert inner.nonzero().tolist() == [[0, 2, 2], [0, 2, 3]]
    assert cell_centre(torch.tensor([9]), columns=8).tolist() == [[11.5, 11.5]]


# --- refinement -------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [3, 5, 7])
def test_windows_are_cut_around_the_cell_centre(window: int) -> None:
    refinement = Refinement(coarse_dim=8, fine_dim=4, heads=2, window=window)
    fine, coarse = torch.randn(2, 4, 16, 12), torch.randn(2, 4, 3, 8)
    batch, cell = torch.tensor([0, 1, 1]), torch.tensor([0, 5, 11])
    cut = refinement.cut_windows(fine, coarse, batch, cell)
    for n in range(3):
        row, column = divmod(int(cell[n]), 3)
        for dy in range(window):
            for dx in range(window):
                y, x = 4 * row + 2 + dy - window // 2, 4 * column + 2 + dx - window // 2
                inside = 0 <= y < 16 and 0 <= x < 12
                feature = fine[batch[n], :, y, x] if inside else torch.zeros(4)
                context = refinement.coarse_to_fine(coarse[batch[n], row, column])
                assert_close(cut[n, dy, dx], refinement.merge(torch.cat([feature, context])))


def test_expectation_equals_loops() -> None:
    refinement = Refinement(coarse_dim=8, fine_dim=4, heads=2, window=5)
    middle, window = torch.randn(3, 4), torch.randn(3, 5, 5, 4)
    offset, std = expectation(refinement.heat(middle, window))
    for n in range(3):
        score = torch.tensor([float(middle[n] @ window[n, y, x]) / 2 for y in range(5) for x in range(5)])
        heat = score.softmax(0)
        spots = torch.tensor([[(x - 2) * 2.0, (y - 2) * 2.0] for y in range(5) for x in range(5)])  # pixels
        mean = (heat[:, None] * spots).sum(0)
        variance = (heat[:, None] * (spots - mean) ** 2).sum(0)
        assert_close(offset[n], mean, 1e-4)
        assert_close(std[n], variance.sqrt().sum(), 1e-3)


def test_refinement_attends_as_sadpa_does() -> None:
    torch.manual_seed(6)
    refinement = Refinement(coarse_dim=8, fine_dim=8, heads=2, window=3).eval()
    fine0, fine1 = torch.randn(1, 8, 8, 8), torch.randn(1, 8, 8, 8)
    coarse0, coarse1 = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
    match = torch.tensor([0, 0]), torch.tensor([0, 3]), torch.tensor([2, 1])
    offset, _ = expectation(refinement(fine0, fine1, coarse0, coarse1, match))
    every = torch.ones(3, 3, dtype=torch.bool)
    for n in range(2):
        a = refinement.cut_windows(fine0, coarse0, match[0][n : n + 1], match[1][n : n + 1])[0]
        b = refinement.cut_windows(fine1, coarse1, match[0][n : n + 1], match[2][n : n + 1])[0]
        self_, cross = refinement.self_attention, refinement.cross_attention
        a, b = (reference.sadpa(self_, w, w, every, every, every) for w in (a, b))
        a, b = (
            reference.sadpa(cross, a, b, every, every, every),
            reference.sadpa(cross, b, a, every, every, every),
        )
        expected, _ = expectation(refinement.heat(a[1, 1][None], b[None]))
        assert_close(offset[n], expected[0], 1e-4)


# --- the whole --------------------------------------------------------------------------------------


def test_batch_gives_what_singles_give(tiny: PRISM) -> None:
    image0, image1 = torch.rand(3, 1, 64, 96), torch.rand(3, 1, 96, 64)
    together = tiny({"image0": image0, "image1": image1})
    for n in range(3):
        single = tiny({"image0": image0[n : n + 1], "image1": image1[n : n + 1]})
        mine = together["batch_indexes"] == n
        assert mine.any()
        for key in ("keypoints0", "keypoints1", "confidence"):
            assert_close(together[key][mine], single[key], 1e-4)


def test_refining_in_parts_changes_nothing(tiny: PRISM, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"image0": torch.rand(2, 1, 96, 96), "image1": torch.rand(2, 1, 96, 96)}
    whole = tiny(data)
    assert len(whole["confidence"]) > 7
    monkeypatch.setattr(prism, "REFINED_AT_ONCE", 3)
    for key, value in tiny(data).items():
        assert_close(value.float(), whole[key].float())


def test_same_input_same_result(tiny: PRISM) -> None:
    data = {"image0": torch.rand(2, 3, 70, 90), "image1": torch.rand(2, 3, 64, 64)}
    first, second = tiny(data), tiny(data)
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_kornia_convention(tiny: PRISM) -> None:
    rgb = torch.rand(2, 3, 64, 64)
    gray = (rgb * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
    result = tiny({"image0": rgb, "image1": rgb.flip(-1)})
    assert set(result) == {"keypoints0", "keypoints1", "confidence", "batch_indexes"}
    assert result["keypoints0"].shape[1] == 2
    assert result["batch_indexes"].dtype == torch.int64
    assert torch.equal(result["keypoints1"], tiny({"image0": gray, "image1": gray.flip(-1)})["keypoints1"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_finite(tiny: PRISM, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        for image in (torch.rand(1, 1, 64, 64), torch.zeros(1, 1, 64, 64), torch.ones(1, 1, 64, 64)):
            result = tiny({"image0": image, "image1": torch.rand(1, 1, 64, 64)})
            assert all(result[k].isfinite().all() for k in ("keypoints0", "keypoints1", "confidence"))


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "tiny"])
def test_every_ablation_runs_forward_and_backward(name: str) -> None:
    torch.manual_seed(7)
    model = PRISM(ablation(name)).eval()
    images = {"image0": torch.rand(2, 1, 64, 64), "image1": torch.rand(2, 1, 64, 96)}
    model(images)
    model.train()
    a, b = model.extract(images["image0"]), model.extract(images["image1"])
    last = model.transform(a, b, a.valid, b.valid)[-1]
    s = matching.similarity(last.coarse0.flatten(1, 2), last.coarse1.flatten(1, 2), model.config.temperature)
    index = torch.arange(2)
    match = (index, index + 20, index + 30)
    offset, std = expectation(model.refinement(a.fine, b.fine, last.coarse0, last.coarse1, match))
    log_p = s.log_softmax(dim=1) + s.log_softmax(dim=2)
    loss = -log_p[:, 20, 30].sum() + offset.square().sum() + std.sum()
    if last.logit0 is not None and last.logit1 is not None:
        loss = loss + last.logit0.square().sum() + last.logit1.square().sum()
    loss.backward()
    gradients = {k: p.grad for k, p in model.named_parameters() if "pruning" not in k or ".1." in k}
    assert all(g is not None and g.isfinite().all() for g in gradients.values())


def test_ablations_differ_as_the_paper_says() -> None:
    models = {name: PRISM(ablation(name)) for name in PRESETS if name != "tiny"}
    assert all(m.pruning is None for m in models["no-pruning"].mpms)
    assert [m.pruning is None for m in models["prune-last"].mpms] == [True, False]
    assert all(len(m.self_attention.levels) == 1 for m in models["single-level"].mpms)
    assert all(m.self_attention.rotary is None for m in models["absolute-positions"].mpms)
    assert all(m.cross_attention.rotary is None for m in models["paper"].mpms), "self attention only"
    assert models["cosine"].mpms[0].pruning.state_dict() == {}
    encoding = absolute_encoding(32, 5, 7, torch.device("cpu"))
    assert encoding.shape == (5, 7, 32)
    assert len(encoding.flatten(0, 1).unique(dim=0)) == 35, "every cell has a position of its own"


def test_weights_are_shared_between_the_images(tiny: PRISM) -> None:
    """Exchanging the images exchanges the result."""
    image0, image1 = torch.rand(1, 1, 64, 64), torch.rand(1, 1, 64, 64)
    a, b = tiny.extract(image0), tiny.extract(image1)
    there, back = tiny.transform(a, b, a.valid, b.valid)[-1], tiny.transform(b, a, b.valid, a.valid)[-1]
    assert torch.equal(there.keep0, back.keep1)
    assert_close(there.coarse0, back.coarse1)


def test_config_is_frozen_and_checked() -> None:
    config = ModelConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.layers = 2  # type: ignore[misc]
    assert ModelConfig.from_dict(config.to_dict()) == config
    for bad in (
        {"pruning": "sometimes"}, {"levels": [3, 1]}, {"levels": [4, 2]}, {"window": 4}, {"theta_p": 1.0},
        {"heads": 3}, {"layers": 0}, {"temperature": 0.0}, {"colour": 1}, {"layers": "4"}, {"layers": True},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"\w"):
            ModelConfig.from_dict(bad)
