"""The section `slurm` of matrix.yaml: nothing gets into a batch script that is more than the value it is said to be."""

from pathlib import Path

import pytest

from tests.runtimes.stub_runtime import MATRIX_TEXT
from toto_compat.errors import MatrixFileError
from toto_compat.matrix.load import load_matrix, matrix_hash
from toto_compat.matrix.slurm import SlurmSettings


def load(folder: Path, slurm: str) -> SlurmSettings:
    path = folder / "matrix.yaml"
    path.write_text(f"{MATRIX_TEXT}slurm: {slurm}\n", encoding="utf-8")
    return load_matrix(path).slurm


def test_an_environment_asks_for_what_is_its_own_before_the_general(tmp_path: Path) -> None:
    settings = load(
        tmp_path, '{partition: gpu, gres: "gpu:1", environments: {torch-2.9.0-cu128: {gres: "gpu:h100:1"}}}'
    )
    own, general = settings.demands_of("torch-2.9.0-cu128"), settings.demands_of("torch-2.13.0-cpu")
    assert (own.gres, own.partition) == ("gpu:h100:1", "gpu")
    assert general.gres == "gpu:1"


@pytest.mark.parametrize("line", ["module load gcc/12", "export A=b", "source /shared/setup.sh", "ulimit -n 4096"])
def test_words_and_assignments_are_setup_lines(tmp_path: Path, line: str) -> None:
    assert load(tmp_path, f'{{setup: ["{line}"]}}').setup == (line,)


@pytest.mark.parametrize(
    "line",
    [
        "module load a; rm -rf /",
        "a && b",
        "a | b",
        "echo `id`",
        "echo $(id)",
        "echo $HOME",
        "cat > /etc/passwd",
        "a # b",
        "say 'x'",
        "a\\nb",
        "rm *",
        "",
        "back\\\\slash",
        "{a,b}",
    ],
)
def test_a_setup_line_that_a_shell_would_read_as_more_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(MatrixFileError) as raised:
        load(tmp_path, f'{{setup: ["{line}"]}}')
    assert "slurm.setup[0]" in str(raised.value)
    assert f"matrix.yaml:{len(MATRIX_TEXT.splitlines()) + 1}" in str(raised.value)
    assert "source /shared/setup.sh" in str(raised.value)  # what to write instead, and no regular expression


@pytest.mark.parametrize("key", ["partition", "account", "qos", "gres", "constraint", "node_cache"])
@pytest.mark.parametrize("value", ["a b", "a\\n#SBATCH --uid=0", "a;b", "$(id)", "", "-x", "'a'", "a\\n"])
def test_a_value_with_characters_that_it_cannot_have_is_refused(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(MatrixFileError, match=rf"slurm\.{key}"):
        load(tmp_path, f'{{{key}: "{value}"}}')


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("poll_seconds", ".inf"),
        ("poll_seconds", ".nan"),
        ("poll_seconds", "1e9"),
        ("result_grace_seconds", ".inf"),
        ("result_grace_seconds", ".nan"),
        ("retries", "1" + "0" * 20),
        ("minutes", "1" + "0" * 20),
        ("partition", "a" * 100_000),
        ("setup", f"[{'a' * 100_000}]"),
        ("gres", "gpu:1\u0663"),  # a digit, and none of ASCII's
        ("node_cache", "/a/../../etc"),
        ("node_cache", "/.."),
    ],
    ids=lambda value: value[:20],
)
def test_a_value_that_no_cluster_could_mean_is_refused(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(MatrixFileError, match=rf"slurm\.{key}"):
        load(tmp_path, f"{{{key}: {value}}}")


@pytest.mark.parametrize("folder", ["/scratch/toto", "/home/me/.cache/toto-2.0/", "/a"])
def test_a_folder_of_the_nodes_may_be_hidden(tmp_path: Path, folder: str) -> None:
    assert load(tmp_path, f"{{node_cache: {folder}}}").node_cache == folder


def test_an_environment_that_does_not_exist_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(MatrixFileError, match=r"did you mean torch-2\.9\.0-cu128"):
        load(tmp_path, '{environments: {torch-2.9.0-cu12: {gres: "gpu:1"}}}')


def test_where_cells_run_is_no_part_of_what_is_tested(tmp_path: Path) -> None:
    path = tmp_path / "matrix.yaml"
    hashes = set()
    for slurm in ("{partition: a}", "{partition: b}"):
        load(tmp_path, slurm)
        hashes.add(matrix_hash(load_matrix(path)))
    assert len(hashes) == 1
