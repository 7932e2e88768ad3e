"""`toto-compat sbom`: the software bill of materials of an environment, from its lock, as CycloneDX JSON.

It is made from the lock and nothing else, so the same lock gives the same bytes. What the base image brings, Debian's
packages and the interpreter, is there as the base image by its name and, where it was resolved, its digest.
"""

import json
import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from toto_compat.contract.request import Environment
from toto_compat.environments.locks import Lock, LockedPackage, read_base_digests, read_lock
from toto_compat.errors import SelectionError
from toto_compat.evidence.files import write_atomically
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option

SPECIFICATION = "1.6"
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "toto-compat sbom")


def bill_of_materials(name: str, environment: Environment, lock: Lock) -> dict[str, Any]:
    """Put the bill together: the environment, and below it every wheel with its hash, and the base image."""
    whole = f"environment:{name}"
    components = [_component(package) for package in lock.packages]
    base = _base_image(environment)
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPECIFICATION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, f'{name} {lock.identity}')}",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "toto-compat", "version": _own_version()}]},
            "component": {
                "type": "container",
                "bom-ref": whole,
                "name": name,
                "version": lock.identity[:12],
                "properties": [
                    {"name": "toto-compat:lock", "value": lock.identity},
                    {"name": "toto-compat:python", "value": lock.python},
                ],
            },
        },
        "components": [*components, base],
        "dependencies": [{"ref": whole, "dependsOn": sorted(str(one["bom-ref"]) for one in (*components, base))}],
    }


def package_url(package: LockedPackage) -> str:
    # a local version such as 2.13.0+cpu: the plus is percent-encoded in a package URL
    return f"pkg:pypi/{quote(package.name.lower(), safe='-._')}@{quote(package.version, safe='-._~')}"


def _component(package: LockedPackage) -> dict[str, Any]:
    url = package_url(package)
    return {
        "type": "library",
        "bom-ref": url,
        "name": package.name,
        "version": package.version,
        "purl": url,
        "hashes": [{"alg": "SHA-256", "content": package.sha256}],
        "properties": [
            {"name": "toto-compat:file", "value": package.file},
            {"name": "toto-compat:layer", "value": package.layer},
        ],
    }


def _base_image(environment: Environment) -> dict[str, Any]:
    image = environment.base_image
    named, _, digest = image.partition("@")
    # a colon before the last slash is of a port
    folder, slash, last = named.rpartition("/")
    name, _, tag = last.partition(":")
    component: dict[str, Any] = {
        "type": "container",
        "bom-ref": f"base:{image}",
        "name": folder + slash + name,
        "version": tag or "latest",
    }
    digest = digest or read_base_digests().get(image, "")
    if digest.startswith("sha256:"):
        component["hashes"] = [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}]
    return component


def _own_version() -> str:
    try:
        return version("toto-compat")
    except PackageNotFoundError:  # a checkout that nobody installed
        return "0"


@click.command("sbom")
@click.argument("name", metavar="ENVIRONMENT")
@click.option("--output", type=click.Path(path_type=Path), help="Write it there instead of printing it.")
@matrix_option
def sbom_command(name: str, output: Path | None, matrix_file: Path | None) -> None:
    """Print what an environment consists of, every wheel with its hash, as CycloneDX JSON."""
    environments = load_matrix(find_matrix_file(matrix_file)).environments
    if name not in environments:
        raise SelectionError(f"no environment {name!r}", hint=f"known: {', '.join(environments)}")
    bill = bill_of_materials(name, environments[name], read_lock(name, environments[name]))
    text = json.dumps(bill, indent=2, sort_keys=True) + "\n"
    if output is None:
        click.echo(text, nl=False)
    else:
        write_atomically(output, text)
