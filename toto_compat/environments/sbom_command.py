"""`toto-compat sbom`: prints what an environment or its image consists of."""

from pathlib import Path

import click

from toto_compat.environments.locks import read_lock
from toto_compat.environments.sbom import bill_of_materials, bill_text, image_bill
from toto_compat.errors import EnvironmentBuildError, SelectionError
from toto_compat.evidence.files import read_bytes, write_atomically
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option


@click.command("sbom")
@click.argument("name", metavar="ENVIRONMENT")
@click.option("--image", is_flag=True, help="Of the image that was built here: Debian's packages and Python as well.")
@click.option("--output", type=click.Path(path_type=Path), help="Write it there instead of printing it.")
@matrix_option
def sbom_command(name: str, image: bool, output: Path | None, matrix_file: Path | None) -> None:
    """Print what an environment consists of, every wheel with its hash, as CycloneDX JSON."""
    environments = load_matrix(find_matrix_file(matrix_file)).environments
    if name not in environments:
        raise SelectionError(f"no environment {name!r}", hint=f"known: {', '.join(environments)}")
    lock = read_lock(name, environments[name])
    if image:
        path = image_bill(lock)
        if not path.exists():
            raise EnvironmentBuildError(
                f"{name}: no image of this lock was built here",
                hint=f"`toto-compat images build --rebuild {name}` builds it and writes its bill",
            )
        text = read_bytes(path).decode(errors="replace")
    else:
        text = bill_text(bill_of_materials(name, environments[name], lock))
    if output is None:
        click.echo(text, nl=False)
    else:
        write_atomically(output, text)
