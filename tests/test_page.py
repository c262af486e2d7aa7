"""The page of `prism serve`, in a real browser: what is drawn, what is asked of the server and what is not,
what is saved, and the words for what goes wrong. Where there is no Chromium these are skipped."""

from __future__ import annotations

import base64
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import PIL.Image
import pytest
from browser_for_tests import open_browser
from conftest import ASSETS
from hostile_files import png_claiming
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select
from test_serve import Held, Running, encoded, holding, photo, picture, same, serving, wait_for

from prism_match import Matcher, Matches, UserError, cli
from prism_match.config import PRESETS
from prism_match.images import ORIENTATION
from prism_match.serve import ServeSettings, run, serve
from prism_match.serve.run import make_server
from prism_match.serve.settings import listen

PAIR = [ASSETS / f"astronaut{n}.jpg" for n in (0, 1)]


class Page:
    """The page of one server, as one browser shows it."""

    def __init__(self, driver: webdriver.Chrome, url: str, downloads: Path):
        self.driver, self.url, self.downloads = driver, url, downloads
        self.asked: list[tuple[str, str]] = []

    def open(self) -> Page:
        self.driver.get(self.url)
        wait_for(lambda: self.get("size").get_attribute("value"))
        return self

    def get(self, name: str) -> WebElement:
        return self.driver.find_element("id", name)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def drawn(self) -> str:
        """The canvas, once what has changed is drawn."""
        return self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => "
            "done(document.getElementById('canvas').toDataURL())));"
        )

    def set(self, name: str, value: float) -> None:
        self.run(
            "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('input', {bubbles: true}));",
            name,
            value,
        )

    def choose(self, *files: Path) -> None:
        for n, file in enumerate(files):
            self.one(f"#slot{n} input").send_keys(str(file))
            wait_for(lambda n=n, file=file: file.name in self.one(f"#slot{n} .name").text or self.error)

    def match(self) -> str:
        """What the status says in the end."""
        self.get("match").click()
        return self.finished()

    def finished(self) -> str:
        wait_for(lambda: not self.get("cancel").is_displayed(), 60)
        return self.get("status").text

    @property
    def error(self) -> str:
        return self.get("error").text

    def requests(self) -> list[tuple[str, str]]:
        """Since the last time: methods and addresses."""
        events = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        sent = (e["params"]["request"] for e in events if e["method"] == "Network.requestWillBeSent")
        new = [(request["method"], request["url"]) for request in sent]
        self.asked += new
        return new

    def saved(self, kind: str) -> Path:
        for old in self.downloads.iterdir():
            old.unlink()
        self.one(f'[data-save="{kind}"]').click()
        file = self.downloads / f"matches.{kind}"
        wait_for(file.is_file)
        return file

    def emulate(self, command: str, **options: Any) -> None:
        self.driver.execute_cdp_cmd(f"Emulation.{command}", options)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    folder = tmp_path_factory.mktemp("browser")
    driver = open_browser(folder, "--window-size=1440,1000", "--force-device-scale-factor=1")
    driver.downloads = folder / "downloads"
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return Matcher(device="cpu", size=192)


@pytest.fixture(scope="module")
def server(driver: webdriver.Chrome, matcher: Matcher) -> Iterator[Running]:
    with serving(matcher, max_mib=1, max_megapixels=1) as running:
        yield running


@pytest.fixture(scope="module")
def loaded(driver: webdriver.Chrome, server: Running) -> Page:
    return Page(driver, server.url, driver.downloads)


@pytest.fixture
def page(loaded: Page) -> Iterator[Page]:
    """No test ends with an error in the console, or with a request to anywhere else."""
    yield loaded
    loaded.requests()
    addresses = [urlsplit(url) for _, url in loaded.asked]
    # The others are photos in memory, and the browser's own first tab.
    assert {x.hostname for x in addresses if x.scheme not in ("blob", "data", "chrome")} <= {"127.0.0.1"}
    # What the server refuses the browser tells of, too; that is no error of the page.
    problems = [x["message"] for x in loaded.driver.get_log("browser") if x["level"] == "SEVERE"]
    assert not [x for x in problems if "the server responded with a status of" not in x]


@pytest.fixture(scope="module")
def first(loaded: Page) -> Page:
    """A page that shows the matches of the bundled pair."""
    loaded.open()
    before = loaded.drawn()
    loaded.choose(*PAIR)
    photos = loaded.drawn()
    assert "matches in" in loaded.match()
    assert len({before, photos, loaded.drawn()}) == 3
    return loaded


@pytest.fixture
def shown(first: Page, page: Page) -> Page:
    page.requests()
    return page


@pytest.fixture(scope="module")
def direct(matcher: Matcher) -> Matches:
    return matcher.match(*PAIR, details=True)


@pytest.fixture
def held(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    yield from holding(server, monkeypatch)


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", text)]


# One pair


def test_display_options_act_at_once_and_ask_nothing_of_the_server(shown: Page, direct: Matches) -> None:
    total = len(direct)
    assert f"{total} matches in" in shown.get("status").text.replace(",", "")
    assert numbers(shown.get("status").text.partition("same place: ")[2])[0] > 90
    assert shown.get("most-value").text == f"{min(150, total)} of {total}"
    pictures: set[str] = set()

    def changed(words: str) -> None:
        drawn = shown.drawn()
        assert drawn not in pictures, words
        pictures.add(drawn)

    shown.set("most", total)
    shown.get("least").send_keys(Keys.ARROW_RIGHT * 30)
    least = float(shown.get("least").get_attribute("value"))
    number = int((direct.scores >= least).sum())
    assert least == pytest.approx(0.5) and shown.get("most-value").text == f"{number} of {total}"
    assert 0 < number < total
    changed("least confidence")
    shown.set("most", 9)
    assert shown.get("count-shown").text == "9"
    changed("fewer")
    for name in ("palette", "lines", "points"):
        shown.get(name).click()
        changed(name)
    for name in ("points", "lines", "palette"):
        shown.get(name).click()
    shown.set("least", 0)
    shown.set("most", total)
    shown.drawn()
    for model in ("homography", "fundamental"):
        shown.one(f'[value="{model}"]').click()
        inliers = int(shown.get(f"count-{model}").text)
        assert inliers == direct.estimate(model).num_inliers
        assert shown.get("most-value").text == f"{inliers} of {total}"
        changed(model)
    shown.one('[name="inliers"][value="all"]').click()
    assert not [url for _, url in shown.requests() if "/v1/" in url]


def test_pruning_is_shown_mpm_by_mpm(shown: Page, direct: Matches) -> None:
    plain, details = shown.drawn(), direct.details
    assert details is not None
    shown.get("masks").click()
    pictures = {plain}
    for layer in range(1, len(details.keep0) + 1):
        shown.set("layer", layer)
        kept = [round(100 * keep[layer - 1].mean()) for keep in (details.keep0, details.keep1)]
        assert numbers(shown.get("kept").text) == pytest.approx(kept, abs=1)
        pictures.add(shown.drawn())
    assert len(pictures) > 2
    shown.get("masks").click()
    assert shown.drawn() == plain
    assert not [url for _, url in shown.requests() if "/v1/" in url]


def test_a_flat_scene_is_laid_on_the_other(shown: Page) -> None:
    plain = shown.drawn()
    assert numbers(shown.get("flat-words").text)[0] > 60
    shown.get("overlay").click()
    for name in ("points", "lines"):
        shown.get(name).click()
    ends = []
    for blend in (0, 100):
        shown.set("blend", blend)
        shown.drawn()
        # The middle, where both photos are: what is on top differs, what is seen does not.
        pixels = shown.run(
            "const c = document.getElementById('canvas'), s = 120;"
            "return Array.from(c.getContext('2d').getImageData("
            "(c.width - s) / 2, (c.height - s) / 2, s, s).data)"
        )
        ends.append(np.array(pixels, float).reshape(120, 120, 4)[..., :3].mean(axis=2))
    assert np.abs(ends[0] - ends[1]).max() > 0
    assert np.corrcoef(ends[0].ravel(), ends[1].ravel())[0, 1] > 0.9
    shown.get("blink").click()
    assert shown.get("blend").get_attribute("value") == "0"
    for name in ("overlay", "points", "lines"):
        shown.get(name).click()
    assert shown.drawn() == plain


def test_the_mouse_on_a_point_shows_its_partner(shown: Page, direct: Matches) -> None:
    plain, canvas = shown.drawn(), shown.get("canvas")
    for n in range(60):
        x, y = -300 + 37 * (n % 16), -100 + 43 * (n // 16)
        ActionChains(shown.driver, duration=0).move_to_element_with_offset(canvas, x, y).perform()
        if shown.get("tip").is_displayed():
            break
    assert shown.drawn() != plain
    check_tip(shown, direct)
    ActionChains(shown.driver, duration=0).move_to_element(shown.get("match")).perform()
    assert not shown.get("tip").is_displayed() and shown.drawn() == plain


def check_tip(page: Page, direct: Matches) -> None:
    x0, y0, x1, y1, score = numbers(page.get("tip").get_attribute("textContent"))
    rows = np.column_stack([direct.keypoints0, direct.keypoints1, direct.scores])
    assert np.abs(rows - [x0, y0, x1, y1, score]).max(axis=1).min() < 0.1


def test_zoom_and_pan(shown: Page, direct: Matches) -> None:
    canvas, plain = shown.get("canvas"), shown.drawn()
    seen = [plain]

    def changed() -> None:
        seen.append(shown.drawn())
        assert len(set(seen)) == len(seen)

    ActionChains(shown.driver, duration=0).scroll_from_origin(
        ScrollOrigin.from_element(canvas), 0, -300
    ).perform()
    wait_for(lambda: "zoomed" in canvas.get_attribute("class"))
    changed()
    ActionChains(shown.driver, duration=50).drag_and_drop_by_offset(canvas, 120, -60).perform()
    changed()
    for keys in ("+", "-" * 2, Keys.ARROW_LEFT, Keys.ARROW_UP):
        canvas.send_keys(keys)
        changed()
    shown.get("zoom-in").click()
    changed()
    shown.get("zoom-fit").click()
    assert shown.drawn() == plain and "zoomed" not in canvas.get_attribute("class")
    canvas.send_keys("n")
    best = shown.get("spoken").get_attribute("textContent")
    check_tip(shown, direct)
    canvas.send_keys("n")
    assert shown.get("spoken").get_attribute("textContent") != best
    canvas.send_keys("p")
    assert shown.get("spoken").get_attribute("textContent") == best
    canvas.send_keys(Keys.ESCAPE)
    assert shown.drawn() == plain


def test_what_is_saved_is_read_again(shown: Page, direct: Matches) -> None:
    for kind in ("npz", "json", "csv"):
        matches = Matches.load(shown.saved(kind))
        same(matches, direct)
        assert (matches.name0, matches.name1) == ("astronaut0.jpg", "astronaut1.jpg")
        if kind != "csv":
            assert matches.details is not None and direct.details is not None
            np.testing.assert_array_equal(matches.details.keep1, direct.details.keep1)
    with np.load(shown.saved("npz")) as arrays:
        assert arrays["homography_matrix"].shape == (3, 3)
        assert arrays["fundamental_inliers"].sum() == direct.estimate("fundamental").num_inliers
    shown.one('[value="shown"]').click()
    shown.set("most", 30)
    assert len(Matches.load(shown.saved("csv"))) == 30
    shown.one('[name="extent"][value="all"]').click()
    with PIL.Image.open(shown.saved("png")) as image:
        assert max(image.size) == 1800 and image.format == "PNG"
    assert not [url for _, url in shown.requests() if "/v1/" in url]


def test_the_time_is_told_by_stages(shown: Page) -> None:
    names = [x.text for x in shown.driver.find_elements("css selector", "#times dt")]
    stages = ["backbone", "MPMs", "matching", "refinement", "polish"]
    assert names == ["upload", "decode", "wait", *stages, "other", "geometry", "answer", "in all"]
    assert all(re.fullmatch(r"[\d.]+ m?s", x.text) for x in shown.driver.find_elements("css selector", "dd"))


# Every way in


def test_photos_are_dropped_and_pasted(page: Page) -> None:
    page.open()
    for n, event in enumerate(("drop", "paste")):
        page.run(
            "const bytes = Uint8Array.from(atob(arguments[0]), c => c.charCodeAt(0));"
            "const data = new DataTransfer(), kind = arguments[1];"
            "data.items.add(new File([bytes], kind, {type: 'image/png'}));"
            "const event = kind === 'drop' ? new DragEvent('drop', {dataTransfer: data, bubbles: true})"
            ": new ClipboardEvent('paste', {clipboardData: data, bubbles: true});"
            "document.body.dispatchEvent(event);",
            base64.b64encode(photo(n)).decode(),
            event,
        )
        wait_for(lambda n=n, event=event: event in page.one(f"#slot{n} .name").text)
    page.get("swap").click()
    assert "paste" in page.one("#slot0 .name").text and "150" in page.one("#slot1 .name").text
    assert "matches in" in page.match()
    page.one("#slot0 .clear").click()  # what was matched is no longer what is there
    assert not page.get("match").is_enabled() and not page.get("least").is_enabled()


def test_what_the_browser_cannot_show_the_server_does(page: Page, tmp_path: Path) -> None:
    """TIFF, which it does not know, and a WebP on its side, which it does not turn."""
    files = [tmp_path / "scan.tiff", tmp_path / "turned.webp"]
    files[0].write_bytes(encoded(picture(photo(0)), "TIFF"))
    exif = PIL.Image.Exif()
    exif[ORIENTATION] = 6
    picture(photo(1)).rotate(90, expand=True).save(files[1], quality=95, exif=exif)
    page.open().choose(*files)
    for n in (0, 1):
        assert "shown once it is matched" in page.one(f"#slot{n}").text
    assert "matches in" in page.match()
    shown = []
    for n in (0, 1):
        assert "150 × 120" in page.one(f"#slot{n} .name").text
        data = page.run(f"return document.querySelector('#slot{n} canvas').toDataURL()").partition(",")[2]
        shown.append(np.asarray(picture(base64.b64decode(data)).convert("L"), float).ravel())
    assert np.corrcoef(*shown)[0, 1] > 0.9


def test_keyboard_alone(page: Page, direct: Matches) -> None:
    page.open()
    assert page.get("examples").text.splitlines()[0] == "Example: astronaut"

    def tab_to(selector: str) -> None:
        for _ in range(40):
            ActionChains(page.driver, duration=0).send_keys(Keys.TAB).perform()
            if page.run("return document.activeElement.matches(arguments[0])", selector):
                return
        raise AssertionError(f"the focus never came to {selector}")

    tab_to("#examples button")
    assert page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    ActionChains(page.driver).send_keys(Keys.ENTER).perform()
    wait_for(lambda: "Matching" in page.get("status").text or "matches" in page.get("status").text)
    assert f"{len(direct)} matches in" in page.finished().replace(",", "")
    tab_to("#canvas")
    ActionChains(page.driver).send_keys("n").perform()
    check_tip(page, direct)
    tab_to("#least")
    before = page.drawn()
    ActionChains(page.driver).send_keys(Keys.END).perform()
    assert page.drawn() != before and page.get("count-shown").text == "0"
    tab_to("#masks")
    ActionChains(page.driver).send_keys(Keys.SPACE).perform()
    assert page.get("masks").is_selected()
    nameless = page.run(
        "return [...document.querySelectorAll('input, select, button, canvas')].filter(e => !e.labels?.length"
        " && !e.matches('[aria-label], [aria-hidden]') && !e.textContent.trim()).map(e => e.outerHTML)"
    )
    assert not nameless


# What goes wrong


def test_errors_in_words(
    page: Page, server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, notes, lie = tmp_path / "good.png", tmp_path / "notes.txt", tmp_path / "lie.jpg"
    good.write_bytes(photo(0))
    notes.write_text("no image at all")
    lie.write_text("no image at all")
    large, heavy = tmp_path / "large.png", tmp_path / "heavy.png"
    large.write_bytes(png_claiming(5000, 4000))
    heavy.write_bytes(bytes(2**20 + 1))
    page.open().choose(good, notes)
    assert page.error == "notes.txt is not an image. JPEG, PNG, WEBP, TIFF, BMP, PPM, GIF are taken."
    assert not page.get("match").is_enabled()
    page.choose(good, lie)
    assert page.match() == "No result."
    assert page.error.startswith("Second photo (lie.jpg): not an image of a known format (JPEG, ")
    page.choose(good, large)
    page.match()
    assert "Second photo (large.png): 5000x4000 is 20.0 megapixels; at most 1 are allowed. Noth" in page.error
    page.choose(good, heavy)
    assert re.match(r"heavy.png has 1(\.0)? MiB; this server takes at most 1 MiB for both", page.error)
    half = tmp_path / "half.bmp"
    half.write_bytes(encoded(PIL.Image.effect_noise((900, 700), 50), "BMP"))
    page.choose(half, half)
    page.match()
    assert page.error.startswith("The photos have 1.2 MiB together; this server takes at most 1 MiB.")
    page.choose(good, good)
    with monkeypatch.context() as full:
        full.setattr(server.service, "taken", server.service.settings.places)
        page.match()
    assert re.fullmatch(
        r"All 32 places are taken: try again later\. In about \d+ s it may be free\.", page.error
    )
    page.run("window.fetch = () => Promise.reject(new TypeError('failed'))")
    page.match()
    assert page.error == "The server does not answer: is it still running?"


def test_nothing_in_common(page: Page, tmp_path: Path) -> None:
    files = [tmp_path / f"noise{n}.png" for n in (0, 1)]
    for n, file in enumerate(files):
        values = np.random.default_rng(n).integers(0, 255, (64, 64), dtype=np.uint8)
        file.write_bytes(encoded(PIL.Image.fromarray(values)))
    page.open().choose(*files)
    assert page.match().startswith("No matches: ")
    assert page.get("count-homography").text == "none fits" and not page.get("overlay").is_enabled()
    for kind in ("npz", "json", "csv"):
        assert len(Matches.load(page.saved(kind))) == 0


def test_a_second_match_cancels_the_first(page: Page, server: Running, held: Held, tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.png" for n in (0, 1)]
    for n, file in enumerate(files):
        file.write_bytes(photo(n))
    page.open().choose(*files)
    page.get("match").click()
    wait_for(held.busy.is_set)
    page.get("match").click()  # the first one is with the model, and is not waited for
    model = server.service.model
    wait_for(lambda: model.waiting() == 1 and server.service.taken == 1)
    second = list(model._jobs)
    page.get("match").click()  # and takes the place of the second
    wait_for(lambda: model.waiting() == 1 and model._jobs[0] is not second[0] and server.service.taken == 1)
    page.get("cancel").click()
    wait_for(lambda: server.service.taken == 0 and model.waiting() == 0)
    assert page.finished() == "Cancelled." and not page.error
    page.get("match").click()
    held.go.set()
    assert "matches in" in page.finished()


def test_a_token_is_asked_for(page: Page, matcher: Matcher) -> None:
    tiny = Matcher(config=PRESETS["tiny"], device="cpu", rescale="never", size=64)
    with serving(tiny, token="a-secret") as other:
        page.driver.get(other.url)
        wait_for(lambda: page.get("token").is_displayed())
        page.get("token").send_keys("wrong", Keys.ENTER)
        wait_for(lambda: page.error == "That is not the server's token.")
        page.get("token").send_keys("a-secret", Keys.ENTER)
        wait_for(lambda: not page.get("token").is_displayed())
        assert "untrained" in page.get("server").text and not page.error
        kept = page.run("return [JSON.stringify(localStorage), document.cookie, location.href]")
        assert "a-secret" not in "".join(kept)
        page.driver.refresh()
        wait_for(lambda: page.get("size").get_attribute("value"))


# Where it is shown


def test_on_a_phone(page: Page, tmp_path: Path) -> None:
    page.emulate("setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=3, mobile=True)
    page.emulate("setTouchEmulationEnabled", enabled=True)
    try:
        page.open()
        assert page.run("return document.documentElement.scrollWidth") <= 390
        assert page.one("#slot0 .camera").is_displayed()
        camera = page.one("#slot1 .camera input")
        assert camera.get_attribute("capture") == "environment"
        (tmp_path / "a.png").write_bytes(photo(0))
        (tmp_path / "b.png").write_bytes(photo(1))
        page.choose(tmp_path / "a.png")
        camera.send_keys(str(tmp_path / "b.png"))
        wait_for(lambda: page.get("match").is_enabled())
        assert "matches in" in page.match()
        assert page.run("return document.documentElement.scrollWidth") <= 390
        small = page.run(
            "return [...document.querySelectorAll('button, select, .button')].filter(e => e.offsetParent &&"
            " e.getBoundingClientRect().height < 36).map(e => e.outerHTML)"
        )
        assert not small, "too small for a finger"
        plain = page.drawn()
        page.run("document.getElementById('canvas').scrollIntoView({block: 'center'})")
        box = page.run("return document.getElementById('canvas').getBoundingClientRect().toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind, apart in (("touchStart", 30), ("touchMove", 60), ("touchMove", 90), ("touchEnd", None)):
            points = (
                []
                if apart is None
                else [{"x": x - apart, "y": y, "id": 0}, {"x": x + apart, "y": y, "id": 1}]
            )
            page.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        assert page.drawn() != plain and "zoomed" in page.get("canvas").get_attribute("class")
    finally:
        page.emulate("clearDeviceMetricsOverride")
        page.emulate("setTouchEmulationEnabled", enabled=False)


def test_dark_and_light(page: Page) -> None:
    def ground() -> float:
        colour = page.run("return getComputedStyle(document.body).backgroundColor")
        return sum(numbers(colour)[:3])

    def prefer(scheme: str) -> None:
        page.emulate("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    page.open()
    try:
        prefer("light")
        assert ground() > 600
        prefer("dark")
        assert ground() < 150
        Select(page.get("theme")).select_by_value("light")
        assert ground() > 600
        page.open()
        assert ground() > 600 and page.get("theme").get_attribute("value") == "light"
        prefer("light")
        Select(page.get("theme")).select_by_value("dark")
        assert ground() < 150
        Select(page.get("theme")).select_by_value("auto")
        assert ground() > 600
    finally:
        page.emulate("setEmulatedMedia", features=[])


# The command


def test_prism_app_opens_the_browser_at_a_free_port(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny, servers, opened = Matcher(config=PRESETS["tiny"], device="cpu", rescale="never", size=64), [], []
    monkeypatch.setattr(run, "make_server", lambda *x: servers.append(make_server(*x)) or servers[0])
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url))  # which tells that it failed
    with listen("127.0.0.1", 0) as taken:
        settings = ServeSettings(port=taken.getsockname()[1])
        with pytest.raises(UserError, match="cannot listen there"):
            serve(tiny, settings)
        thread = threading.Thread(
            target=serve, args=(tiny, settings), kwargs={"any_port": True, "browser": True}
        )
        thread.start()
        try:
            wait_for(lambda: servers and servers[0].started and opened)
            assert httpx.get(opened[0], trust_env=False).text.startswith("<!doctype html>")
            assert urlsplit(opened[0]).port != settings.port
        finally:
            servers[0].should_exit = True
            thread.join(20)
    out = capsys.readouterr().out
    assert f"listening on {opened[0]} (" in out and f"no browser could be opened: open {opened[0]} in" in out


@pytest.mark.parametrize(
    ("options", "port", "any_port", "browser"),
    [([], 8000, True, True), (["--no-browser", "--port", "9000"], 9000, False, False)],
)
def test_options_of_prism_app(
    monkeypatch: pytest.MonkeyPatch, options: list[str], port: int, any_port: bool, browser: bool
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        "prism_match.serve.serve", lambda matcher, settings, **x: asked.update(x, settings=settings)
    )
    monkeypatch.setattr(sys, "argv", ["prism", "app", "--model-config", "tiny", "--device", "cpu", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert asked == {"settings": ServeSettings(port=port), "any_port": any_port, "browser": browser}
