"""The lines that switch compile on or off: the same in `report --format env`, on the page and by `toggle`."""

import shlex
from collections.abc import Mapping

from toto_compat.verdict.verdict_file import JudgedRow

DISABLE = "TOTO_DISABLE_COMPILE"
COMPILE = "TOTO_COMPILE"
MODE = "TOTO_COMPILE_MODE"
BACKEND = "TOTO_COMPILE_BACKEND"
FORCE = "TOTO_COMPILE_FORCE"

# What each means to `toto_compat.production`. The guide's reference is made from this.
MEANINGS: Mapping[str, str] = {
    DISABLE: "1: toto-ts's own forecaster, eager, whatever the others say. A value that is neither on nor off counts "
    "as 1.",
    COMPILE: "0: nothing is compiled; a cache that the verdict takes alone is still used. 1 or not set: what the "
    "verdict allows. Any other value counts as 0.",
    MODE: "The compile mode. It must be one that was judged PASS here; an unknown one means eager. Not set: the "
    "verdict's preferred one.",
    BACKEND: "The backend of torch.compile, under the same rule.",
    FORCE: "A reason in words: compile without a verdict. `toggle enable --force REASON` writes it.",
}


def switched_off() -> dict[str, str]:
    return {DISABLE: "1"}


def switched_on(row: JudgedRow) -> dict[str, str]:
    """Name the values that ask for a judged row."""
    if row.mode is None:
        return {DISABLE: "0", COMPILE: "0"}
    return {DISABLE: "0", COMPILE: "1", MODE: row.mode, BACKEND: row.settings.backend}


def assignment(name: str, value: str) -> str:
    """Write one line that works when the file is sourced: without `export` no child process sees it."""
    return f"export {name}={shlex.quote(value)}"


def remarks(row: JudgedRow | None) -> tuple[str, ...]:
    """Say what the lines rest on and what else they need."""
    if row is None:
        return ()
    only_for = (
        "# Only for a service that forecasts through toto_compat.production.forecaster(model) with this run's verdict:",
        f"# that binds the cache {row.cache}"
        + (", nothing compiled." if row.mode is None else "; any other cache was not judged PASS."),
        "#   toto-compat report RUN --format verdict --output verdict.json; TOTO_COMPAT_VERDICT=verdict.json",
    )
    own = row.settings.model_dump(exclude_defaults=True, exclude={"backend"})
    settings = ", ".join(f"{name}={value}" for name, value in own.items())
    return (*only_for, *((f"# forecaster() also applies: {settings}",) if settings else ()))


def switch_lines(row: JudgedRow | None) -> tuple[str, ...]:
    """Write the lines to copy into an env file: what the row asks for, or off where there is none."""
    values = switched_off() if row is None else switched_on(row)
    return (*remarks(row), *(assignment(name, value) for name, value in values.items()))
