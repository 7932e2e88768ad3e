"""`python -m toto_compat.environments.torch_sources [RELEASE...]` reads the wheels of torch releases into the tables.

Without a release it reads every one on the user's package index from 2.3.1 on that a table lacks. A wheel is read by
ranges: some ten megabytes of it, not its gigabytes.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from toto_compat.environments.torch_sources import defaults, log_lines, spans, variables
from toto_compat.environments.wheel_sources import listed_releases, sources, wheel_url
from toto_compat.errors import TotoCompatError

OLDEST = Version("2.3.1")


def missing_releases() -> list[str]:
    """Name the releases on the index that one of the tables does not have, oldest first."""
    complete = set(variables.known()) & set(log_lines.known()) & set(defaults.known())
    return [str(one) for one in listed_releases("torch") if one >= OLDEST and str(one) not in complete]


def read_releases(releases: Sequence[str], folder: Path = spans.FOLDER) -> None:
    """Read these wheels and add them to the tables; the tables are whole after every release."""
    read_variables, read_lines, read_defaults = dict(variables.known()), dict(log_lines.known()), defaults.known()
    for release in releases:
        files = list(sources(wheel_url("torch", release), variables.is_source))
        read_variables[release] = variables.variables_of(files)
        read_lines[release] = log_lines.log_lines_of(files)
        read_defaults[release] = dict(defaults.defaults_of(files))
        spans.write(variables.TABLE, variables.document(read_variables), folder)
        spans.write(log_lines.TABLE, log_lines.document(read_lines), folder)
        spans.write(defaults.TABLE, defaults.document(read_defaults), folder)
        statements = sum(len(held) for held in read_lines[release].values())
        sys.stdout.write(
            f"{release}: {len(read_variables[release])} variables, {len(read_defaults[release])} defaults,"
            f" {statements} log statements, from {sum(len(content) for _, content in files) / 1e6:.1f} MB of sources\n"
        )
        sys.stdout.flush()


def main(releases: Sequence[str]) -> int:
    try:
        read_releases(list(releases) or missing_releases())
    except TotoCompatError as error:
        sys.stderr.write(f"{error}\n")
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
