"""A Chromium without a window, that fetches nothing by itself. Tests that need one are skipped where there is
none, with a line that says how to get it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from selenium import webdriver

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def open_browser(folder: Path, *flags: str) -> webdriver.Chrome:
    """folder: an empty one for its profile and for what it downloads."""
    options = webdriver.ChromeOptions()
    options.binary_location = find("chromium", "chromium-browser", "google-chrome")
    for flag in (*FLAGS, *flags, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"download.default_directory": str(folder / "downloads")})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    (folder / "downloads").mkdir()
    driver = webdriver.Chrome(options, webdriver.ChromeService(find("chromedriver")))
    driver.set_page_load_timeout(60)
    return driver


def find(*names: str) -> str:
    """Only what is installed: selenium would download the rest."""
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.skip(f"no {names[0]} here: apt-get install chromium chromium-driver")
