"""Defaults of torch that moved: from the table, and for a release that it lacks out of the wheel itself."""

from collections.abc import Mapping

from tests.releases.local_index import LocalIndex, wheel
from toto_compat.environments.torch_sources.defaults import Expression
from toto_compat.releases.defaults import defaults_for, moved_between

CONFIG = b"""
recompile_limit = 8
cache_size_limit: int = Config(alias="torch._dynamo.config.recompile_limit")
fresh = len(platform.machine())
"""


def test_the_table_tells_what_moved_between_two_releases() -> None:
    moved = moved_between("2.4.1", "2.5.1")
    assert moved is not None
    assert "dynamo.inline_inbuilt_nn_modules: False -> True" in [one.text for one in moved]


def test_the_table_tells_what_was_renamed() -> None:
    moved = moved_between("2.6.0", "2.7.0")
    assert moved is not None
    told = [one.text for one in moved if "cache_size_limit" in one.text]
    assert "dynamo.recompile_limit is the new name of dynamo.cache_size_limit, which still works: 8" in told


def test_a_release_that_the_table_lacks_is_read_from_its_wheel(index: LocalIndex) -> None:
    content = wheel("torch", "2.99.0", files={"torch/_dynamo/config.py": CONFIG, "torch/other.py": b"x = 1"})
    index.publish("torch-2.99.0-cp311-cp311-manylinux_2_28_x86_64.whl", content)
    found = defaults_for("2.99.0")
    assert isinstance(found, Mapping)
    assert found["dynamo.recompile_limit"] == found["dynamo.cache_size_limit"] == 8
    assert isinstance(found["dynamo.fresh"], Expression)


def test_a_release_that_nobody_has_is_not_known_and_not_the_same(index: LocalIndex) -> None:
    index.torch("2.98.0")
    assert moved_between("2.13.0", "2.99.0") is None
    index.status = 503
    assert moved_between("2.13.0", "2.99.0") is None
