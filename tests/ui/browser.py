"""A real Chromium, driven by playwright: the system's own, since playwright's build cannot be had everywhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from tests.real.child import Deadline
from tests.ui.live import KEY

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 20_000.0  # milliseconds, where much else computes


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


def new_page(browser: Browser, url: str, key: str | None = KEY, **more: Any) -> tuple[Page, list[str]]:
    """A page with the key in its session, and everything that went wrong in it."""
    context = browser.new_context(**more)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith((url, f"{url[:-3]}admin/")) else wrong.append(request.url)
        ),
    )
    if key is not None:
        page.add_init_script(
            f"if (location.host) {{ sessionStorage.clear(); sessionStorage.setItem('tierline-admin-key', {key!r}); }}"
        )
    return page, wrong


def go(page: Page, url: str, view: str) -> None:
    """To a view, until it shows its data."""
    page.goto(f"{url}#{view}")
    page.wait_for_selector(f"main[data-ready={view.split('/')[0]}]")


def until(page: Page, expression: str) -> None:
    """Until it is true there. Not `wait_for_function`, which the page's own policy forbids."""
    deadline = Deadline(PATIENCE / 1000)
    while not page.evaluate(expression):
        assert not deadline.over, f"never true: {expression}"
        page.wait_for_timeout(20)
