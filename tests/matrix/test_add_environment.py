"""An environment put into the text of a matrix file: in its place, and not a byte of the rest is another."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from toto_compat.contract.request import Environment
from toto_compat.errors import MatrixFileError, StorageError
from toto_compat.matrix.add_environment import most_similar, with_environment, write_matrix
from toto_compat.matrix.load import load_matrix

REPOSITORY = Path(__file__).parents[2]
REST = """\
caches: {upstream: {source: builtin}}
settings: {stock: {}}
modes: [default]
profiles: {quick: {iterations: 1, workloads: [tiny]}}
workloads: {tiny: {}}
"""
SMALL = f"""\
schema: 1
# above
environments:  # beside
  torch-2.9.0-cpu:
    torch: "2.9.0"
    build: cpu # why
    pins: &pins {{einops: "0.7.0"}}

  # of 2.13
  torch-2.13.0-cpu:
    torch: "2.13.0"
    build: cpu
    # inside, at its end
# far left, of what follows

{REST}"""


def environment(torch: str, build: str = "cpu", **fields: object) -> Environment:
    return Environment(torch=torch, build=build, **fields)  # type: ignore[arg-type]


def added(folder: Path, text: str, torch: str, build: str = "cpu", **fields: object) -> str:
    path = folder / "matrix.yaml"
    path.write_bytes(text.encode())
    edited = with_environment(path, f"torch-{torch}-{build}", environment(torch, build, **fields))
    assert path.read_bytes() == text.encode(), "nothing is written until it is asked for"
    write_matrix(edited)
    assert [one.name for one in folder.iterdir()] == ["matrix.yaml"], "no file is left beside it"
    return path.read_bytes().decode()


def is_all_else(text: str, after: str, name: str, newline: str = "\n") -> bool:
    """Tell if the text is what is left without the lines of an environment and the blank lines around them."""
    lines = after.split(newline)
    start = next(number for number, line in enumerate(lines) if line.strip() == f"{name}:")
    end = start + 1
    while end < len(lines) and lines[end].startswith("    ") and not lines[end].lstrip().startswith("#"):
        end += 1
    before, behind = (lines[:start], lines[end:])
    left = [[*before[:first], *behind[second:]] for first, second in ((None, 1), (-1, 0), (-1, 1))]
    return text in [newline.join(one) for one in left]


@pytest.mark.parametrize("torch", ["2.3.1", "2.10.0", "2.14.1", "2.16.0rc1", "2.17.0.dev20261116"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_all_else_stays_as_it_was_written(tmp_path: Path, torch: str, newline: str) -> None:
    text = SMALL.replace("\n", newline)
    after = added(tmp_path, text, torch)
    assert is_all_else(text, after, f"torch-{torch}-cpu", newline)
    releases = [one.torch for one in load_matrix(tmp_path / "matrix.yaml").environments.values()]
    assert releases == sorted(releases, key=Version)


def test_it_stands_behind_the_newest_older_release_and_before_the_comment_of_the_next(tmp_path: Path) -> None:
    after = added(tmp_path, SMALL, "2.10.0", pins={"einops": "0.7.0"})
    wanted = '  torch-2.10.0-cpu:\n    torch: "2.10.0"\n    build: cpu\n'
    assert f'pins: &pins {{einops: "0.7.0"}}\n\n{wanted}' in after
    assert "    pins: *pins\n\n  # of 2.13\n" in after, "pins are named by the anchor that holds them"


def test_the_last_one_stands_before_what_follows_the_section(tmp_path: Path) -> None:
    after = added(tmp_path, SMALL, "2.14.1")
    assert after.index("# inside, at its end") < after.index("torch-2.14.1-cpu:") < after.index("# far left")


def test_a_file_that_ends_with_its_environments_and_no_newline_takes_one_more(tmp_path: Path) -> None:
    text = f'schema: 1\n{REST}environments:\n  torch-2.9.0-cpu:\n    torch: "2.9.0"\n    build: cpu'
    after = added(tmp_path, text, "2.10.0")
    assert after.startswith(text)
    assert set(load_matrix(tmp_path / "matrix.yaml").environments) == {"torch-2.9.0-cpu", "torch-2.10.0-cpu"}


def test_pins_without_an_anchor_are_written_out(tmp_path: Path) -> None:
    added(tmp_path, SMALL, "2.10.0", pins={"numpy": "2.1.3"})
    assert load_matrix(tmp_path / "matrix.yaml").environments["torch-2.10.0-cpu"].pins == {"numpy": "2.1.3"}


def test_a_section_that_lines_cannot_be_put_into_is_told_with_its_line(tmp_path: Path) -> None:
    text = f'schema: 1\nenvironments: {{torch-2.9.0-cpu: {{torch: "2.9.0", build: cpu}}}}\n{REST}'
    (tmp_path / "matrix.yaml").write_text(text)
    with pytest.raises(MatrixFileError, match=r"matrix\.yaml:2: .*lines cannot be put into"):
        with_environment(tmp_path / "matrix.yaml", "torch-2.10.0-cpu", environment("2.10.0"))
    assert (tmp_path / "matrix.yaml").read_text() == text


def test_an_environment_that_is_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "matrix.yaml").write_text(SMALL)
    with pytest.raises(MatrixFileError, match="already"):
        with_environment(tmp_path / "matrix.yaml", "torch-2.9.0-cpu", environment("2.9.0"))


def test_an_environment_that_does_not_fit_the_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "matrix.yaml").write_text(SMALL)
    with pytest.raises(MatrixFileError):
        with_environment(tmp_path / "matrix.yaml", "torch-2.10.0-cu128", environment("2.10.0"))
    assert (tmp_path / "matrix.yaml").read_text() == SMALL


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "matrix.yaml").write_text(SMALL)
    link = tmp_path / "matrix.yaml"
    link.symlink_to(real / "matrix.yaml")
    write_matrix(with_environment(link, "torch-2.10.0-cpu", environment("2.10.0")))
    assert link.is_symlink()
    assert "torch-2.10.0-cpu" in load_matrix(real / "matrix.yaml").environments


@settings(max_examples=12, deadline=None)
@given(minor=st.integers(0, 30), patch=st.integers(0, 9), build=st.sampled_from(["cpu", "cu121", "cu130"]))
def test_the_matrix_that_is_shipped_takes_any_release(
    tmp_path_factory: pytest.TempPathFactory, minor: int, patch: int, build: str
) -> None:
    folder = tmp_path_factory.mktemp("matrix")
    text = (REPOSITORY / "matrix.yaml").read_text()
    torch = f"2.{minor}.{patch}"
    before = load_matrix(REPOSITORY / "matrix.yaml")
    if f"torch-{torch}-{build}" in before.environments:
        return
    model = most_similar(before, Version(torch), build)
    after = added(folder, text, torch, build, pins=model.pins, base_image="python:3.12-slim", python="3.12")
    assert is_all_else(text, after, f"torch-{torch}-{build}")


def test_every_line_keeps_the_line_end_that_it_has(tmp_path: Path) -> None:
    mixed = SMALL.replace("\n", "\r\n", 7)
    after = added(tmp_path, mixed, "2.16.0")
    start = after.index("torch-2.16.0-cpu")
    new = after[start - 3 : after.index("# far left")]
    assert after.replace(new, "") in (mixed, mixed.replace("\n\n# far left", "\n# far left"))
    assert after.count("\r\n") == 7


def test_a_last_line_without_an_end_gets_the_files_own(tmp_path: Path) -> None:
    plain = f'schema: 1\n{REST}environments:\n  torch-2.9.0-cpu:\n    torch: "2.9.0"\n    build: cpu'
    windows = plain.replace("\n", "\r\n")
    after = added(tmp_path, windows, "2.16.0")
    assert after.startswith(windows + "\r\n")
    assert "\n" not in after.replace("\r\n", "")


def test_environments_without_blank_lines_between_them_get_none(tmp_path: Path) -> None:
    dense = SMALL.replace("\n\n  # of 2.13", "\n  # of 2.13")
    assert '"2.9.0"\n    build: cpu # why' in dense
    after = added(tmp_path, dense, "2.12.0")
    assert "\n\n  torch-2.12.0-cpu" not in after and "\n  torch-2.12.0-cpu:" in after


def test_line_ends_of_another_age_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_bytes(SMALL.replace("\n", "\r").encode())
    with pytest.raises(MatrixFileError, match="line ends"):
        with_environment(path, "torch-2.16.0-cpu", environment("2.16.0"))


def test_what_somebody_saved_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text(SMALL)
    one, other = (with_environment(path, f"torch-{torch}-cpu", environment(torch)) for torch in ("2.16.0", "2.17.0"))
    write_matrix(one)
    with pytest.raises(StorageError, match="changed by somebody else"):
        write_matrix(other)
    assert set(load_matrix(path).environments) == {"torch-2.9.0-cpu", "torch-2.13.0-cpu", "torch-2.16.0-cpu"}


def test_an_edit_that_would_not_be_valid_names_the_users_file(tmp_path: Path) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text(SMALL)
    strange = environment("2.16.0").model_copy(update={"python": "three"})
    with pytest.raises(MatrixFileError, match="would not be valid") as told:
        with_environment(path, "torch-2.16.0-cpu", strange)
    assert str(path) in told.value.message and ".matrix-" not in str(told.value)
    assert [one.name for one in tmp_path.iterdir()] == ["matrix.yaml"]
