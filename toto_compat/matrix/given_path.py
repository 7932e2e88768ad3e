"""A path on the command line that has to be named: an empty word, from a variable that is not set, is no folder."""

import os
from pathlib import Path
from typing import Any

import click


class GivenPath(click.Path):
    """A path as `Path`; where click would take an empty word for the current folder, it is a mistake."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("it is empty; name a path, . is the current folder.", param, ctx)
        return super().convert(value, param, ctx)
