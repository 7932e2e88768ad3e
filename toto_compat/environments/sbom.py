"""The software bill of materials of an environment, as CycloneDX JSON: from its lock, or of the image that was built.

From a lock and nothing else the same lock gives the same bytes; what the base brings is there as the base image by
its name and, where it was resolved, its digest. Of an image Debian's packages and the interpreter are there one by one.
"""

import json
import uuid
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from toto_compat.contract.request import Environment
from toto_compat.environments.locks import Lock, LockedPackage, read_base_digests
from toto_compat.evidence.files import cache_folder

SPECIFICATION = "1.6"
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "toto-compat sbom")


@dataclass(frozen=True)
class SystemPackage:
    name: str
    version: str
    architecture: str


@dataclass(frozen=True)
class ImageContents:
    """Holds what is in an image, as far as it says so itself."""

    image: str  # its id
    base_digest: str  # of the base that was asked for: the registry's, or the engine's number of it
    stand_in: str  # what it was built on instead, for want of a registry
    distribution: str  # 'debian-12'
    packages: tuple[SystemPackage, ...]
    python: str  # the interpreter's whole version, or only as much as is known


def bill_of_materials(
    name: str, environment: Environment, lock: Lock, contents: ImageContents | None = None
) -> dict[str, Any]:
    """Put the bill together: the environment, and below it every wheel with its hash, the base and its packages."""
    whole = f"environment:{name}"
    components = [_component(package) for package in lock.packages]
    base = _base_image(environment, contents)
    number, properties = f"{name} {lock.identity}", {"lock": lock.identity, "python": lock.python}
    if contents is not None:
        components += [_system_package(package, contents.distribution) for package in contents.packages]
        components.append(_interpreter(contents.python))
        number, properties["image"] = f"{number} {contents.image}", contents.image
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPECIFICATION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, number)}",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "toto-compat", "version": _own_version()}]},
            "component": {
                "type": "container",
                "bom-ref": whole,
                "name": name,
                "version": lock.identity[:12],
                "properties": [{"name": f"toto-compat:{key}", "value": value} for key, value in properties.items()],
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


def _system_package(package: SystemPackage, distribution: str) -> dict[str, Any]:
    vendor = distribution.partition("-")[0] or "debian"
    where = f"?arch={quote(package.architecture)}" + (f"&distro={quote(distribution)}" if distribution else "")
    named = f"{quote(package.name, safe='-._~+')}@{quote(package.version, safe='-._~')}"
    url = f"pkg:deb/{quote(vendor)}/{named.replace('+', '%2B')}{where}"
    return {"type": "library", "bom-ref": url, "name": package.name, "version": package.version, "purl": url}


def _interpreter(python: str) -> dict[str, Any]:
    url = f"pkg:generic/python@{quote(python)}"
    return {"type": "application", "bom-ref": url, "name": "python", "version": python, "purl": url}


def _base_image(environment: Environment, contents: ImageContents | None) -> dict[str, Any]:
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
    if contents is not None:
        digest = contents.base_digest
        if contents.stand_in:
            component["properties"] = [{"name": "toto-compat:stand-in", "value": contents.stand_in}]
    else:
        digest = digest or read_base_digests().get(image, "")
    if digest.startswith("sha256:"):
        component["hashes"] = [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}]
    return component


def image_bill(lock: Lock) -> Path:
    """Name the bill of the image that was last built here from this lock."""
    return cache_folder() / "images" / f"{lock.environment_name}-{lock.identity[:16]}.cdx.json"


def bill_text(bill: dict[str, Any]) -> str:
    return json.dumps(bill, indent=2, sort_keys=True) + "\n"


def _own_version() -> str:
    try:
        return version("toto-compat")
    except PackageNotFoundError:  # a checkout that nobody installed
        return "0"
