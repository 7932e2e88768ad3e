"""The bill of materials of every environment is CycloneDX, names every wheel by its hash, and comes from the lock."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from toto_compat.cli import cli
from toto_compat.environments.image_contents import distribution_of, installed_packages, python_version
from toto_compat.environments.locks import read_lock
from toto_compat.environments.sbom import ImageContents, bill_of_materials, bill_text, image_bill, package_url
from toto_compat.errors import EnvironmentBuildError, SelectionError
from toto_compat.evidence.files import write_atomically
from toto_compat.matrix.load import load_matrix

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = load_matrix(ROOT / "matrix.yaml").environments
VALIDATOR = JsonStrictValidator(SchemaVersion.V1_6)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_bill_is_valid_cyclonedx(name: str) -> None:
    bill = bill_of_materials(name, ENVIRONMENTS[name], read_lock(name, ENVIRONMENTS[name]))
    assert VALIDATOR.validate_str(json.dumps(bill)) is None


def test_the_validator_refuses_what_is_no_bill() -> None:
    name = next(iter(ENVIRONMENTS))
    bill = bill_of_materials(name, ENVIRONMENTS[name], read_lock(name, ENVIRONMENTS[name]))
    bill["components"][0]["hashes"] = [{"alg": "SHA-256", "content": "no hash"}]
    assert VALIDATOR.validate_str(json.dumps(bill)) is not None


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_wheel_of_the_lock_is_in_it_by_name_version_hash_and_purl(name: str) -> None:
    lock = read_lock(name, ENVIRONMENTS[name])
    bill = bill_of_materials(name, ENVIRONMENTS[name], lock)
    told = {(one["name"], one["version"], one["hashes"][0]["content"]) for one in bill["components"] if "purl" in one}
    assert told == {(package.name, package.version, package.sha256) for package in lock.packages}
    for package in lock.packages:
        url = PackageURL.from_string(package_url(package))
        assert (url.type, url.name, url.version) == ("pypi", package.name.lower(), package.version)
    assert {one["name"] for one in bill["components"] if one["type"] == "container"} == {"python"}


STATUS = b"""Package: g++
Status: install ok installed
Architecture: amd64
Version: 4:12.2.0-3
Description: GNU C++ compiler
 Package: not one

Package: python3.11
Status: install ok installed
Architecture: amd64
Version: 3.11.2-6+deb12u3

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1.0
"""
DIGEST = "sha256:" + "ab" * 32


def bill_of_an_image(name: str, stand_in: str = "") -> dict[str, Any]:
    packages = installed_packages(STATUS)
    contents = ImageContents(
        image="sha256:" + "cd" * 32,
        base_digest=DIGEST,
        stand_in=stand_in,
        distribution=distribution_of(b'PRETTY_NAME="Debian GNU/Linux 12"\nID=debian\nVERSION_ID="12"\n'),
        packages=packages,
        python=python_version("3.11", packages, ""),
    )
    return bill_of_materials(name, ENVIRONMENTS[name], read_lock(name, ENVIRONMENTS[name]), contents)


def test_the_bill_of_an_image_has_what_debian_and_the_base_bring() -> None:
    name = "torch-2.13.0-cpu"
    bill = bill_of_an_image(name)
    assert VALIDATOR.validate_str(json.dumps(bill)) is None
    told = {(one["name"], one["version"]) for one in bill["components"] if one.get("purl", "").startswith("pkg:deb/")}
    assert told == {("g++", "4:12.2.0-3"), ("python3.11", "3.11.2-6+deb12u3")}
    url = PackageURL.from_string(next(one["purl"] for one in bill["components"] if one["name"] == "g++"))
    assert (url.namespace, url.name, url.version) == ("debian", "g++", "4:12.2.0-3")
    assert url.qualifiers == {"arch": "amd64", "distro": "debian-12"}
    base, interpreter = (
        next(one for one in bill["components"] if one["type"] == kind) for kind in ("container", "application")
    )
    assert base["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert (interpreter["name"], interpreter["version"]) == ("python", "3.11.2")
    of_lock = bill_of_materials(name, ENVIRONMENTS[name], read_lock(name, ENVIRONMENTS[name]))
    assert bill["serialNumber"] != of_lock["serialNumber"]
    assert {json.dumps(one) for one in of_lock["components"] if "purl" in one} < {
        json.dumps(one) for one in bill["components"]
    }


@pytest.mark.parametrize(
    ("minor", "told", "found"), [("3.12", "3.12.7", "3.12.7"), ("3.12", "", "3.12"), ("3.11", "3.9.1", "3.11.2")]
)
def test_the_interpreter_is_the_one_that_runs_the_environment(minor: str, told: str, found: str) -> None:
    assert python_version(minor, installed_packages(STATUS), told) == found


def test_what_stands_in_for_a_base_is_told_as_that() -> None:
    bill = bill_of_an_image("torch-2.13.0-cpu", "toto-compat-base:bookworm sha256:12")
    base = next(one for one in bill["components"] if one["type"] == "container")
    assert base["properties"] == [{"name": "toto-compat:stand-in", "value": "toto-compat-base:bookworm sha256:12"}]
    assert VALIDATOR.validate_str(json.dumps(bill)) is None


def test_an_image_that_is_not_debians_has_no_such_packages() -> None:
    assert installed_packages(b"") == ()
    assert distribution_of(b"") == ""


def test_the_bill_that_a_build_left_is_printed_and_without_one_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path))
    name = "torch-2.13.0-cpu"
    missing = CliRunner().invoke(cli, ["sbom", name, "--image"]).exception
    assert isinstance(missing, EnvironmentBuildError) and "images build" in missing.hint
    write_atomically(image_bill(read_lock(name, ENVIRONMENTS[name])), bill_text(bill_of_an_image(name)))
    assert json.loads(CliRunner().invoke(cli, ["sbom", name, "--image"]).stdout) == bill_of_an_image(name)


def test_the_same_lock_gives_the_same_bytes_and_another_one_another_number() -> None:
    runner = CliRunner()
    first, second = (runner.invoke(cli, ["sbom", "torch-2.13.0-cpu"]).stdout for _ in range(2))
    other = runner.invoke(cli, ["sbom", "torch-2.9.0-cu128"]).stdout
    assert first == second
    assert json.loads(first)["serialNumber"] != json.loads(other)["serialNumber"]


def test_it_is_written_to_a_file_or_an_unknown_environment_is_named(tmp_path: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(cli, ["sbom", "torch-2.13.0-cpu", "--output", str(tmp_path / "bom.json")]).exit_code == 0
    assert json.loads((tmp_path / "bom.json").read_bytes())["bomFormat"] == "CycloneDX"
    refused = runner.invoke(cli, ["sbom", "torch-1"]).exception
    assert isinstance(refused, SelectionError) and "torch-2.13.0-cpu" in refused.hint


def test_an_audit_that_cannot_ask_is_none() -> None:
    """Behind a proxy that is not there nobody can be asked, with pip-audit or without."""
    proxy = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, str(ROOT / "docker" / "audit.py"), "torch-2.13.0-cpu"],
        env={**os.environ, **proxy, "NO_PROXY": "", "no_proxy": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert done.stdout.startswith("torch-2.13.0-cpu: NOT AUDITED: ")
