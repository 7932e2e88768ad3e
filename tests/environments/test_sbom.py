"""The bill of materials of every environment is CycloneDX, names every wheel by its hash, and comes from the lock."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from toto_compat.cli import cli
from toto_compat.environments.locks import read_lock
from toto_compat.environments.sbom import bill_of_materials, package_url
from toto_compat.errors import SelectionError
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
