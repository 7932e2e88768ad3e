"""`toto-compat releases`: what the indexes have, what matrix.yaml has of it, and a release added to it."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
from packaging.version import InvalidVersion, Version
from tabulate import tabulate

from toto_compat.environments.package_index import index_settings
from toto_compat.errors import ExitCode
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option
from toto_compat.releases.adding import added_lines, channels_of, find_release, prepare_addition, write_addition
from toto_compat.releases.listing import (
    PYTORCH_INDEX,
    Channel,
    State,
    TorchRelease,
    against,
    check_complete,
    listed,
    of_build,
    with_facts,
)
from toto_compat.verdict.judge import one_line

_NIGHTLIES_SHOWN = 5


class ReleaseNumber(click.ParamType[Version]):
    """A release as an index names it; 2.9.0+cu128 names one of its builds, where builds are told apart."""

    name = "version"

    def __init__(self, *, with_build: bool = False) -> None:
        self._with_build = with_build

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Version:
        if isinstance(value, Version):
            return value
        try:
            named = Version(str(value).removeprefix("torch-"))
            return named if self._with_build else Version(named.public)
        except InvalidVersion:
            self.fail(f"{value!r} is no release: 2.14.1, 2.16.0rc1 and 2.16.0.dev20261116 are", param, ctx)


@click.command("releases")
@click.option(
    "--check",
    is_flag=True,
    help=f"Exit with {int(ExitCode.FINDINGS)} when there is a release newer than everything in the matrix.",
)
@click.option(
    "--add",
    type=ReleaseNumber(with_build=True),
    metavar="VERSION",
    help="Add environment, base image and lock of a release.",
)
@click.option("--pre", is_flag=True, help="Look at release candidates too, also on PyTorch's own test index.")
@click.option("--nightly", is_flag=True, help="Look at PyTorch's own index of nightly builds.")
@click.option("--build", default="", metavar="cuNNN", help="Another build than the default wheel's; cpu, or cu130.")
@click.option("--all", "everything", is_flag=True, help="Also list releases older than all of the matrix.")
@click.option("--pytorch-index", default=PYTORCH_INDEX, show_default=True, metavar="URL", help="PyTorch's own indexes.")
@click.option("--dry-run", is_flag=True, help="With --add: print the lines and the lock's size, write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@matrix_option
def releases_command(matrix_file: Path | None, add: Version | None, **asked: Any) -> None:
    """Torch releases on your package index against matrix.yaml: known, new, withdrawn, their CUDA and Python.

    All of it is read from the index and from the wheels' own metadata; no wheel is downloaded. Releases between those
    of the matrix are listed too, but may be left out on purpose: --check is about newer ones."""
    refuse_unused(add, asked)
    path = find_matrix_file(matrix_file)
    if add is not None:
        add_release(path, add, **asked)
        return
    found, warnings = look(path, **asked)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(json.dumps(as_data(path, found), indent=2) if asked["as_json"] else as_text(path, found))
    if asked["check"] and any(one.state is State.NEW for one in found):
        sys.exit(ExitCode.FINDINGS)


def refuse_unused(add: Version | None, asked: dict[str, Any]) -> None:
    """Refuse an option that would be passed over in silence."""
    if add is None and asked["dry_run"]:
        raise click.UsageError("--dry-run is for --add; without it nothing is written anyway")
    listing = {"--check": "check", "--all": "everything", "--json": "as_json"}
    unused = [option for option, name in listing.items() if asked[name]]
    if add is not None and unused:
        raise click.UsageError(f"{unused[0]} is for the list of releases, and --add lists none")


def look(
    path: Path, *, pre: bool, nightly: bool, build: str, everything: bool, pytorch_index: str, **_: Any
) -> tuple[list[TorchRelease], list[str]]:
    """Every release worth a row, newest first, with its facts."""
    matrix, settings = load_matrix(path), index_settings()
    found, warnings = listed(settings, Channel.RELEASE, build=build)
    if not build:  # of one build an index need not have every release
        check_complete(matrix, found)
    if not pre:
        found = [one for one in found if not one.version.is_prerelease]
    for channel, wanted in ((Channel.TEST, pre), (Channel.NIGHTLY, nightly)):
        if wanted:
            more, complaints = listed(settings, channel, pytorch_index=pytorch_index, build=build)
            released = {one.version for one in found}
            most = _NIGHTLIES_SHOWN if channel is Channel.NIGHTLY else None
            found += [one for one in more if one.version not in released][:most]
            warnings += complaints
    judged = against(matrix, sorted(found, key=lambda one: one.version, reverse=True))
    shown = [one for one in judged if everything or one.state is not State.OLDER]
    return of_build(with_facts(shown, settings), build), warnings


def add_release(
    path: Path,
    version: Version,
    *,
    pre: bool,
    nightly: bool,
    build: str,
    pytorch_index: str,
    dry_run: bool,
    **_: Any,
) -> None:
    if version.local and build not in ("", version.local):
        raise click.UsageError(f"--add {version} and --build {build} name two builds")
    version, build = Version(version.public), build or version.local or ""
    started, settings = time.monotonic(), index_settings()
    channels = channels_of(version, pre=pre, nightly=nightly)
    release = find_release(version, settings, channels, pytorch_index=pytorch_index, build=build)
    addition = prepare_addition(path, release, settings, pytorch_index=pytorch_index, build=build)
    if not dry_run:
        write_addition(addition)
    click.echo(addition.edited.stanza, nl=False)
    took = f"in {time.monotonic() - started:.1f} s"
    click.echo(added_lines(addition, addition.edited.matrix), err=True)
    click.echo(f"{'not written' if dry_run else f'written to {path}'}, {took}", err=True)


def as_data(path: Path, releases: list[TorchRelease]) -> dict[str, Any]:
    return {
        "matrix": str(path),
        "releases": [
            {
                "torch": str(one.version),
                "state": one.state.value,
                "channel": one.channel.value,
                "environments": list(one.environments),
                "yanked": one.why_yanked if one.is_yanked else None,
                "build": one.facts.build if one.facts else None,
                "pythons": list(one.pythons),
                "requires_python": one.facts.requires_python if one.facts else None,
                "read_from": one.facts.read_from if one.facts else None,
                "unreadable": one.unreadable or None,
            }
            for one in releases
        ],
        "new": [str(one.version) for one in releases if one.state is State.NEW],
    }


def as_text(path: Path, releases: list[TorchRelease]) -> str:
    rows = [
        [
            str(one.version) + ("" if one.channel is Channel.RELEASE else f" ({one.channel.value})"),
            one.state.value + (", yanked" if one.is_yanked and one.state is State.KNOWN else ""),
            one.facts.build if one.facts else "?",
            ", ".join(one.pythons),
            ", ".join(one.environments) or (one_line(one.why_yanked) if one.is_yanked else ""),
        ]
        for one in releases
    ]
    table = tabulate(rows, headers=["torch", "", "default wheel", "python", f"in {path}"], disable_numparse=True)
    unread = [f"? torch {one.version}: {one_line(one.unreadable)}" for one in releases if one.unreadable]
    new = [str(one.version) for one in releases if one.state is State.NEW]
    end = f"new: {', '.join(new)}; `toto-compat releases --add {new[0]}` adds one" if new else "nothing new"
    return "\n".join([table, "", *unread, end])
