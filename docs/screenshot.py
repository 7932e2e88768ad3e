"""Take a picture of a report: `python docs/screenshot.py results/<run>/compatibility.html docs/report.png`."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main(page_file: Path, picture: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--no-first-run"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 1100})
        page.goto(page_file.resolve().as_uri())
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
