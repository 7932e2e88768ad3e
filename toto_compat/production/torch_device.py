"""`--device` of the commands that run torch in another process: a mistake in it is told before that is started."""

import re

import click


def checked_device(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Give a device as torch writes it back; anything else is a mistake on the command line."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", value):
        raise click.BadParameter(f"{value!r} is none of cpu, cuda and cuda:N.")
    return value
