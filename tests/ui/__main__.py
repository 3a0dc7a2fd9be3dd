"""`python -m tests.ui`: the screenshots of docs/ui.md, of a fleet that has served four minutes of the demo's traffic.

Exit code 1 where no Chromium is installed. `--seconds` shortens it; `--folder` is where they go.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from playwright.sync_api import Browser, Page

from tests.ui.browser import chromium, find_chromium, go, new_page
from tests.ui.live import Live

PICTURES = Path(__file__).parents[2] / "docs" / "img"
SIZE = {"width": 1280, "height": 720}


def shoot(browser: Browser, live: Live, folder: Path, busy: bool) -> None:
    """busy: of what is live, while there is traffic; else of what was recorded."""
    page, wrong = new_page(browser, live.url, viewport=SIZE, color_scheme="light")
    views = ("fleet", "conversations", "limits") if busy else ("latency", "requests", "heat")
    for view in views:
        go(page, live.url, view)
        save(page, folder, view)
    if busy:
        page.emulate_media(color_scheme="dark")
        go(page, live.url, "fleet")
        save(page, folder, "dark")
    else:
        explain(page, live, folder)
        what_if(page, live, folder)
    page.context.close()
    assert not wrong, wrong


def save(page: Page, folder: Path, name: str) -> None:
    page.mouse.move(0, 400)
    page.wait_for_timeout(400)
    page.screenshot(path=folder / f"ui-{name}.png")


def explain(page: Page, live: Live, folder: Path) -> None:
    """A turn of an agent: its cache decides."""
    found = live.get("requests", limit=200)["requests"]
    one = max(
        found,
        key=lambda one: (one["reason"] == "prefix", one["cached_tokens"] or 0, one["completion_tokens"] or 0),
    )
    page.set_viewport_size({**SIZE, "height": 860})
    go(page, live.url, f"requests/{one['request_id']}/{one['row']}")
    save(page, folder, "explain")


def what_if(page: Page, live: Live, folder: Path) -> None:
    page.set_viewport_size(SIZE)
    go(page, live.url, "whatif")
    page.get_by_role("combobox", name="Policy", exact=True).select_option("least_in_flight")
    page.get_by_role("button", name="Replay the last hour").click()
    page.locator("table[aria-label='Decisions by backend'] tbody tr").first.wait_for(timeout=90_000)
    save(page, folder, "whatif")


def first_paint(browser: Browser, live: Live) -> float:
    """Milliseconds, of a page that is opened a second time."""
    page, _ = new_page(browser, live.url)
    for _ in range(2):
        go(page, live.url, "fleet")
        page.goto("about:blank")
    go(page, live.url, "fleet")
    found: float = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.context.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ui", description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--folder", type=Path, default=PICTURES)
    options = parser.parse_args()
    path = find_chromium()
    if path is None:
        print("no Chromium is installed (Debian: chromium)", file=sys.stderr)
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    with Live(1.0, workers=1) as live, ThreadPoolExecutor(1) as thread, chromium(path) as browser:
        traffic = thread.submit(live.traffic, options.seconds)
        time.sleep(options.seconds * 0.5)
        shoot(browser, live, options.folder, busy=True)
        print(f"{traffic.result()} requests")
        shoot(browser, live, options.folder, busy=False)
        print(f"first paint after {first_paint(browser, live):.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
