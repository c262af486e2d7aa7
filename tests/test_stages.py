"""The stopwatch that code names its stages to."""

import threading
import time

import pytest
import torch

from prism_match import stages
from prism_match.stages import Stopwatch, stage


def test_without_a_stopwatch_a_stage_is_nothing():
    assert stage("backbone") is stages.NOTHING
    with stage("backbone"), stage("inside it"):
        pass
    assert Stopwatch().milliseconds() == {}


def test_stages_add_up_by_name_and_in_their_order():
    with Stopwatch("cpu") as watch:
        for _ in range(2):
            with stage("backbone"):
                time.sleep(0.01)
            with stage("prepare", host=True):
                pass
    with stage("after it"):
        pass
    taken = watch.milliseconds()
    assert list(taken) == ["backbone", "prepare"] and taken["backbone"] >= 20 > taken["prepare"] >= 0
    assert watch.milliseconds() == taken


def test_stages_of_all_threads_count():
    def work():
        for _ in range(50):
            with stage("decode", host=True):
                time.sleep(0.0001)

    with Stopwatch() as watch:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert watch.milliseconds()["decode"] >= 4 * 50 * 0.1


def test_one_stopwatch_at_a_time_and_none_after_an_error():
    with Stopwatch(), pytest.raises(RuntimeError, match="another"), Stopwatch():
        pass
    with pytest.raises(KeyError), Stopwatch() as watch, stage("failing"):
        raise KeyError
    assert stages.running is None and watch.milliseconds() == {}


def test_a_stopwatch_of_a_thread_knows_of_no_other():
    both = threading.Barrier(2, timeout=10)
    seen = {}

    def work(name):
        with Stopwatch(this_thread=True) as watch:
            both.wait()
            with stage(name):
                both.wait()
            with pytest.raises(RuntimeError, match="another"), Stopwatch(this_thread=True):
                pass
        seen[name] = list(watch.milliseconds())

    with Stopwatch() as everyone:
        threads = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with stage("mine"):
            pass
    assert seen == {"first": ["first"], "second": ["second"]}
    assert list(everyone.milliseconds()) == ["mine"] and stage("mine") is stages.NOTHING


@pytest.mark.gpu
def test_on_a_gpu_a_stage_takes_what_its_kernels_take():
    x = torch.rand(4096, 4096, device="cuda")
    (x @ x).sum().item()
    with Stopwatch("cuda") as watch:
        for _ in range(20):
            with stage("kernels"):
                x = x @ x / x.norm()
        with stage("host", host=True):
            time.sleep(0.001)
    taken = watch.milliseconds()
    start = time.perf_counter()
    for _ in range(20):
        x = x @ x / x.norm()
    torch.cuda.synchronize()
    assert taken["kernels"] == pytest.approx(1000 * (time.perf_counter() - start), rel=0.5)
    assert list(taken) == ["kernels", "host"]
