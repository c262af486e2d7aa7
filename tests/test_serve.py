"""`prism serve`: answers are the matcher's own, mistakes get one sentence each, nothing is held for anybody
who is gone. Servers run in a thread, with real sockets."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest
import torch
from conftest import ASSETS
from hostile_files import png_claiming
from test_docs import ROOT, blocks

from prism_match import Matcher, Matches, UserError, cli, tiles
from prism_match.config import PRESETS
from prism_match.model.prism import PRISM
from prism_match.serve import ServeSettings, check_installed
from prism_match.serve.answers import JSON, NPZ, PNG, chosen
from prism_match.serve.app import Service, create_app
from prism_match.serve.batches import ModelThread
from prism_match.serve.pages import STATIC
from prism_match.serve.refusal import Refused
from prism_match.serve.requests import Sent
from prism_match.serve.run import make_server
from prism_match.serve.settings import listen
from prism_match.weights.store import export_weights

DOCS = ROOT / "docs" / "serve.md"


class Running:
    """A server, and a client of it."""

    def __init__(self, matcher: Matcher, settings: ServeSettings):
        listener = listen(settings.host, 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = create_app(matcher, settings)
        self.service = app.state.service
        self.server = make_server(app, settings)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self.client = httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def match(self, *images: bytes, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
        files = {f"image{n}": image for n, image in enumerate(images)}
        masks = {name: options.pop(name) for name in ("mask0", "mask1") if name in options}
        return self.client.post("/v1/match", files=files | masks, data=options, headers=headers)


@contextmanager
def serving(matcher: Matcher, **settings: Any) -> Iterator[Running]:
    running = Running(matcher, ServeSettings(**settings))
    running.thread.start()
    try:
        wait_for(lambda: running.server.started and running.service.model.ready, 60)
        yield running
    finally:
        running.client.close()
        running.server.should_exit = True
        running.thread.join(20)


def wait_for(condition: Callable[[], Any], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return Matcher(
        config=PRESETS["tiny"].replace(theta_c=0.0), device="cpu", precision="fp32", size=128,
        rotate="never", rescale="never",
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(matcher: Matcher) -> Iterator[Running]:
    with serving(matcher, batch=8, max_mib=1, max_megapixels=1, max_size=320) as running:
        yield running


class Held:
    """The model waits, with the jobs that it has, until it is let go."""

    def __init__(self) -> None:
        self.busy, self.go = threading.Event(), threading.Event()


def holding(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held, work = Held(), ModelThread._work

    def wait_and_work(self: ModelThread, jobs: Any) -> Any:
        held.busy.set()
        held.go.wait(20)
        return work(self, jobs)

    monkeypatch.setattr(ModelThread, "_work", wait_and_work)
    yield held
    held.go.set()
    wait_for(lambda: server.service.taken == 0)


@pytest.fixture
def held(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    yield from holding(server, monkeypatch)


def encoded(image: PIL.Image.Image, format: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, format)
    return file.getvalue()


def photo(seed: int = 0, width: int = 150, height: int = 120) -> bytes:
    """A part of the bundled photo, in colour, with a little noise, so that any two of them match."""
    with PIL.Image.open(ASSETS / "astronaut0.jpg") as image:
        pixels = np.asarray(image.crop((200, 60, 200 + width, 60 + height)))
    noise = np.random.default_rng(seed).normal(0, 4, pixels.shape)
    return encoded(PIL.Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)))


def picture(data: bytes) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(data))


def answered(response: httpx.Response) -> Matches:
    assert response.status_code == 200, response.text
    x = response.json()
    return Matches(x["keypoints0"], x["keypoints1"], x["scores"], tuple(x["size0"]), tuple(x["size1"]))


def same(a: Matches, b: Matches) -> None:
    assert len(a) == len(b) > 0 and (a.size0, a.size1) == (b.size0, b.size1)
    np.testing.assert_allclose(a.scores, b.scores, atol=1e-5)
    rows = [np.concatenate([m.keypoints0, m.keypoints1], axis=1) for m in (a, b)]
    rows = [r[np.lexsort(np.round(r[:, :2], 2).T)] for r in rows]  # equal scores may come in any order
    np.testing.assert_allclose(*rows, atol=1e-2)


def refused(response: httpx.Response, status: int, sentence: str) -> None:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    assert re.search(sentence, response.json()["error"]), response.text
    assert "\n" not in response.json()["error"] and len(response.json()["error"]) < 200


# What comes back


def test_a_pair_gets_the_matches_of_the_matcher(server: Running, matcher: Matcher) -> None:
    a, b = photo(0), encoded(picture(photo(1, 200, 90)), "JPEG")
    direct = matcher.match(picture(a), picture(b))
    response = server.match(a, b)
    same(answered(response), direct)
    assert response.headers["content-type"] == JSON and response.headers["cache-control"] == "no-store"
    seconds = response.json()["time"]
    assert set(seconds) == {"upload", "decode", "wait", "match", "total", "stages"}
    assert list(seconds["stages"]) == ["backbone", "MPMs", "matching", "refinement", "polish"]
    assert 0 < sum(seconds["stages"].values()) <= seconds["match"] <= seconds["total"]
    body = {"image0": base64.b64encode(a).decode(), "image1": base64.b64encode(b).decode()}
    same(answered(server.client.post("/v1/match", json=body)), direct)


def test_other_scales_are_tried_for_those_who_ask(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights hardly match."""
    monkeypatch.setattr(tiles, "match_at_other_scales", lambda matcher, pair, matches: matches.filter(top=3))
    a, b = photo(0), photo(1)
    for options, few in (({}, False), ({"rescale": "auto"}, True), ({"rescale": "never"}, False)):
        assert (len(answered(server.match(a, b, **options))) == 3) == few, options


def test_options_are_those_of_the_matcher(server: Running, matcher: Matcher) -> None:
    a, b = photo(0), photo(1)
    images = picture(a), picture(b)
    mask = np.zeros((120, 150), np.uint8)
    mask[:, 60:] = 255
    cases: list[tuple[dict[str, Any], Matches]] = [
        ({"size": 64}, matcher.adjusted(size=64).match(*images)),
        ({"threshold": 0.01}, matcher.adjusted(threshold=0.01).match(*images)),
        ({"rotate": "always"}, matcher.adjusted(rotate="always").match(*images)),
        ({"polish": "false"}, matcher.adjusted(polish=False).match(*images)),
        ({"max_matches": 7}, matcher.match(*images).filter(spread=7)),
        (
            {"mask0": encoded(PIL.Image.fromarray(mask))},
            matcher.match(*images, mask0=mask),
        ),
    ]
    plain = matcher.match(*images)
    for options, direct in cases:
        same(answered(server.match(a, b, **options)), direct)
    assert len(cases[4][1]) == 7 and len(cases[5][1]) < len(plain)
    geometry = server.match(a, b, geometry="homography", details="true").json()
    fit = plain.estimate("homography")
    assert geometry["geometry"]["model"] == "homography"
    assert len(geometry["geometry"]["inliers"]) == len(plain) and fit.matrix is not None
    kept = matcher.match(*images, details=True).details
    assert kept is not None
    np.testing.assert_array_equal(geometry["details"]["keep0"], kept.keep0)
    assert "previews" not in geometry and geometry["time"]["geometry"] > 0
    both = server.match(a, b, geometry="both", previews="true").json()
    assert [fit["model"] for fit in both["geometry"]] == ["homography", "fundamental"]
    for fit in both["geometry"]:
        assert sum(fit["inliers"]) == plain.estimate(fit["model"]).num_inliers
    previews = [np.asarray(picture(base64.b64decode(x))) for x in both["previews"]]
    np.testing.assert_array_equal(previews[0], np.asarray(images[0]))
    assert len(previews) == 2


def test_precisions(server: Running, matcher: Matcher, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = photo(0), photo(1)
    monkeypatch.setattr(type(matcher), "precisions", ["fp32", "bf16"])
    other = matcher.in_dtype(torch.bfloat16).match(picture(a), picture(b))
    plain = matcher.match(picture(a), picture(b))
    same(answered(server.match(a, b, precision="bf16")), other)
    same(answered(server.match(a, b, precision="fp32")), plain)
    same(answered(server.match(a, b)), plain)
    assert len(other) != len(plain) or np.abs(other.scores - plain.scores).max() > 1e-4
    refused(server.match(a, b, precision="fp16"), 422, "precision: the server offers fp32, bf16, not fp16")
    refused(server.match(a, b, precision="int8"), 422, "precision: input should be")
    # What was kept in one can be matched in another.
    key = server.client.post("/v1/features", files={"image": a}).json()["key"]
    kept = server.client.post("/v1/match", files={"image1": b}, data={"key0": key, "precision": "bf16"})
    assert len(answered(kept)) > 0
    server.client.delete(f"/v1/features/{key}")


def test_precisions_of_a_device(matcher: Matcher, monkeypatch: pytest.MonkeyPatch) -> None:
    for knows, offered in ((True, ["fp32", "bf16"]), (False, ["fp32"])):
        monkeypatch.setattr("prism_match.matcher.has_instructions", lambda _, knows=knows: knows)
        assert matcher.precisions == offered
    assert matcher.in_dtype(torch.float16).precisions == ["fp16", "fp32"]


def test_weights_that_have_changed_are_not_mixed(tmp_path: Path) -> None:
    config, file = PRESETS["tiny"], tmp_path / "mine.safetensors"

    def write(seed: int) -> None:
        torch.manual_seed(seed)
        export_weights(file, PRISM(config).state_dict(), config, {})

    write(0)
    matcher = Matcher(file, device="cpu", size=64)
    assert matcher.in_dtype(torch.bfloat16).model.dtype == torch.bfloat16
    write(1)
    with pytest.raises(UserError, match="the weights have changed since they were loaded"):
        matcher.in_dtype(torch.bfloat16)


def test_answers_as_accept_asks(server: Running, matcher: Matcher, tmp_path: Path) -> None:
    a, b = photo(0), photo(1)
    direct = matcher.match(picture(a), picture(b))
    response = server.match(a, b, headers={"Accept": NPZ}, geometry="fundamental")
    assert response.headers["content-type"] == NPZ
    file = tmp_path / "matches.npz"
    file.write_bytes(response.content)
    same(Matches.load(file), direct)
    assert len(np.load(file)["inliers"]) == len(direct)
    response = server.match(a, b, headers={"Accept": NPZ}, geometry="both")
    names = set(np.load(io.BytesIO(response.content)))
    assert {"homography_inliers", "homography_matrix", "fundamental_inliers"} <= names
    response = server.match(a, b, headers={"Accept": "image/*;q=0.9, text/html"})
    assert response.headers["content-type"] == PNG
    assert picture(response.content).width > 300
    refused(server.match(a, b, headers={"Accept": "text/html"}), 406, "none of them")


def test_accept() -> None:
    assert chosen(None) == chosen("") == chosen("*/*") == chosen("text/html, */*;q=0.1") == JSON
    assert chosen("image/png, */*;q=0.8") == chosen("*/*, image/png") == chosen("image/*") == PNG
    assert chosen("application/json;q=0, */*") == NPZ
    assert chosen("application/x-npz;q=0.5, image/png;q=0.6, application/json;q=nonsense") == PNG
    with pytest.raises(Refused):
        chosen("application/json;q=0")


def test_those_who_wait_are_matched_together(server: Running, held: Held) -> None:
    pairs = [(photo(n), photo(n + 1)) for n in range(4)]
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(server.match, photo(8), photo(9))
        wait_for(held.busy.is_set)
        others = [pool.submit(server.match, *pair) for pair in pairs]
        wait_for(lambda: server.service.model.waiting() == 4)
        held.go.set()
        together = [future.result() for future in others]
    assert first.result().json()["batch"] == 1
    assert [response.json()["batch"] for response in together] == [4] * 4
    for pair, response in zip(pairs, together, strict=True):
        same(answered(response), answered(server.match(*pair)))


def test_one_that_fails_does_not_take_the_others_along(
    server: Running, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    work = ModelThread._work

    def work_but_for_one(self: ModelThread, jobs: Any) -> Any:
        if any(image.size == (64, 64) for job in jobs for image in job.images):
            raise RuntimeError("secret of a client")
        return work(self, jobs)

    monkeypatch.setattr(ModelThread, "_work", work_but_for_one)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(server.match, photo(8), photo(9))
        wait_for(held.busy.is_set)
        bad = pool.submit(server.match, photo(0), photo(1, 64, 64))
        good = pool.submit(server.match, photo(0), photo(1))
        wait_for(lambda: server.service.model.waiting() == 2)
        held.go.set()
        refused(bad.result(), 500, "the matcher failed on this pair")
        assert good.result().status_code == first.result().status_code == 200
    assert "RuntimeError" in caplog.text and "secret" not in caplog.text


# Mistakes


@pytest.mark.parametrize(
    ("image1", "options", "status", "sentence"),
    [
        (b"%PDF-1.4 no image at all", {}, 415, "image1: not an image of a known format"),
        (b"", {}, 415, "image1: the file is empty"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n", {}, 415, "not an image"),
        (photo()[:3000], {}, 415, "image1: damaged image"),
        (photo()[:20], {}, 415, "image1"),
        (png_claiming(1200, 1200), {}, 413, "image1: 1200x1200 is 1.4 megapixels; at most 1 are allowed"),
        (png_claiming(60_000, 60_000), {}, 413, "image1: more than the 1 megapixels"),
        (photo(0, 20, 64), {}, 422, "image1: too small \\(20x64\\)"),
        (bytes(1_200_000), {}, 413, "the request is too large: at most 1 MiB"),
        (None, {}, 422, "image1 or key1 is missing"),
        (photo(), {"key1": "x"}, 422, "image1 and key1 were both sent"),
        (None, {"key1": "x"}, 404, "key1: no features are kept under this key"),
        (None, {"image1": "/etc/passwd"}, 422, "image1: must be a file; paths and URLs are never read"),
        (None, {"image1": "http://127.0.0.1/a.png"}, 422, "image1: must be a file; paths and URLs"),
        (photo(), {"size": "9000"}, 422, "size: at most 320 is allowed, not 9000"),
        (photo(), {"size": "big"}, 422, "size: input should be a valid integer"),
        (photo(), {"size": "-1"}, 422, "size: input should be greater than or equal to 32"),
        (photo(), {"threshold": "1"}, 422, "threshold: input should be less than 1"),
        (photo(), {"threshold": "nan"}, 422, "threshold: input should be"),
        (photo(), {"max_matches": "0"}, 422, "max_matches: input should be greater"),
        (photo(), {"rotate": "maybe"}, 422, "rotate: input should be 'auto', 'always' or 'never'"),
        (photo(), {"rescale": "always"}, 422, "rescale: input should be 'auto' or 'never'"),
        (photo(), {"weights": "/tmp/x"}, 422, "weights: no such option; there are key0"),
        (photo(), {"geometry": "x" * 2000}, 422, "the form cannot be read"),
        (photo(), {"mask1": photo(0, 64, 64)}, 422, "the mask is 64x64 but its image image1 is 150x120"),
        (photo(), {"mask1": b"nonsense"}, 415, "mask1: not an image"),
    ],
    ids=lambda x: str(x) if isinstance(x, int) else "",
)  # fmt: skip
def test_mistakes(server: Running, image1: bytes | None, options: Any, status: int, sentence: str) -> None:
    images = [photo()] if image1 is None else [photo(), image1]
    refused(server.match(*images, **options), status, sentence)


def test_mistakes_of_form(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    post = server.client.post
    refused(post("/v1/match", content=b"x", headers={"Content-Type": "text/plain"}), 415, "send multipart")
    refused(post("/v1/match"), 415, "send multipart")
    as_json = {"Content-Type": "application/json"}
    refused(post("/v1/match", content=b"{", headers=as_json), 422, "not valid JSON")
    refused(post("/v1/match", content=b"[" * 100_000, headers=as_json), 422, "not valid JSON")
    refused(post("/v1/match", json=["a.jpg"]), 422, "must be a JSON object")
    for path in ("/etc/passwd", "file:///etc/passwd", "http://127.0.0.1/a.png", 7, None, ["a"]):
        refused(post("/v1/match", json={"image0": path, "image1": path}), 422, "image0: .* in base64; paths")
    refused(post("/v1/match", json={"image0": "/tmp/abc", "image1": "/tmp/abc"}), 415, "not an image")
    broken = {"Content-Type": "multipart/form-data"}
    refused(post("/v1/match", content=b"x", headers=broken), 422, "the form cannot be read: Missing boundary")
    broken = {"Content-Type": "multipart/form-data; boundary=y"}
    refused(post("/v1/match", content=b"x", headers=broken), 422, "the form cannot be read")
    # A form that ends in the middle of its second file.
    text = b'--y\r\nContent-Disposition: form-data; name="image%d"; filename="a"\r\n\r\n'
    content = text % 0 + photo() + b"\r\n" + text % 1 + photo()[:2000]
    refused(post("/v1/match", content=content, headers=broken), 422, "image1 or key1 is missing")
    twice = [("image0", photo()), ("image0", photo())]
    refused(post("/v1/match", files=twice), 422, "image0: was sent twice")
    refused(post("/v1/match", files={"other": photo()}), 422, "other: no such file is expected")
    refused(post("/v1/features", data={"size": "64"}), 415, "send multipart")
    refused(post("/v1/features", json={"size": 64}), 422, "image is missing")
    refused(server.client.get("/v1/match"), 405, "does not take this method")
    refused(server.client.get("/../../etc/passwd"), 404, "nothing at this address")
    # Without a length, what comes is counted.
    endless = (text % 0 if n == 0 else bytes(50_000) for n in range(40))
    refused(post("/v1/match", content=endless, headers=broken), 413, "too large")
    assert server.service.taken == 0
    assert not [
        r for r in caplog.records if r.name.startswith(("python_multipart", "prism_match", "uvicorn"))
    ]


@pytest.mark.parametrize("size", [(40, 20_000), (20_000, 33), (32, 32)])
def test_odd_shapes(server: Running, size: tuple[int, int]) -> None:
    image = encoded(PIL.Image.effect_noise(size, 50))
    for headers in ({}, {"Accept": PNG}):
        assert server.match(photo(), image, headers=headers).status_code == 200


# One to many


def test_features_are_kept_under_a_key(server: Running, matcher: Matcher) -> None:
    a, others = photo(0), [photo(1), photo(2)]
    response = server.client.post("/v1/features", files={"image": a})
    assert response.status_code == 201
    kept = response.json()
    assert kept["size"] == [150, 120] and kept["bytes"] > 10_000 and kept["expires_in"] == 600
    for other in others:
        direct = matcher.match(picture(a), picture(other))
        response = server.client.post("/v1/match", files={"image1": other}, data={"key0": kept["key"]})
        same(answered(response), direct)
    mask = np.zeros((120, 150), np.uint8)
    mask[:60] = 1
    masked = server.client.post(
        "/v1/match",
        files={"image1": others[0], "mask0": encoded(PIL.Image.fromarray(mask))},
        data={"key0": kept["key"]},
    )
    same(answered(masked), matcher.match(picture(a), picture(others[0]), mask0=mask))
    png = server.client.post(
        "/v1/match", json={"key0": kept["key"], "key1": kept["key"]}, headers={"Accept": PNG}
    )
    assert picture(png.content).width > 300
    assert server.client.delete(f"/v1/features/{kept['key']}").status_code == 204
    refused(server.client.delete(f"/v1/features/{kept['key']}"), 404, "no features are kept")
    refused(
        server.client.post("/v1/match", json={"key0": kept["key"], "key1": "x"}), 404, "key0: no features"
    )
    assert server.service.kept.used == 0


def test_features_are_dropped_in_time_and_within_the_limit(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, now = server.service.kept, [0.0]
    monkeypatch.setattr(kept, "clock", lambda: now[0])

    def keep(seed: int) -> httpx.Response:
        return server.client.post("/v1/features", files={"image": photo(seed)})

    def known(key: str) -> bool:
        response = server.client.post("/v1/match", json={"key0": key, "key1": key})
        assert response.status_code in (200, 404)
        return response.status_code == 200

    first = keep(0).json()
    monkeypatch.setattr(kept, "limit", int(2.5 * first["bytes"]))
    second = keep(1).json()
    assert known(first["key"])
    third = keep(2).json()  # makes the second go, which was used least recently
    assert [known(x["key"]) for x in (first, second, third)] == [True, False, True]
    assert kept.used == 2 * first["bytes"] <= kept.limit
    monkeypatch.setattr(kept, "limit", first["bytes"] - 1)
    refused(keep(3), 413, "the features take .* so ask for a smaller size")
    now[0] = 599.0
    assert known(first["key"])
    now[0] = 600.0
    assert not known(first["key"]) and kept.used == 0


# Who may ask


def test_token(matcher: Matcher) -> None:
    with serving(matcher, token="a-secret", places=2) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic a-secret"}):
            response = server.match(photo(0), photo(1), headers=headers)
            refused(response, 401, "a token is needed, as 'Authorization: Bearer TOKEN'")
            assert response.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/info", "/metrics"):
                refused(server.client.get(path, headers=headers), 401, "a token is needed")
            refused(server.client.delete("/v1/features/x", headers=headers), 401, "a token is needed")
        right = {"Authorization": "Bearer a-secret", "Host": "photos.example"}
        assert server.match(photo(0), photo(1), headers=right).status_code == 200
        assert server.client.get("/v1/info", headers=right).status_code == 200
        for path in ("/", "/static/page.js", "/healthz", "/readyz", "/docs", "/openapi.json"):
            assert server.client.get(path).status_code == 200


def test_without_a_token_only_this_machine(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = photo(0), photo(1)
    refused(server.match(a, b, headers={"Host": "photos.example"}), 403, "answers to localhost only")
    for path in ("/v1/info", "/metrics"):  # what is no name, and no page, at all
        refused(server.client.get(path, headers={"Host": "[::1"}), 403, "answers to localhost only")
        refused(server.client.get(path, headers={"Origin": "http://[x"}), 403, "other sites")
    refused(server.match(a, b, headers={"Origin": "http://elsewhere.example"}), 403, "pages of other sites")
    for headers in ({"Origin": server.url}, {"Host": f"localhost:{server.port}"}, {"Host": "[::1]"}):
        assert server.match(a, b, headers=headers).status_code == 200
    for host in ("0.0.0.0", "192.0.2.1", "::"):
        with pytest.raises(UserError, match="so give a token: --token, or PRISM_TOKEN"):
            ServeSettings(host)
        ServeSettings(host, token="x")
    for host in ("localhost", "::1", "127.0.0.2"):
        ServeSettings(host)
    with pytest.raises(UserError, match="cannot listen there"):
        listen("127.0.0.1", server.port)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"places": 0}, "places must be above 0, not 0"),
        ({"batch": 0}, "batch must be at least 1, not 0"),
        ({"timeout": -1.0}, "timeout must be above 0"),
        ({"timeout": float("inf")}, "timeout must be finite"),
        ({"features_mib": float("inf")}, "features-mib must be finite"),
        ({"features_mib": -1.0}, "features-mib must be at least 0"),
        ({"port": 70_000}, "port must be from 0 to 65535"),
        ({"token": "two words"}, "the token must be of printable ASCII"),
    ],
)
def test_settings(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ServeSettings(**settings)


# Load, and those who leave


def test_full(server: Running, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = server.service.settings
    monkeypatch.setattr(server.service, "settings", ServeSettings(**vars(settings) | {"places": 2}))
    with ThreadPoolExecutor(2) as pool:
        taken = [pool.submit(server.match, photo(n), photo(n + 1)) for n in range(2)]
        wait_for(lambda: server.service.taken == 2)
        response = server.match(photo(0), photo(1))
        refused(response, 503, "all 2 places are taken: try again later")
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert server.client.get("/healthz").status_code == 200
        monkeypatch.setattr(server.service, "settings", settings)
        monkeypatch.setattr(server.service.model, "pace", 1000.0)
        response = server.match(photo(0), photo(1))
        refused(response, 503, "it would take longer than the 120 seconds allowed: try again later")
        assert response.headers["retry-after"] == "60"
        held.go.set()
        assert all(future.result().status_code == 200 for future in taken)
    assert server.match(photo(0), photo(1)).status_code == 200


def connect(server: Running, body: bytes, length: int | None = None) -> socket.socket:
    """Sends a form of which `length` bytes were promised."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/match HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length or len(body)}\r\n"
    connection.sendall(f"{head}Content-Type: multipart/form-data; boundary=y\r\n\r\n".encode() + body)
    return connection


def form(*images: bytes) -> bytes:
    head = b'--y\r\nContent-Disposition: form-data; name="image%d"; filename="a"\r\n\r\n'
    return b"".join(head % n + image + b"\r\n" for n, image in enumerate(images)) + b"--y--\r\n"


def test_a_client_that_goes_away_frees_its_place(server: Running, held: Held) -> None:
    service = server.service
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.match, photo(0), photo(1))
        wait_for(held.busy.is_set)
        batches = service.metrics.batches._sum.get
        leaving = connect(server, form(photo(2), photo(3)))
        wait_for(lambda: service.model.waiting() == 1)
        leaving.close()
        wait_for(lambda: service.taken == 1)
        # Its photos do not wait for the model either: many who come and go would fill the memory.
        assert service.model.waiting() == 0
        done = batches()
        held.go.set()
        assert first.result().status_code == 200
    assert server.match(photo(0), photo(1)).status_code == 200
    wait_for(lambda: batches() == done + 2)  # the two who stayed, and not the one who left


def test_a_client_that_goes_away_leaves_nothing_to_be_decoded(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sent is not held while all threads are busy with the photos of others."""
    service, sent, go = server.service, [], threading.Event()
    of = Service.match

    def seen(self: Service, what: Sent, *rest: Any) -> Any:
        sent.append(what)
        return of(self, what, *rest)

    monkeypatch.setattr(Service, "match", seen)
    for _ in range(service.settings.decoders):
        service.pool.submit(go.wait, 20)
    try:
        leaving = connect(server, form(photo(2), photo(3)))
        wait_for(lambda: sent)
        assert len(sent[0].files) == 2
        leaving.close()
        wait_for(lambda: service.taken == 0)
        assert not sent[0].files
    finally:
        go.set()


def test_a_truncated_upload_frees_its_place(server: Running) -> None:
    body = form(photo(0), photo(1))
    connection = connect(server, body[: len(body) // 2], len(body))
    wait_for(lambda: server.service.taken == 1)
    connection.close()
    wait_for(lambda: server.service.taken == 0)


def test_time_is_limited(server: Running, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = server.service.settings
    monkeypatch.setattr(server.service, "settings", ServeSettings(**vars(settings) | {"timeout": 0.5}))
    refused(server.match(photo(0), photo(1)), 504, "longer than the 0.5 seconds allowed")
    connection = connect(server, b"--y\r\n", 1000)
    answer = b""
    while b"}" not in answer:
        answer += connection.recv(4096)
    assert b"408" in answer.split(b"\r\n")[0] and b"did not arrive within 0.5 seconds" in answer
    connection.close()
    assert server.service.taken == 0


def test_sigterm_finishes_what_has_begun() -> None:
    command = [sys.executable, "-m", "prism_match", "serve", "--port", "0", "--model-config", "tiny"]
    process = subprocess.Popen(
        [*command, "--size", "384", "--rotate", "always", "--threshold", "0", "--device", "cpu"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = re.search(r"http://\S+", process.stdout.readline())[0]  # type: ignore[index]
        image = (ASSETS / "astronaut0.jpg").read_bytes()
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client, ThreadPoolExecutor(1) as pool:
            files = {"image0": ("holiday.jpg", image), "image1": ("holiday.jpg", image)}
            running = pool.submit(client.post, "/v1/match", files=files)
            metrics = httpx.Client(base_url=url, trust_env=False)
            wait_for(lambda: "prism_places_taken 1.0" in metrics.get("/metrics").text)
            process.send_signal(signal.SIGTERM)

            def is_closed() -> bool:
                try:
                    return metrics.get("/readyz").status_code == 503
                except httpx.TransportError:
                    return True

            wait_for(is_closed)
            assert running.result().status_code == 200 and len(running.result().json()["scores"]) > 0
            metrics.close()
        out, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors and "holiday" not in out + errors and "/v1/match" not in out + errors


# Around it


def test_pages_and_what_they_list(server: Running) -> None:
    page = server.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    outside = set(re.findall(r"https?://[\w.:]+", page.text)) - {"http://127.0.0.1:8000"}
    assert not outside and "<script" not in page.text, "no request leaves the machine"
    schema = server.client.get("/openapi.json").json()
    for path, methods in schema["paths"].items():
        for method in methods:
            assert method == "delete" or f"{method.upper()} {path}" in page.text
    match = schema["paths"]["/v1/match"]["post"]
    assert match["requestBody"]["content"][JSON]["example"]["geometry"] == "homography"
    assert set(match["responses"]["200"]["content"]) == {JSON, NPZ, PNG}
    assert {"401", "413", "415", "422", "503", "504"} <= set(match["responses"])
    for option in match["requestBody"]["content"]["multipart/form-data"]["schema"]["properties"]:
        assert f"<code>{option}</code>" in page.text and f"`{option}`" in DOCS.read_text()
    assert (STATIC / "docs.html").is_file()


def test_the_page_is_made_of_files_of_ours(server: Running) -> None:
    page = server.client.get("/")
    assert page.headers["content-type"].startswith("text/html") and "<title>prism-match</title>" in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", page.text), (
        "which the policy forbids"
    )
    for file in STATIC.iterdir():
        part = server.client.get(f"/static/{file.name}")
        assert part.content == file.read_bytes() and part.headers["x-content-type-options"] == "nosniff"
        addresses = set(re.findall(r"https?://[\w.:]+", part.text))
        assert addresses <= {"http://www.w3.org", "http://127.0.0.1:8000"}, "no request leaves the machine"
    assert server.client.get("/static/page.js").headers["content-type"].startswith("text/javascript")
    for pair in server.client.get("/v1/info").json()["examples"]:
        for url in pair["images"]:
            assert picture(server.client.get(url).content).format == "JPEG"
    for path in (
        "/static/../app.py",
        "/static/app.py",
        "/static/",
        "/examples/README.md",
        "/examples/%2e%2e/x",
    ):
        assert server.client.get(path).status_code == 404


def test_info_and_metrics(server: Running) -> None:
    info = server.client.get("/v1/info").json()
    assert info["device"] == "cpu" and info["weights"]["trained"] is False
    assert info["defaults"] == {
        "size": 128,
        "threshold": 0.0,
        "rotate": "never",
        "rescale": "never",
        "polish": True,
    }
    assert info["precisions"][0] == "fp32" and info["examples"][0]["name"] == "astronaut"
    assert info["limits"]["bytes"] == 2**20 and info["limits"]["pixels"] == 10**6
    assert str(ROOT) not in json.dumps(info)
    before = server.client.get("/metrics").text
    server.match(photo(0), photo(1))
    after = server.client.get("/metrics").text
    counter = r'prism_requests_total\{endpoint="match",status="200"\} (\S+)'
    counts = [float((re.search(counter, text) or [0, 0])[1]) for text in (before, after)]
    assert counts[1] == counts[0] + 1
    assert "process_resident_memory_bytes" in after and "prism_kept_bytes" in after


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(UserError, match='fastapi: pip install "prism-match\\[serve\\]"'):
        check_installed()
    monkeypatch.setattr(sys, "argv", ["prism", "serve"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_nothing_else_needs_the_extra() -> None:
    code = (
        "import sys, prism_match.cli, prism_match.engine, prism_match.serve; "
        "assert not {'fastapi', 'uvicorn', 'pydantic', 'prometheus_client'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_examples_of_the_page_run(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jpg").write_bytes(photo(0))
    (tmp_path / "b.jpg").write_bytes(photo(1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "*")
    here = "http://127.0.0.1:8000", server.url
    for block in blocks(DOCS, "python"):
        exec(compile(block.replace(*here), str(DOCS), "exec"), {})
    assert len(Matches.load("matches.npz")) > 0
    if shutil.which("curl") is None:
        pytest.skip("curl is not here")
    for block in blocks(DOCS, "bash"):
        done = subprocess.run(["bash", "-e", "-c", block.replace(*here)], capture_output=True, text=True)
        assert done.returncode == 0 and "error" not in done.stdout, done.stdout + done.stderr
    assert picture(Path("matches.png").read_bytes()).width > 300
