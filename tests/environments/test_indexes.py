"""pip is sent where the environment and the user say, and not to an index that does not answer."""

import configparser
import os
from pathlib import Path

import pytest

from toto_compat.environments.indexes import index_answers, pip_settings


def test_an_online_build_gets_index_and_certificates_but_no_folder_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = tmp_path / "ca.pem"
    certificates.write_text("certificate")
    settings = tmp_path / "pip.conf"
    settings.write_text(
        "[global]\nindex-url = https://user:secret@index.example/simple\n"
        "extra-index-url = file:///srv/simple https://other.example/simple\n"
        f"cert = {certificates}\nfind-links = /srv/wheels\n"
    )
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    text, found = pip_settings()
    passed = configparser.ConfigParser(interpolation=None)
    passed.read_string(text)
    assert dict(passed["global"]) == {
        "index-url": "https://user:secret@index.example/simple",
        "extra-index-url": "https://other.example/simple",
        "cert": "/build/pip/ca.crt",
    }
    assert found == b"certificate"


@pytest.mark.parametrize(
    "index", ["http://127.0.0.1:9/", "ftp://example.org", "nonsense", "http://[broken", "http://a b"]
)
def test_an_index_that_cannot_be_asked_does_not_answer(index: str) -> None:
    assert index_answers(index, patience=1) is False
