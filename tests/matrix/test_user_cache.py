"""The files of a user's cache: what it imports of its own folder, found without importing anything."""

from pathlib import Path

import pytest

from toto_compat.errors import InputError
from toto_compat.matrix.user_cache import user_cache_files, user_cache_identity


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_imports_are_followed_inside_the_folder_and_nowhere_else(tmp_path: Path) -> None:
    write(
        tmp_path,
        mine="import torch, helper\nfrom package.inside import thing\n",
        helper="import mine\nimport json\n",
        json="# named like one of Python's own: Python's is meant\n",
        unrelated="import torch\n",
        package__inside="from . import deeper\n",
        package__deeper="from later import x\n",
        later="",
    )
    (tmp_path / "package" / "__init__.py").touch()
    assert list(user_cache_files(tmp_path / "mine.py")) == [
        "helper.py",
        "later.py",
        "mine.py",
        "package/__init__.py",
        "package/deeper.py",
        "package/inside.py",
    ]


def test_an_import_inside_a_function_counts(tmp_path: Path) -> None:
    write(tmp_path, mine="class Mine:\n    def append(self):\n        import helper\n", helper="")
    assert set(user_cache_files(tmp_path / "mine.py")) == {"mine.py", "helper.py"}


def test_the_identity_is_of_contents_and_names_the_class(tmp_path: Path) -> None:
    write(tmp_path, mine="import helper", helper="a = 1")
    source = f"{tmp_path}/mine.py:Mine"
    before = user_cache_identity(source)
    assert before.endswith(":Mine")
    assert user_cache_identity(f"{tmp_path}/mine.py:Other") != before
    write(tmp_path, helper="a = 2")
    assert user_cache_identity(source) != before
    assert user_cache_identity("builtin") == "builtin"


@pytest.mark.parametrize(("text", "told"), [("def (", "not readable Python"), (None, "cannot be read")])
def test_a_file_that_cannot_be_read_is_told_with_its_name(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        write(tmp_path, mine=text)
    with pytest.raises(InputError, match=told) as caught:
        user_cache_files(tmp_path / "mine.py")
    assert "mine.py" in caught.value.message


def test_what_the_environment_brings_is_not_the_users(tmp_path: Path) -> None:
    write(tmp_path, mine="import toto_compat, torch, toto", toto_compat__cli="", torch__nn="", toto="")
    assert list(user_cache_files(tmp_path / "mine.py")) == ["mine.py"]


def test_a_folder_without_init_is_a_package_too(tmp_path: Path) -> None:
    write(tmp_path, mine="from parts.one import A", parts__one="A = 1", parts__two="")
    assert list(user_cache_files(tmp_path / "mine.py")) == ["mine.py", "parts/one.py", "parts/two.py"]


def test_a_helper_that_is_broken_is_the_cells_to_complain_about(tmp_path: Path) -> None:
    write(tmp_path, mine="import helper", helper="def (")
    assert set(user_cache_files(tmp_path / "mine.py")) == {"mine.py", "helper.py"}
