"""What pip is set to use is asked of pip itself, and pages of indexes are read as pip reads them."""

import os
from pathlib import Path

import pytest
from packaging.version import Version

from toto_compat.environments.package_index import IndexSettings, index_settings, list_wheels, redacted
from toto_compat.errors import EnvironmentBuildError

TORCH = "torch-2.15.0-cp312-cp312-manylinux_2_28_x86_64.whl"


@pytest.fixture
def pip_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    path = tmp_path / "pip.conf"
    path.write_text("[global]\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(path))
    return path


def test_variables_come_before_sections_of_commands_and_these_before_the_general_one(
    pip_conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_conf.write_text(
        "[global]\nindex-url = https://general.example/simple\ncert = /general.pem\n"
        "extra-index-url = https://one.example/simple\n  https://two.example/simple\n"
        "[install]\nindex-url = https://install.example/simple\n"
    )
    asked = index_settings()
    assert asked.indexes == (
        "https://install.example/simple",
        "https://one.example/simple",
        "https://two.example/simple",
    )
    assert asked.certificates == "/general.pem"
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable.example/simple")
    assert index_settings().indexes[0] == "https://variable.example/simple"


def test_without_any_setting_it_is_pips_own_index(pip_conf: Path) -> None:
    [index] = index_settings().indexes
    assert index.startswith("https://")


def test_no_index_leaves_the_folders(pip_conf: Path, tmp_path: Path) -> None:
    pip_conf.write_text(f"[global]\nno-index = true\nfind-links = {tmp_path}\n")
    (tmp_path / TORCH).touch()
    (tmp_path / "torch-2.15.0.tar.gz").touch()
    (tmp_path / "torchvision-0.30-py3-none-any.whl").touch()
    settings = index_settings()
    assert settings.indexes == ()
    [wheel], warnings = list_wheels(settings, "torch")
    assert (wheel.version, wheel.pythons, warnings) == (Version("2.15.0"), ("3.12",), [])


def test_an_interpreter_without_pip_is_told(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBuildError, match="cannot start"):
        index_settings(str(tmp_path / "python"))


def test_an_index_in_a_folder_is_read(tmp_path: Path) -> None:
    page = tmp_path / "simple" / "torch" / "index.html"
    page.parent.mkdir(parents=True)
    digest = "a" * 64
    page.write_text(
        f'<base href="../../files/"><a href="{TORCH}#sha256={digest}" data-yanked="too slow &amp; wrong">{TORCH}</a>'
    )
    [wheel], _ = list_wheels(IndexSettings(((tmp_path / "simple").as_uri(),)), "torch")
    assert (wheel.sha256, wheel.yanked) == (digest, "too slow & wrong")
    assert wheel.url == (tmp_path / "files" / TORCH).as_uri()


def test_a_password_is_not_shown() -> None:
    assert redacted("https://me:secret@index.example/simple/torch/") == "https://****@index.example/simple/torch/"
