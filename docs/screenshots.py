"""Make the pictures of the documentation: ``python docs/screenshots.py``.

terminal.svg shows a run, and report.png the page of its report, drawn by Chromium. Install Debian's chromium first.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import terminal
from outputs import put_models, run

DOCS = Path(__file__).parent
# Without these Chromium needs a user who is not root, and asks for updates of its own.
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
WIDTH, REPORT_HEIGHT = 1120, 1640


def main() -> None:
    """Make both."""
    terminal.main()
    with TemporaryDirectory() as name:
        folder = Path(name)
        put_models(folder, None)
        run(f"{terminal.COMMANDS[0]} --html report.html", folder)
        take(folder / "report.html", DOCS / "report.png", REPORT_HEIGHT)


def take(page: Path, picture: Path, height: int) -> None:
    """Take a picture of the top of a page."""
    with TemporaryDirectory() as profile:
        options = [f"--user-data-dir={profile}", f"--window-size={WIDTH},{height}", "--hide-scrollbars"]
        # The page draws its charts after it is loaded.
        options += ["--virtual-time-budget=2000", f"--screenshot={picture}"]
        subprocess.run(["chromium", *FLAGS, *options, page.as_uri()], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
