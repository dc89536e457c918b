"""Pages in Chromium: they work, ask the network for nothing, run nothing of a model's, and everybody can read them.

Needs Debian's chromium and ``pip install -e '.[browser]'``; ``pytest -m browser`` runs it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reports import FULL, hostile, large

from onnxq.evaluation.layers import Layer, Layers, SampleSqnr
from onnxq.report import AccuracyError, Report
from onnxq.report.page import Comparison, save_html

pytestmark = pytest.mark.browser

# Chromium asks for updates of its own otherwise.
QUIET = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
REPORTS = {
    "verified": FULL,
    "refused": AccuracyError("output y has 31.2 dB, expected 60 dB or more", FULL).report,
    "hostile": hostile(FULL),
    "large": large(20_000),
}
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens the page of a report, and finds at the end that nothing was complained of and nothing asked for."""
    reported: list[str] = []
    contexts = []

    def opened(report: Report, **options: Any) -> Any:
        save_html(report, tmp_path / "page.html")
        contexts.append(chromium.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: reported.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: reported.append(str(error)))
        page.on("dialog", lambda dialog: reported.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda request: reported.append(request.url) if request.url[:5] not in ("file:", "data:") else None,
        )
        page.goto((tmp_path / "page.html").as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert reported == []


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_a_page(name: str, scheme: str, opened: Open) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(opened(REPORTS[name], color_scheme=scheme)).response["violations"]
    serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
    assert serious == []


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", [360, 1200])
def test_a_page_is_as_wide_as_the_screen(name: str, width: int, opened: Open) -> None:
    page = opened(REPORTS[name], viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_a_comparison(scheme: str, chromium: Any, tmp_path: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    layers = Layers(4, hostile((Layer("x", "a", "Conv", "static", 40.0, 38.0, (SampleSqnr(3, 31.5),)),)))
    Comparison(Path("a.onnx"), Path("b.onnx"), FULL.agreement, layers).save_html(tmp_path / "page.html")
    page = chromium.new_page(color_scheme=scheme)
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator("img").count() == 0
    found = axe.Axe().run(page).response["violations"]
    assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
    page.close()


def test_nodes_are_sorted_and_searched(opened: Open) -> None:
    page = opened(FULL)
    nodes = page.locator("#node-list")
    names = nodes.locator("tbody th")
    for order, expected in (("ascending", ["a", "b"]), ("descending", ["b", "a"])):
        nodes.get_by_role("button", name="Node").click()
        assert nodes.locator("thead th").first.get_attribute("aria-sort") == order
        assert names.all_inner_texts() == expected
    nodes.get_by_role("searchbox").fill("tanh")
    assert names.all_inner_texts() == ["b"]
    assert nodes.locator("output").inner_text() == "1 to 1 of 1 nodes"
    nodes.get_by_role("searchbox").fill("nowhere")
    assert nodes.locator("output").inner_text() == "none of 2 nodes"
    nodes.get_by_role("searchbox").fill("")
    nodes.get_by_role("combobox").select_option("static")
    assert names.all_inner_texts() == ["a"]


def test_the_keyboard_sorts_and_stays_where_it_is(opened: Open) -> None:
    page = opened(FULL)
    page.locator("#node-list thead button").first.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.dataset.key") == "name"
    assert page.locator("#node-list thead th").first.get_attribute("aria-sort") == "ascending"


def test_a_region_opens_its_nodes(opened: Open) -> None:
    page = opened(FULL)
    first = page.locator(".chain button").first
    first.click()
    assert first.get_attribute("aria-expanded") == "true"
    assert page.locator("#region tbody th").all_inner_texts() == ["a"]
    first.click()
    assert page.locator("#region").is_hidden()


def test_colours_follow_mode_time_and_error(opened: Open) -> None:
    page = opened(FULL)
    colour = "getComputedStyle(document.querySelector('.chain button')).backgroundColor"
    found = set()
    for name in ("mode", "time", "error"):
        page.get_by_text(name, exact=True).first.click()
        found.add(page.evaluate(colour))
    assert len(found) == 3


def test_light_and_dark_follow_the_system_and_the_button(opened: Open) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light, dark = (opened(FULL, color_scheme=scheme).evaluate(paper) for scheme in ("light", "dark"))
    assert light != dark
    page = opened(FULL, color_scheme="light")
    page.locator("#theme").click()
    assert page.evaluate(paper) == dark
    page.locator("#theme").click()
    assert page.evaluate(paper) == light


def test_names_are_shown_as_they_are(opened: Open) -> None:
    page = opened(REPORTS["hostile"])
    assert page.locator("img").count() == 0
    assert "<img src=x onerror=alert(1)>" in page.locator("#node-list tbody th").first.inner_text()


def test_many_nodes_are_shown_page_by_page(opened: Open) -> None:
    page = opened(REPORTS["large"])
    nodes = page.locator("#node-list")
    assert nodes.locator("output").inner_text() == "1 to 50 of 20000 nodes"
    nodes.get_by_role("button", name="Next page").click()
    assert nodes.locator("output").inner_text() == "51 to 100 of 20000 nodes"
    assert page.locator(".chain button").count() <= 120
    nodes.get_by_role("searchbox").fill("layers.19999/")
    assert nodes.locator("tbody tr").count() == 1


def test_a_page_is_printed_with_all_its_nodes(opened: Open) -> None:
    page = opened(large(300))
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#node-list tbody tr").count() == 300
    assert page.locator(".top").is_hidden()
