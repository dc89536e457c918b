"""Open pages of reports in Chromium and use them: what they ask for, complain of and take until they are seen.

    onnxq quantize MODEL --calib SAMPLES --html page.html
    python benchmarks/pages.py page.html ...

Needs Debian's chromium and ``pip install -e '.[browser]'``. Prints a table; the exit code is 1 where a page complains,
asks the network for something, has a serious fault for people with impairments, or does not do what it is asked to.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

# Chromium asks for updates of its own otherwise.
QUIET = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
PAPER = "getComputedStyle(document.body).backgroundColor"


@dataclass
class Seen:
    """What was seen of a page."""

    name: str
    kilobytes: float
    nodes: int = 0
    paint: float = 0.0
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def row(self) -> str:
        """Of the table."""
        message = (self.complaints, self.requests, self.faults, self.failed)
        figures = f"{self.nodes} | {self.kilobytes:.0f} kB | {self.paint:.0f} ms"
        return f"| {self.name} | {figures} | {' | '.join(', '.join(one) or 'none' for one in message)} |"


def sorts(page: Any) -> bool:
    """Two clicks on the head of a column turn its order around."""
    head = page.locator("#node-list thead th").first
    for _ in range(2):
        head.get_by_role("button").click()
    return bool(head.get_attribute("aria-sort") == "descending")


def searches(page: Any) -> bool:
    """What no node is called leaves none."""
    box = page.locator("#node-list").get_by_role("searchbox")
    box.fill("no node is called so")
    empty = page.locator("#node-list tbody tr").count() == 0
    box.fill("")
    return bool(empty and page.locator("#node-list tbody tr").count() > 0)


def opens_a_region(page: Any) -> bool:
    """A region that is chosen shows its nodes."""
    page.locator(".chain button").first.click()
    return bool(page.locator("#region tbody tr").count() > 0)


def tells_when_pointed_at(page: Any) -> bool:
    """Marks of charts and regions say what they are."""
    pointed = page.locator(".chain button").first
    pointed.hover()
    marks = page.locator(".mark title").evaluate_all("all => all.map(one => one.textContent)")
    return bool(pointed.get_attribute("title")) and all(marks)


def turns_dark(page: Any) -> bool:
    """The button changes the colours."""
    light = page.evaluate(PAPER)
    page.locator("#theme").click()
    return bool(page.evaluate(PAPER) != light)


USES: tuple[Callable[[Any], bool], ...] = (sorts, searches, opens_a_region, tells_when_pointed_at, turns_dark)


def seen(browser: Any, path: Path) -> Seen:
    """Open a page and use it."""
    found = Seen(path.stem, path.stat().st_size / 1e3)
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.on("console", lambda message: found.complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.on("dialog", lambda dialog: found.complaints.append(f"dialog: {dialog.message}"))
    page.on("request", lambda one: found.requests.append(one.url) if one.url[:5] not in ("file:", "data:") else None)
    page.goto(path.resolve().as_uri())
    # The page's own policy forbids to wait for a condition in it.
    while not (paint := page.evaluate(FIRST_PAINT)):
        page.wait_for_timeout(20)
    found.paint = paint
    found.nodes = page.evaluate("JSON.parse(document.getElementById('data').textContent).nodes.length")
    found.failed += [use.__name__.replace("_", " ") for use in USES if not use(page)]
    violations = Axe().run(page).response["violations"]
    found.faults += [one["id"] for one in violations if one["impact"] in ("serious", "critical")]
    page.close()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    options = parser.parse_args()
    print("| page | nodes | size | first paint | console | requests | serious faults (axe) | what does not work |")
    print("|---|---|---|---|---|---|---|---|")
    bad = False
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=list(QUIET))
        for path in options.pages:
            found = seen(browser, path)
            print(found.row, flush=True)
            bad |= any((found.complaints, found.requests, found.faults, found.failed))
        browser.close()
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
