"""`toto-compat releases`: torch releases on the user's own package index that matrix.yaml does not have."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import yaml
from packaging.version import InvalidVersion, Version

from toto_compat.contract.request import Device, Environment
from toto_compat.errors import EnvironmentBuildError, ExitCode
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option
from toto_compat.matrix.schema import Matrix

# The CUDA tag of the wheel that a plain `pip install torch` takes on Linux: first release of a span -> tag.
_DEFAULT_BUILDS = {
    Version("2.4"): "cu121",
    Version("2.5"): "cu124",
    Version("2.7"): "cu126",
    Version("2.8"): "cu128",
    Version("2.11"): "cu130",
    Version("2.15"): "cu132",
}
_NEWEST_KNOWN_MINOR = Version("2.15")


@dataclass(frozen=True)
class MissingRelease:
    """A release that could be added to the matrix, with the lines to add under `environments:`."""

    torch: str
    newer_than_matrix: bool  # else it lies between two releases that are there
    stanza: str


def available_torch_releases(*, include_prereleases: bool = False, python: str = sys.executable) -> list[Version]:
    """Every release pip would install here, newest first: the user's index settings hold, since pip itself is asked."""
    command = [python, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check", "--no-input"]
    if include_prereleases:
        command.append("--pre")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentBuildError("pip got no answer from the package index within 5 minutes", hint=_HINT) from error
    except OSError as error:
        raise EnvironmentBuildError(f"cannot start {python}: {error.strerror}", hint=_HINT) from error
    if answer.returncode != 0:
        if "No module named pip" in answer.stderr:
            raise EnvironmentBuildError(
                f"{python} has no pip, which is what knows your package index",
                hint="add it with: python -m ensurepip",
            )
        complaints = [line for line in answer.stderr.splitlines() if line.startswith("ERROR:")] or [
            "(pip said nothing)"
        ]
        raise EnvironmentBuildError(f"pip finds no torch on your package index: {complaints[-1]}", hint=_HINT)
    return parse_versions(answer.stdout, include_prereleases=include_prereleases)


_HINT = "check the network and `pip config list`; `pip index versions torch -v` shows what pip tries"


def parse_versions(pip_output: str, *, include_prereleases: bool = False) -> list[Version]:
    """The `Available versions:` line of `pip index versions`, newest first, local builds such as +cpu folded in."""
    line = re.search(r"^Available versions:(.*)$", pip_output, re.MULTILINE)
    if line is None:
        raise EnvironmentBuildError(
            "pip answered, but not with a list of versions",
            hint="this needs pip 21.2 or newer: python -m pip install --upgrade pip",
        )
    releases = set()
    for text in line[1].split(","):
        try:
            version = Version(text.strip())
        except InvalidVersion:
            continue  # an index may hold names that are no versions; pip could not install those either
        if include_prereleases or not version.is_prerelease:
            releases.add(Version(version.public))
    return sorted(releases, reverse=True)


def missing_releases(matrix: Matrix, available: Sequence[Version]) -> list[MissingRelease]:
    """Releases after the oldest one of the matrix that it lacks, newest first."""
    present = {Version(environment.torch) for environment in matrix.environments.values()}
    newest = max(present)
    if not any(version >= newest for version in available):
        # pip stays silent about an index that does not answer and lists what its other sources hold.
        raise EnvironmentBuildError(
            f"your package index does not list torch {newest}, which the matrix has: it is out of reach or incomplete",
            hint=_HINT,
        )
    return [
        MissingRelease(str(version), version > newest, release_stanza(matrix, version))
        for version in sorted(available, reverse=True)
        if version > min(present) and version not in present
    ]


def release_stanza(matrix: Matrix, version: Version) -> str:
    """The YAML to add under `environments:`, everything but the release taken from the most similar environment."""
    build = default_build(version)
    model = _most_similar(matrix, version, build)
    build = build if model.device is Device.CUDA else "cpu"
    fields = model.model_dump(mode="json", exclude_defaults=True) | {"torch": str(version), "build": build}
    remarks = []
    if version.release[:2] > _NEWEST_KNOWN_MINOR.release[:2]:
        remarks.append(f"check the CUDA tag of the default wheel: {build} is that of the newest release known here")
    if build != model.build:
        remarks.append(f"check gpu_architectures and base_image: taken from a {model.build} environment")
        fields["base_image"] = model.base_image
    body = yaml.safe_dump({f"torch-{version}-{build}": fields}, sort_keys=False, width=110, default_flow_style=None)
    return "".join(f"  {line}\n" for line in [*(f"# {remark}" for remark in remarks), *body.splitlines()])


def default_build(version: Version) -> str:
    """The CUDA tag of a release's default wheel; for a release newer than this table, that of the newest known one."""
    known = [first for first in _DEFAULT_BUILDS if first <= version]
    return _DEFAULT_BUILDS[max(known)] if known else "cu118"


def _most_similar(matrix: Matrix, version: Version, build: str) -> Environment:
    """Same build before another, CUDA before CPU, production's special pins last, then the nearest release."""

    def distance(name: str) -> tuple[bool, bool, bool, list[int]]:
        environment = matrix.environments[name]
        release = Version(environment.torch).release
        steps = [abs(mine - other) for mine, other in zip(release, version.release, strict=False)]
        return environment.build != build, environment.device is not Device.CUDA, name == matrix.production, steps

    return matrix.environments[min(matrix.environments, key=distance)]


@click.command("releases")
@click.option(
    "--check",
    is_flag=True,
    help=f"Exit with {int(ExitCode.FINDINGS)} when there is a release newer than everything in the matrix.",
)
@click.option("--pre", "include_prereleases", is_flag=True, help="Look at release candidates and nightlies too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@matrix_option
def releases_command(check: bool, include_prereleases: bool, as_json: bool, matrix_file: Path | None) -> None:
    """Torch releases on your package index that matrix.yaml does not have yet, and the lines to add.

    Releases between those that it has are listed too, but may be left out on purpose: --check is about newer ones.
    """
    path = find_matrix_file(matrix_file)
    matrix = load_matrix(path)
    missing = missing_releases(matrix, available_torch_releases(include_prereleases=include_prereleases))
    newer = [release.torch for release in missing if release.newer_than_matrix]
    if as_json:
        click.echo(json.dumps({"matrix": str(path), "missing": [asdict(release) for release in missing]}, indent=2))
    elif missing:
        between = [release.torch for release in missing if not release.newer_than_matrix]
        click.echo(f"{path} lacks {len(missing)} torch releases of your package index:")
        click.echo(f"  newer than everything in it: {', '.join(newer) or 'none'}")
        click.echo(f"  between releases that it has: {', '.join(between) or 'none'}")
        click.echo("\nTo test one, add its lines under `environments:`\n")
        click.echo("\n".join(release.stanza for release in missing), nl=False)
    else:
        click.echo(f"{path} has every torch release of your package index since its oldest one.")
    if check and newer:
        sys.exit(ExitCode.FINDINGS)
