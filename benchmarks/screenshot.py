"""Take the picture of a report that README shows, as Chromium draws its page.

onnxq quantize MODEL --calib SAMPLES --report report.json
python benchmarks/screenshot.py report.json docs/report.png
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

from onnxq import load_report
from onnxq.report.page import save_html


def main() -> None:
    """Take the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true", help="as a dark screen shows it")
    options = parser.parse_args()
    with TemporaryDirectory() as folder, sync_playwright() as started:
        page_file = Path(folder) / "report.html"
        save_html(load_report(options.report), page_file)
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": 1120, "height": 1600}, color_scheme="dark" if options.dark else "light"
        )
        page.goto(page_file.as_uri())
        page.screenshot(path=options.picture)
        browser.close()


if __name__ == "__main__":
    main()
