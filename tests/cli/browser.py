"""A real browser without a window, for the pages that braid writes: Debian's chromium, driven by selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def chromium(*, dark: bool = False, size: tuple[int, int] = (1280, 1600)) -> Iterator[Any]:
    """The driver of a browser. Without one, the test is skipped with the packages to install."""
    selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    options.add_argument(f"--window-size={size[0]},{size[1]}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    try:
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
        yield browser
    finally:
        browser.quit()


def pixels(browser: Any, selector: str) -> set[tuple[int, ...]]:
    """The colours of a canvas."""
    script = """
    const canvas = document.querySelector(arguments[0]), found = new Set();
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) found.add(data.slice(i, i + 3).join());
    return [...found];
    """
    return {tuple(map(int, each.split(","))) for each in browser.execute_script(script, selector)}
