"""Take a picture of a report: `python docs/screenshot.py results/<run>/compatibility.html docs/report.png`."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, BrowserType, Error, sync_playwright

LEAST_HIGH, MOST_HIGH = 1100, 2100  # to the end of the grid, whose last cache is the one that passes


def launch(chromium: BrowserType) -> Browser:
    """Start Debian's Chromium, else playwright's own, else say how to get one."""
    try:
        return chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--no-first-run"]
        )
    except Error as error:
        first = error.message.splitlines()[0]
        sys.exit(f"no Chromium starts ({first}): `apt-get install chromium` or `playwright install chromium`")


def main(page_file: Path, picture: Path) -> None:
    with sync_playwright() as playwright:
        browser = launch(playwright.chromium)
        page = browser.new_page(viewport={"width": 1280, "height": 1100})
        page.goto(page_file.resolve().as_uri())
        end = page.evaluate("document.querySelector('#matrix .scroll')?.getBoundingClientRect().bottom ?? 0")
        page.set_viewport_size({"width": 1280, "height": max(LEAST_HIGH, min(MOST_HIGH, int(end) + 16))})
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
