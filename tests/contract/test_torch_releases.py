"""The table of what torch renamed."""

import pytest

from toto_compat.contract.torch_releases import config_name


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.4.1", "cache_size_limit"),
        ("2.6.0+cu124", "cache_size_limit"),
        ("2.7.0", "recompile_limit"),
        ("2.11.0", "recompile_limit"),
        ("2.13.0+cpu", "recompile_limit"),
        ("2.15.0.dev20260101", "recompile_limit"),
    ],
)
def test_the_recompile_limit_has_the_name_of_its_release(version: str, name: str) -> None:
    assert config_name("recompile_limit", version) == name


def test_a_setting_that_a_release_lacks_has_no_name() -> None:
    assert config_name("accumulated_recompile_limit", "2.0.1") == ""


def test_an_unreadable_version_is_refused() -> None:
    with pytest.raises(ValueError, match="nightly"):
        config_name("recompile_limit", "nightly")
