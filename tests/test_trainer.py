"""The trainer: it learns, it resumes bit for bit, and nothing that goes wrong loses work."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pairs_for_tests import ShiftedTextures
from safetensors.torch import load_file, save_file

from prism_match.config import PRESETS as MODELS
from prism_match.errors import UserError
from prism_match.training import checkpoint as checkpoint_module
from prism_match.training.checkpoint import (
    Checkpoint,
    checkpoints,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from prism_match.training.config import PRESETS, Phase, TrainConfig, load_train_config
from prism_match.training.feed import Mixer, Weighted, concatenate, recording, shares
from prism_match.training.moments import MEAN, SQUARE, packed, unpacked
from prism_match.training.trainer import Trainer, learning_rate
from prism_match.weights.store import export_weights

TINY = PRESETS["tiny"].replace(phases=(Phase(0.0, 64, 2),), log_every=2, warmup=2)


def trainer(run: Path, source=None, **changes) -> Trainer:
    return Trainer(TINY.replace(**changes), [Weighted(source or ShiftedTextures())], run)


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(run).tensors


# ---- learning


def test_one_pair_is_learnt_by_heart(tmp_path):
    config = PRESETS["tiny"].replace(phases=(Phase(0.0, 64, 1),), steps=100, log_every=10)
    run = Trainer(config, [Weighted(ShiftedTextures(fixed=True))], tmp_path)
    last = run.fit()
    assert last["accuracy"] > 0.95 and last["error_px"] < 1 and last["recall"] > 0.99
    assert last["loss"] < json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])["loss"] / 5
    # What was learnt is in the averaged weights that are handed over, too.
    work = run.mixer.make(0, 0, 1, 64)
    found = run.average.match(*(run.average.extract(x) for x in (work.batch.image0, work.batch.image1)))
    x, y = (found.keypoints0 / 8).long().unbind(1)
    error = (found.keypoints1 - work.batch.warp0[0, y, x]).norm(dim=1)
    assert len(error) > 10 and (error < 4).float().mean() > 0.9
    assert (tmp_path / "samples.png").stat().st_size > 1000


def test_the_rate_warms_up_and_decays():
    config = TINY.replace(lr=1.0, warmup=10, final_lr=0.1)
    assert learning_rate(config, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(config, 20, 0.5) == pytest.approx(0.55)
    assert learning_rate(config, 99, 1.0) == pytest.approx(0.1)


def test_the_rate_may_stay_until_the_last_part():
    config = TINY.replace(lr=1.0, warmup=1, final_lr=0.1, decay=0.2)
    assert learning_rate(config, 50, 0.8) == pytest.approx(1.0)
    assert learning_rate(config, 90, 0.9) == pytest.approx(0.55)
    assert learning_rate(config, 99, 1.0) == pytest.approx(0.1)
    with pytest.raises(UserError, match="decay"):
        TINY.replace(decay=0.0)


def test_phases_of_one_start_take_turns(tmp_path):
    sizes = (Phase(0.0, 64, 4), Phase(0.0, 96, 2))
    run = trainer(tmp_path, steps=8, phases=sizes, log_every=1)
    run.fit()
    rows = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {r["size"] for r in rows} == {64, 96}
    assert [r["size"] for r in rows] == [run.config.phase(0.0, n).size for n in range(8)]
    batch = {64: 4, 96: 2}
    assert [r["pairs"] for r in rows] == list(itertools.accumulate(batch[r["size"]] for r in rows))


def test_phases_follow_the_budget(tmp_path):
    run = trainer(tmp_path, steps=6, phases=(Phase(0.0, 64, 4), Phase(0.5, 96, 2)), log_every=1)
    run.fit()
    rows = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["size"] for r in rows] == [64, 64, 64, 96, 96, 96]
    assert [r["pairs"] for r in rows] == [4, 8, 12, 14, 16, 18]


def test_minutes_count_over_resumptions(tmp_path):
    run = trainer(tmp_path, steps=None, minutes=2 / 60)
    run.fit()
    spent = load_checkpoint(tmp_path).state["elapsed"]
    assert 2 <= spent < 30
    again = trainer(tmp_path, steps=None, minutes=2 / 60)
    again.resume()
    assert again.elapsed == spent and again.progress(again.step) >= 1
    again.fit()
    assert again.step == run.step


# ---- resuming


def stop_at(call: int):
    class Stopping(ShiftedTextures):
        def sample(self, *args):
            batch = super().sample(*args)
            if self.calls == call:
                os.kill(os.getpid(), signal.SIGTERM)
            return batch

    return Stopping()


def test_stopping_and_resuming_changes_nothing(tmp_path, capsys):
    trainer(tmp_path / "whole", steps=8).fit()
    stopped = trainer(tmp_path / "parts", stop_at(4), steps=8)
    stopped.fit()
    assert 0 < stopped.step < 8
    assert "stopped by SIGTERM" in capsys.readouterr().out
    resumed = trainer(tmp_path / "parts", steps=8)
    resumed.resume()
    assert resumed.step == stopped.step
    resumed.fit()
    whole, parts = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "parts")
    assert whole.keys() == parts.keys() and any(k.startswith("optimizer.") for k in whole)
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name
    assert load_checkpoint(tmp_path / "parts").state["pairs"] == 16


def test_sigterm_ends_the_process_with_success(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from test_trainer import *\n"
        "trainer(Path(sys.argv[1]), steps=100000).fit()"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "log.jsonl").exists() and process.poll() is None:
        time.sleep(0.05)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "stopped by SIGTERM" in out and load_checkpoint(tmp_path).state["step"] > 0


def test_without_the_optimizer_a_run_still_resumes(tmp_path):
    trainer(tmp_path, steps=2, save_optimizer=False).fit()
    assert not any(k.startswith("optimizer.") for k in tensors_of(tmp_path))
    again = trainer(tmp_path, steps=4)
    again.resume()
    again.fit()
    assert again.step == 4


@pytest.mark.parametrize("name", [MEAN, SQUARE])
def test_bytes_hold_a_moment_to_six_percent(name):
    generator = torch.Generator().manual_seed(0)
    octaves = 18 * torch.rand(40, 50, generator=generator)
    moment = 3e-4 * torch.exp2(-octaves) * (2 * (torch.rand(40, 50, generator=generator) < 0.5) - 1)
    moment[0, :5] = 0
    moment = moment if name == MEAN else moment.square()
    tensors = packed(name, moment)
    assert tensors[name].dtype == torch.uint8
    again = unpacked(name, tensors)
    torch.testing.assert_close(again[1:], moment[1:], rtol=0.06, atol=0.0)
    if name == MEAN:
        assert (again[0, :5] == 0).all()
    else:  # a step is divided by its root
        assert (again > 0).all() and again.min() <= moment[1:].min()
    nothing = unpacked(name, packed(name, torch.zeros(3)))
    assert nothing.abs().max() < 1e-30


def test_with_moments_in_bytes_a_run_goes_on_nearly_as_it_would(tmp_path):
    trainer(tmp_path / "exact", steps=20).fit()
    shutil.copytree(tmp_path / "exact", tmp_path / "bytes")
    shutil.copytree(tmp_path / "exact", tmp_path / "none")
    for folder, changes in (("bytes", {"moment_bits": 8}), ("none", {"save_optimizer": False})):
        run = trainer(tmp_path / folder, steps=20)
        run.resume()
        step = next((tmp_path / folder).glob("step-*"))
        run.config = run.config.replace(**changes)
        shutil.rmtree(step)
        run.save()
    sizes = {
        k: sum(x.nbytes for name, x in tensors_of(tmp_path / k).items() if name.startswith("optimizer."))
        for k in ("exact", "bytes", "none")
    }
    assert 0 < sizes["bytes"] < 0.3 * sizes["exact"] and sizes["none"] == 0

    def moved(folder):
        run = trainer(tmp_path / folder, steps=21)
        run.resume()
        before = torch.cat([p.detach().flatten().clone() for p in run.model.parameters()])
        run.update([run.mixer.make(20, 0, 2, 64)])
        return torch.cat([p.detach().flatten() for p in run.model.parameters()]) - before

    exact, by_bytes, none = (moved(folder) for folder in ("exact", "bytes", "none"))
    assert (by_bytes - exact).norm() < 0.1 * exact.norm() < 0.1 * (none - exact).norm() * 3


def test_a_run_begins_with_the_moments_of_another(tmp_path):
    trainer(tmp_path / "a", steps=3, moment_bits=8).fit()
    other = trainer(tmp_path / "b", steps=2)
    other.start_from(tmp_path / "a")
    named = dict(other.model.named_parameters())
    assert other.step == 0 and len(other.optimizer.state) == len(named)
    assert all(int(other.optimizer.state[p]["step"]) == 3 for p in named.values())
    other.fit()
    alone = trainer(tmp_path / "c", steps=2)
    alone.start_from(tmp_path / "a" / "weights.safetensors")
    assert not alone.optimizer.state


def test_moments_that_are_cut_short_are_told(tmp_path):
    trainer(tmp_path, steps=2, moment_bits=8).fit()
    file = next(tmp_path.glob("step-*/*.safetensors"))
    tensors = load_file(file)
    gone = next(k for k in tensors if k.endswith("exp_avg_sq.largest"))
    save_file({k: v for k, v in tensors.items() if k != gone}, file)
    with pytest.raises(UserError, match="damaged checkpoint: the moments of"):
        trainer(tmp_path, steps=4).resume()
    with pytest.raises(UserError, match="moment_bits must be 8 or 32, not 16"):
        TINY.replace(moment_bits=16)


def test_weights_of_a_run_start_another(tmp_path):
    trainer(tmp_path / "a", steps=2).fit()
    other = trainer(tmp_path / "b", steps=2)
    other.start_from(tmp_path / "a" / "weights.safetensors")
    weights, _ = load_weights(tmp_path / "a")
    for name, value in other.model.state_dict().items():
        assert torch.allclose(value.float(), weights[name].float(), rtol=1e-3, atol=1e-5), name
    assert other.step == 0


# ---- what goes wrong


def broken(work):
    return replace(work, batch=replace(work.batch, image0=work.batch.image0 * torch.nan))


def test_a_step_without_a_finite_gradient_changes_nothing(tmp_path):
    run = trainer(tmp_path, steps=10)
    works = [run.mixer.make(i, 0, 2, 64) for i in range(3)]
    run.update([works[0]])
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    moments = {p: {k: v.clone() for k, v in s.items()} for p, s in run.optimizer.state.items()}
    run.update([broken(works[1])])
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for p, state in moments.items():
        assert all(torch.equal(v, run.optimizer.state[p][k]) for k, v in state.items())
    run.update([works[2]])
    assert int(run.skipped) == 1 and int(run.skipped_running) == 0
    assert any(not torch.equal(v, before[k]) for k, v in run.model.state_dict().items())
    assert all(torch.isfinite(v).all() for v in run.average.state_dict().values())


def test_nothing_but_bad_steps_ends_the_run_with_one_line(tmp_path):
    class Nothing(ShiftedTextures):
        def sample(self, *args):
            batch = super().sample(*args)
            return replace(batch, image0=batch.image0 * torch.nan)

    with pytest.raises(UserError, match="no finite gradient") as error:
        trainer(tmp_path, Nothing(), steps=1000).fit()
    assert "\n" not in str(error.value)


def test_how_often_the_metrics_are_read_does_not_decide_when_bad_steps_are_too_many(tmp_path):
    class TwiceNothing(ShiftedTextures):
        def sample(self, *args):
            batch = super().sample(*args)
            return replace(batch, image0=batch.image0 * torch.nan) if 2 <= self.calls <= 3 else batch

    last = trainer(tmp_path, TwiceNothing(), steps=5, log_every=1).fit()
    assert last["step"] == 5 and last["skipped_steps"] == 2


def test_what_fails_at_once_is_no_run(tmp_path):
    with pytest.raises(UserError, match="in a row failed"):
        trainer(tmp_path, ShiftedTextures(break_at=tuple(range(1000))), steps=5).fit()
    assert not checkpoints(tmp_path) and not (tmp_path / "weights.safetensors").exists()


def test_what_another_run_has_left_meanwhile_is_not_lost(tmp_path):
    """Two processes begin at once, in one folder; one has ended when the other has read its data."""
    first, second = (trainer(tmp_path, steps=steps) for steps in (3, 2))
    first.fit()
    before = tensors_of(tmp_path)
    with pytest.raises(UserError, match="another run has ended here meanwhile"):
        second.fit()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000003"]
    assert all(torch.equal(v, before[k]) for k, v in tensors_of(tmp_path).items())
    first.config = first.config.replace(steps=4)
    assert first.fit()["step"] == 4  # one's own are no hindrance


def test_a_broken_sample_is_named_and_skipped(tmp_path, caplog):
    run = trainer(tmp_path, ShiftedTextures(break_at=(2, 3)), steps=4)
    assert run.fit()["skipped_samples"] == 2
    assert "skipped a sample of shifted textures: sample 17 is broken" in caplog.text


def test_a_source_that_only_fails_ends_the_run_and_loses_nothing(tmp_path):
    run = trainer(tmp_path, ShiftedTextures(break_at=tuple(range(3, 1000))), steps=100)
    with pytest.raises(UserError, match="shifted textures: .* in a row failed"):
        run.fit()
    assert load_checkpoint(tmp_path).state["step"] == run.step == 2


def test_nothing_is_trained_while_a_source_is_recorded(tmp_path, monkeypatch):
    at_work, seen = [], []

    class Recording(ShiftedTextures):
        def sample(self, *arguments):
            with recording:
                at_work.append(True)
                time.sleep(0.01)
                at_work.pop()
            return super().sample(*arguments)

    def watched(self, work, update=Trainer.update):
        seen.append(bool(at_work))
        update(self, work)
        seen.append(bool(at_work))

    monkeypatch.setattr(Trainer, "update", watched)
    trainer(tmp_path, Recording(), steps=6).fit()
    assert seen == [False] * 12


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    run = trainer(tmp_path, steps=4)
    run.update([run.mixer.make(0, 0, 2, 64)])
    run.save()

    def full(*args):
        raise OSError(28, "No space left on device")

    run.update([run.mixer.make(1, 0, 2, 64)])
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_module, "write_flushed", full)
        with pytest.raises(UserError, match="No space left on device") as error:
            run.save()
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "weights.safetensors"]
    assert load_checkpoint(tmp_path).state["step"] == 1
    run.save()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000002"]


def test_what_a_full_disk_has_room_for_is_saved(tmp_path, monkeypatch):
    """Neither a checkpoint nor a picture fits; training goes on, and its weights are there in the end."""

    def no_room(*args):
        raise UserError("no space left")

    monkeypatch.setattr("prism_match.training.trainer.save_checkpoint", no_room)
    monkeypatch.setattr("prism_match.training.trainer.write_png", no_room)
    run = trainer(tmp_path, steps=4, save_minutes=0.0, samples_minutes=0.0)
    with pytest.raises(UserError, match="no space left"):
        run.fit()
    assert run.step == 4
    weights, _ = load_weights(tmp_path / "weights.safetensors")
    last = run.average.state_dict()
    assert all(torch.allclose(weights[k].float(), v.float(), atol=1e-2) for k, v in last.items())


def test_a_disk_without_room_for_anything_is_told_in_full(tmp_path, monkeypatch, caplog):
    def no_room(path, *args):
        raise UserError(f"{path.name}: no space left")

    monkeypatch.setattr("prism_match.training.trainer.save_checkpoint", no_room)
    monkeypatch.setattr("prism_match.training.trainer.export_weights", no_room)
    run = trainer(tmp_path / "run", steps=1)
    with pytest.raises(UserError, match="run: no space left"):
        run.save()
    assert "weights.safetensors: no space left" in caplog.text


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path):
    trainer(tmp_path, steps=1).fit()
    other = trainer(tmp_path / "other", steps=1, model=MODELS["tiny"].replace(layers=3, position="absolute"))
    message = "layers is 2 there and 3 here, position is 'rotary' there and 'absolute' here"
    with pytest.raises(UserError, match=message):
        other.resume(tmp_path)
    with pytest.raises(UserError, match=message):
        other.start_from(tmp_path / "weights.safetensors")


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_damaged_and_missing_checkpoints_give_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "step-00000001").mkdir()
        (tmp_path / "step-00000001" / "state.json").write_text(content)
    with pytest.raises(UserError) as error:
        trainer(tmp_path, steps=1).resume()
    assert "\n" not in str(error.value)


def test_no_budget_and_uneven_batches_are_refused(tmp_path):
    with pytest.raises(UserError, match="budget"):
        trainer(tmp_path, steps=None)
    with pytest.raises(UserError, match="equal parts"):
        trainer(tmp_path, steps=1, accumulate=3).fit()
    with pytest.raises(UserError, match="nothing to train on"):
        Trainer(TINY, [], tmp_path)


# ---- files


def test_shards_are_small_and_come_back_the_same(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.large": torch.rand(700, 1000, generator=generator),  # cut into pieces
        "model.small": torch.arange(7),
        "model.scalar": torch.tensor(3.0),
        **{f"ema.{i}": torch.rand(100, 100, generator=generator) for i in range(40)},
    }
    state = dict.fromkeys(checkpoint_module.STATE, 3) | {"model": {}, "training": {}}
    folder = save_checkpoint(tmp_path, 3, Checkpoint(tensors, state), shard_mib=1)
    files = list(folder.glob("*.safetensors"))
    assert len(files) > 3 and all(f.stat().st_size <= 2**20 for f in files)
    back = load_checkpoint(tmp_path)
    assert back.state == state and back.tensors.keys() == tensors.keys()
    assert all(torch.equal(v, back.tensors[k]) for k, v in tensors.items())
    assert back.group("ema")["5"].shape == (100, 100)


def test_a_checkpoint_without_one_of_its_files_is_told(tmp_path):
    trainer(tmp_path, steps=1, shard_mib=0.75).fit()
    for file in sorted(checkpoints(tmp_path)[0].glob("*.safetensors")):
        aside = file.rename(tmp_path / "aside")
        with pytest.raises(UserError, match=r"damaged checkpoint \(\d+ of \d+ files are there\)"):
            load_checkpoint(tmp_path)
        aside.rename(file)
    assert "files" not in load_checkpoint(tmp_path).state


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_anew(tmp_path, monkeypatch):
    run = trainer(tmp_path, steps=2)
    run.fit()
    original = checkpoint_module.load_file

    def late(file):
        monkeypatch.setattr(checkpoint_module, "load_file", original)
        run.config = run.config.replace(steps=3)
        run.fit()
        return original(file)

    monkeypatch.setattr(checkpoint_module, "load_file", late)
    assert load_checkpoint(tmp_path).state["step"] == 3


@pytest.mark.parametrize("change", ["missing", "unexpected", "of another shape"])
def test_weights_that_do_not_fit_begin_no_run(tmp_path, change):
    run = trainer(tmp_path / "run", steps=1)
    state = run.average.state_dict()
    name = next(iter(state))
    if change == "missing":
        del state[name]
    elif change == "unexpected":
        state["more"] = torch.ones(1)
    else:
        state[name] = torch.ones(2)
    export_weights(tmp_path / "w.safetensors", state, run.config.model, {})
    with pytest.raises(UserError, match=f"do not fit the model: 1 {change}") as error:
        run.start_from(tmp_path / "w.safetensors")
    assert "\n" not in str(error.value)


def test_parts_of_different_weights_are_no_weights(tmp_path):
    """As they are left where the process that replaces them is ended."""
    run = trainer(tmp_path / "run", steps=1)
    path, state = tmp_path / "w.safetensors", run.average.state_dict()
    export_weights(path, state, run.config.model, {"step": 1}, 0.3)
    first, *_ = files = sorted(tmp_path.glob("w-*.safetensors"))
    kept = first.read_bytes()
    export_weights(path, {k: v + 1 for k, v in state.items()}, run.config.model, {"step": 2}, 0.3)
    load_weights(path)
    first.write_bytes(kept)
    assert len(files) > 1
    with pytest.raises(UserError, match="parts are of different weights"):
        load_weights(path)


@pytest.mark.parametrize("shard_mib", [None, 0.3])
def test_exported_weights_say_what_they_are(tmp_path, shard_mib):
    run = trainer(tmp_path, steps=1)
    path = tmp_path / "model.safetensors"
    files = export_weights(path, run.average.state_dict(), run.config.model, {"step": 5}, shard_mib)
    assert (len(files) == 1) == (shard_mib is None)
    from safetensors import safe_open

    with safe_open(files[0], "pt") as f:
        assert json.loads(f.metadata()["training"]) == {"step": 5}
        assert json.loads(f.metadata()["config"])["coarse_dim"] == 32
    assert load_file(files[0])["backbone.stem.0.weight"].dtype == torch.float16
    weights, config = load_weights(path)
    assert config["layers"] == 2
    run.model.load_state_dict(weights)
    if shard_mib:
        files[0].unlink()
        with pytest.raises(UserError, match="parts are there"):
            load_weights(path)


@pytest.mark.parametrize("preset", PRESETS)
def test_settings_survive_a_checkpoint(preset):
    assert TrainConfig.from_dict(json.loads(json.dumps(PRESETS[preset].to_dict()))) == PRESETS[preset]


def test_settings_come_from_a_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'preset = "quick"\nlr = 1e-3\nsteps = 10\nphases = [[0, 64, 8], [0.5, 96, 4]]\n'
        "[model]\nlayers = 2\n[loss]\ndeep = 0.25\n"
    )
    config = load_train_config(file)
    assert (config.lr, config.steps, config.model.layers, config.loss.deep) == (1e-3, 10, 2, 0.25)
    assert config.phases[1] == Phase(0.5, 96, 4) and config.warmup == PRESETS["quick"].warmup


@pytest.mark.parametrize(
    "text, reason",
    [
        ("lrr = 1", "lrr"),
        ("phases = [[0.5, 64, 8]]", "begin at 0"),
        ("phases = [[0, 64]]", r"\[start, size, batch\]"),
        ("phases = 3", "phases"),
        ("phases = [[0, 64, 2], [nan, 96, 2]]", "begin at 0"),
        ("phases = [[0, 64.9, 2]]", "a whole number"),
        ("phases = [[0, 64, 2.7]]", "a whole number"),
        ("seed = 99999999999999999999", "seed must be a whole number"),
        ("save_minutes = nan", "save_minutes must be at least 0"),
        ("[model]\ntemperature = nan", "temperature must be positive"),
        ("[model]\nlayers = 0", "layers"),
        ("[loss]\nrefine = 0", "refine must be at least 1"),
        ("[loss]\ndepp = 1", "depp"),
        ("loss = 3", "loss"),
        ("= 3", "line 1"),
        ('preset = "fast"', "preset is one of paper"),
        ('lr = "high"', "lr must be of type float"),
        ("lr = nan", "lr must be positive"),
        ("minutes = inf", "minutes must be positive"),
        ("shard_mib = 0", "shard_mib"),
        ('bf16 = "no"', "bf16 must be of type bool"),
        ("accumulate = 1.5", "accumulate must be of type int"),
        ("warmup = -1", "warmup must be at least 0"),
        ('save_minutes = "x"', "save_minutes"),
    ],
)
def test_mistakes_in_a_file_give_one_line(tmp_path, text, reason):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=reason) as error:
        load_train_config(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


# ---- the command


@pytest.fixture
def photos(tmp_path) -> Path:
    import cv2

    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(3):
        small = rng.integers(0, 255, (24, 24), np.uint8)
        cv2.imwrite(str(folder / f"{i}.png"), cv2.resize(small, (192, 192), interpolation=cv2.INTER_CUBIC))
    (folder / "broken.jpg").write_bytes(b"not a photo")
    return folder


def prism(*arguments: object):
    import typer
    from typer.testing import CliRunner

    from prism_match.cli.data import data
    from prism_match.cli.train import train

    app = typer.Typer()
    app.command()(train)
    app.add_typer(data, name="data")
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_command_trains_and_resumes(tmp_path, photos, capsys):
    run = tmp_path / "run"
    common = ["--photos", photos, "--device", "cpu", "--out", run]
    result = prism("train", "--preset", "tiny", "--steps", 2, "--batch", 2, "--save-minutes", 0, *common)
    assert result.exception is None, result.exception
    assert load_checkpoint(run).state["step"] == 2
    again = prism("train", *common, "--steps", 2)
    assert isinstance(again.exception, UserError) and "--resume" in str(again.exception)
    result = prism("train", *common, "--resume", "--steps", 3)
    assert result.exception is None, result.exception
    state = load_checkpoint(run).state
    assert state["step"] == 3 and state["training"]["phases"][0]["batch"] == 2


def test_the_command_previews(tmp_path, photos):
    result = prism("data", "preview", "--photos", photos, "--pairs", 2, "--size", 64, "--out", tmp_path / "p")
    assert result.exception is None, result.exception
    assert (tmp_path / "p" / "photos.png").stat().st_size > 100


def test_settings_of_a_checkpoint_that_make_no_sense_give_one_line(tmp_path):
    trainer(tmp_path / "run", steps=1).fit()
    state = next((tmp_path / "run").glob("step-*/state.json"))
    state.write_text(state.read_text().replace('"lr"', '"rate"'))
    result = prism("train", "--resume", "--photos", tmp_path, "--out", tmp_path / "run")
    assert isinstance(result.exception, UserError) and "unknown settings: rate" in str(result.exception)


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ([], "nothing to train on"),
        (["--photos", "missing"], "missing: no such file or folder"),
        (["--photos", "{tmp}"], "no photos"),
        (["--worlds"], "--worlds needs --photos"),
        (["--colmap", "{tmp}"], "images"),
        (["--megadepth", "{tmp}"], "prism data megadepth"),
        (["--photos", "{photos}", "--mix", "photos=x"], "--mix photos=x"),
        (["--photos", "{photos}", "--mix", "rgbd=1"], "rgbd"),
        (["--photos", "{photos}", "--mix", "photos=inf"], "NUMBER from 0 to 1,000,000"),
        (["--photos", "{photos}", "--seed", "-1"], "seed must be a whole number of at least 0"),
        (["--photos", "{photos}", "--size", "64", "--batch", "0"], "batch must be at least 1"),
        (["--photos", "{photos}", "--size", "100"], "multiple of 32"),
        (["--photos", "{photos}", "--lr", "nan"], "lr must be positive"),
        (["--photos", "{photos}", "--shard-mib", "0"], "shard_mib must be at least 0.5"),
        (["--photos", "{photos}", "--preset", "missing.toml"], "missing.toml"),
        (["--photos", "{photos}", "--resume"], "no checkpoint"),
        (["--photos", "{photos}", "--init", "missing"], "missing: no such weights"),
        (["--photos", "{photos}", "--model", "missing"], "missing"),
    ],
)
def test_mistakes_give_one_line(tmp_path, photos, arguments, reason):
    empty = tmp_path / "empty"
    empty.mkdir()
    filled = [str(a).format(tmp=empty, photos=photos) for a in arguments]
    preset = [] if "--preset" in filled or "--resume" in filled else ["--preset", "tiny"]
    result = prism("train", "--out", tmp_path / "run", "--device", "cpu", "--steps", 1, *preset, *filled)
    assert isinstance(result.exception, UserError), result.exception
    assert reason in str(result.exception) and "\n" not in str(result.exception)


def test_validation_spends_none_of_the_minutes(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("prism_match.training.trainer.time", SimpleNamespace(monotonic=clock))
    calls = []

    def validate(model):
        calls.append(clock.now)
        clock.now += 3600.0
        return {}

    run = trainer(tmp_path, steps=None, minutes=0.5, validate_minutes=0.1)
    run.validate = validate
    run.fit()
    assert 30 <= run.elapsed < 40 and len(calls) >= 3
    assert run.step > 10


class Clock:
    """A second passes whenever it is looked at."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_validation_is_written_down(tmp_path):
    seen = []

    def validate(model):
        seen.append(model.training)
        return {"auc@10": 12.5}

    Trainer(TINY.replace(steps=2), [Weighted(ShiftedTextures())], tmp_path, "cpu", validate).fit()
    assert seen == [False]
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["auc@10"] == 12.5


# ---- data


def test_batches_depend_on_the_step_alone():
    sources = [Weighted(ShiftedTextures()), Weighted(ShiftedTextures(), 3.0)]
    first, again = (Mixer(sources, 5, torch.device("cpu")).make(7, 1, 8, 64) for _ in range(2))
    other = Mixer(sources, 5, torch.device("cpu")).make(8, 1, 8, 64)
    assert torch.equal(first.batch.image1, again.batch.image1) and torch.equal(first.keys, again.keys)
    assert not torch.equal(first.batch.image1, other.batch.image1)


def test_shares_are_steady_and_small_sources_get_their_turn():
    import random

    rng = random.Random(0)
    assert [shares([1, 1, 2], 10, rng) for _ in range(3)] == [[3, 2, 5]] * 3
    drawn = np.array([shares([1, 9], 4, rng) for _ in range(2000)])
    assert (drawn.sum(1) == 4).all() and abs(drawn[:, 0].mean() - 0.4) < 0.05


def test_batches_with_and_without_masks_are_joined():
    generator = torch.Generator().manual_seed(0)
    plain = ShiftedTextures().sample(2, 64, generator)
    mask, unknown = torch.zeros(2, 64, 64, dtype=torch.bool), torch.ones(2, 8, 8, dtype=torch.bool)
    rough = torch.tensor([True, False])
    joined = concatenate([plain, replace(plain, mask1=mask, unknown0=unknown, rough=rough)])
    assert joined.rough.tolist() == [False, False, True, False]
    assert len(joined) == 4 and joined.mask0 is None and joined.unknown1 is None
    assert joined.mask1[:2].all() and not joined.mask1[2:].any()
    assert not joined.unknown0[:2].any() and joined.unknown0[2:].all()


# ---- many processes


def test_two_processes_give_the_gradients_of_one(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    worker = str(Path(__file__).with_name("ddp_worker.py"))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    jobs = [("one.safetensors", "2", {})]
    jobs += [("two.safetensors", "1", {**place, "RANK": str(rank)}) for rank in range(2)]
    running = [
        subprocess.Popen([sys.executable, worker, str(tmp_path / out), parts], env={**os.environ, **extra})
        for out, parts, extra in jobs
    ]
    assert [p.wait(timeout=120) for p in running] == [0, 0, 0]
    one, two = load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "two.safetensors")
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.allclose(value, two[name], rtol=1e-3, atol=1e-5), name
