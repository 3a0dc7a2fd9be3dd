"""The live page in a real Chromium: every view shows what the gateway says, by mouse and by keyboard, and nothing that
somebody made up becomes markup. Skipped where no browser is installed, unless TIERLINE_REQUIRE_TOOLS is set."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.ui.browser import chromium, find_chromium, go, new_page, until
from tests.ui.live import KEY, SCRIPT, Live

VIEWS = ("fleet", "latency", "requests", "heat", "conversations", "whatif", "limits")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live() as live:
        live.traffic(2.0)
        yield live


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        assert not os.environ.get("TIERLINE_REQUIRE_TOOLS"), "no Chromium is installed (Debian: chromium)"
        pytest.skip("no Chromium is installed (Debian: chromium)")
    with chromium(path) as browser:
        yield browser


@pytest.fixture(scope="module")
def shared(browser: Browser, live: Live) -> Iterator[tuple[Page, list[str]]]:
    page, wrong = new_page(browser, live.url)
    yield page, wrong
    page.context.close()


@pytest.fixture
def page(shared: tuple[Page, list[str]]) -> Iterator[Page]:
    """With the key, and nothing else that it remembers. Nothing may go wrong in it; it may ask nobody but the gateway."""
    page, wrong = shared
    page.goto("about:blank")
    wrong.clear()
    page.set_viewport_size({"width": 1280, "height": 720})
    page.emulate_media(color_scheme="light")
    yield page
    assert not wrong


def cells(page: Page, label: str, column: int) -> list[str]:
    """A column of a table, top to bottom."""
    return page.locator(f"table[aria-label='{label}'] tbody tr").evaluate_all(
        f"rows => rows.map(row => row.cells[{column}].textContent)"
    )


def test_the_key_is_asked_for_once_and_a_wrong_one_is_told(browser: Browser, live: Live) -> None:
    page, _ = new_page(browser, live.url, key=None)
    page.goto(live.url)
    field = page.get_by_label("Key", exact=True)
    expect(field).to_be_focused()
    field.fill("not the key")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("That is not the admin key.")
    field.fill(KEY)
    field.press("Enter")
    expect(page.locator("table[aria-label='Backends'] tbody tr")).to_have_count(2)
    page.reload()
    expect(page.locator("table[aria-label='Backends'] tbody tr")).to_have_count(2)
    assert page.evaluate("localStorage.length") == 0
    page.context.close()


def test_the_fleet_is_what_the_admin_api_says(page: Page, live: Live) -> None:
    go(page, live.url, "fleet")
    backends = live.ask("admin/backends")["backends"]
    names = page.locator("table[aria-label='Backends'] tbody tr").evaluate_all(
        "rows => rows.map(row => row.dataset.key)"
    )
    assert names == [backend["name"] for backend in backends]
    assert cells(page, "Backends", 1) == [backend["state"] for backend in backends]
    assert all("ms" in text or " s" in text for text in cells(page, "Backends", 6))
    assert page.locator("footer").inner_text().startswith("Tierline")


def test_updates_change_what_changed_and_keep_the_rows(page: Page, live: Live) -> None:
    go(page, live.url, "requests")
    rows = page.locator("table[aria-label='Last requests'] tbody tr")
    rows.nth(2).evaluate("row => { row.mine = true; row.focus(); }")
    before = page.evaluate("performance.getEntriesByType('resource').length")
    until(page, f"performance.getEntriesByType('resource').length > {before + 1}")
    assert page.evaluate("document.activeElement.mine")
    assert rows.nth(2).evaluate("row => row.mine")


def test_a_backend_is_drained_after_a_question_and_taken_back(page: Page, live: Live) -> None:
    go(page, live.url, "fleet")
    page.get_by_role("button", name="Drain bf16", exact=True).click()
    page.keyboard.press("Escape")
    assert [one["draining"] for one in live.ask("admin/backends")["backends"]] == [False, False]
    for asked, state in (("Drain", "draining"), ("Undrain", "healthy")):
        page.get_by_role("button", name=f"{asked} bf16", exact=True).click()
        expect(page.get_by_role("dialog")).to_contain_text(f"{asked} bf16?")
        page.get_by_role("dialog").get_by_role("button", name=asked, exact=True).click()
        expect(page.locator("#toast")).to_contain_text(f"bf16: {state}")
        expect(page.locator("tr[data-key=bf16] td").nth(0)).to_have_text(state)
        assert live.ask("admin/backends")["backends"][1]["state"] == state


def test_charts_have_the_points_that_the_records_give(page: Page, live: Live) -> None:
    go(page, live.url, "latency")
    page.get_by_role("combobox", name="By").select_option("backend")
    until(page, "document.querySelectorAll('[data-chart=ttft] .legend > span').length > 1")
    found = live.get("latency", window="10m", by="backend")
    charts = page.locator("[data-chart]")
    assert charts.count() == 6
    points = sum(len(lines["step"]) for lines in found["ttft"].values())
    assert points > 0
    assert int(page.locator("[data-chart=ttft]").get_attribute("data-points") or 0) == points
    assert page.locator("[data-chart=ttft] canvas").count() == 1
    legend = page.locator("[data-chart=count] .legend").inner_text()
    assert all(name in legend for name in found["names"])


def test_a_request_is_explained_by_keyboard_alone(page: Page, live: Live) -> None:
    go(page, live.url, "fleet")
    page.keyboard.press("3")
    page.wait_for_selector("main[data-ready=requests]")
    found = live.get("requests")["requests"]
    assert cells(page, "Last requests", 1) == [one["request_id"] for one in found]
    page.get_by_role("combobox", name="backend").select_option("bf16")
    expect(page.locator("table[aria-label='Last requests'] tbody tr").first).to_be_visible()
    until(
        page,
        "[...document.querySelectorAll('main tbody tr')].every(row => row.cells[4].textContent === 'bf16')",
    )
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    wanted = live.get("requests", backend="bf16")["requests"][0]
    expect(page.get_by_role("heading", name=f"Request {wanted['request_id']}")).to_be_visible()
    story = live.get("explain", request_id=wanted["request_id"], row=wanted["row"])["story"]
    attempt = page.locator(f"section[aria-label^='Attempt 1: {story['attempts'][0]['backend']}']")
    names = [one["backend"] for one in story["attempts"][0]["backends"]]
    assert attempt.locator("tbody th").all_inner_texts() == names
    assert page.locator("table[aria-label='Forecast and outcome'] tbody tr").count() == 7
    page.keyboard.press("Escape")
    expect(page.locator("table[aria-label='Last requests'] tbody tr").first).to_be_visible()


def test_the_heat_map_has_every_cell_that_was_measured(page: Page, live: Live) -> None:
    go(page, live.url, "heat")
    found = live.get("heat", backend="fp8")
    filled = page.locator("table[aria-label='Concurrency by context'] td:not(:empty)")
    assert filled.count() == len([cell for cell in found["cells"] if cell["rate"]]) > 1
    assert "×" in filled.first.inner_text()


def test_conversations_and_limits_are_those_of_the_gateway(page: Page, live: Live) -> None:
    go(page, live.url, "conversations")
    talks = live.get("conversations")
    assert cells(page, "Conversations", 0) == [talk["conversation"] for talk in talks["talks"]]
    assert cells(page, "Working set by backend", 0) == ["fp8", "bf16"]
    go(page, live.url, "limits")
    limits = live.get("limits")["limits"]
    assert {limit["scope"] for limit in limits} == {"key", "model"}
    assert cells(page, "Limits", 0) == [f"{limit['scope']} {limit['name']}" for limit in limits]


def test_another_policy_is_tried_and_what_is_no_policy_is_told(page: Page, live: Live) -> None:
    go(page, live.url, "whatif")
    page.get_by_role("combobox", name="Policy", exact=True).select_option("round_robin")
    page.get_by_role("button", name="Replay the last hour").click()
    rows = page.locator("table[aria-label='Decisions by backend'] tbody tr")
    expect(rows.first).to_be_visible(timeout=60_000)
    assert rows.count() >= 2
    moved = rows.evaluate_all("rows => rows.map(row => row.cells[3].textContent)")
    assert any(one not in ("0", "") for one in moved)
    modelled = page.locator("table[aria-label='Modelled outcomes by backend'] tbody th").all_inner_texts()
    assert modelled == ["fp8", "bf16"]
    page.get_by_label("Policy and tiers, TOML").fill('[policy]\nname = "nonsense"')
    page.get_by_role("button", name="Replay the last hour").click()
    expect(page.get_by_role("alert").filter(has_text="policy.name")).to_be_visible(timeout=60_000)


def test_help_theme_and_pause_are_a_key_away_and_every_control_has_a_visible_focus(
    page: Page, live: Live
) -> None:
    page.emulate_media(color_scheme="dark")
    go(page, live.url, "fleet")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    dark = page.evaluate(ground)
    page.keyboard.press("t")
    assert page.evaluate(ground) != dark
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("p")
    expect(page.locator("#status")).to_have_text("paused")
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent.trim()"))
        if page.evaluate("document.activeElement !== document.body"):
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert {"Fleet", "Limits", "Pause", "Theme", "?", "Drain"} <= reached


def test_a_phone_shows_every_view_without_scrolling_sideways(page: Page, live: Live) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for view in VIEWS:
        go(page, live.url, view)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    assert page.get_by_role("navigation", name="Views").is_visible()


def test_names_that_are_markup_come_out_as_text(page: Page, live: Live) -> None:
    live.hostile()
    go(page, live.url, "requests")
    row = page.locator("table[aria-label='Last requests'] tbody tr").first
    expect(row).to_contain_text(SCRIPT)
    row.click()
    expect(page.get_by_role("heading", name=f"Request {SCRIPT}")).to_be_visible()
    for view in ("latency", "heat", "fleet"):
        go(page, live.url, view)
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img").count() == 0
