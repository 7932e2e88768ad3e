"""Builds the docs site into site/, strictly, and looks for what mkdocs does not: `python docs/build.py [--serve]`."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What a page would load from another machine: the site has to work without one.
LOADED = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["'](https?:)?//[^"']+["'][^>]*>""", re.IGNORECASE
)


def loaded_from_elsewhere(site: Path) -> list[str]:
    """Every element that loads something over the network; a canonical address is only named."""
    found = []
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        found += [f"{page.relative_to(site)}: {one[0]}" for one in LOADED.finditer(text) if "canonical" not in one[0]]
    return found


def main(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "mkdocs"]
    config = ["--config-file", str(ROOT / "mkdocs.yml")]
    if "--serve" in arguments:
        return subprocess.run([*command, "serve", *config], check=False).returncode
    # the theme is kept up until May 2027 and names its successor at every build; that is said in docs/design.md
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run([*command, "build", "--strict", "--clean", *config, *arguments], env=quiet, check=False)
    if built.returncode != 0:
        return built.returncode
    site = Path(arguments[arguments.index("--site-dir") + 1]) if "--site-dir" in arguments else ROOT / "site"
    found = loaded_from_elsewhere(site)
    print("\n".join(["loaded from elsewhere:", *found]) if found else f"built: {site}/index.html")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
