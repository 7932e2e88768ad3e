"""Where weights come from, decided on the host."""

import os
from pathlib import Path

import pytest

from toto_compat.errors import InputError
from toto_compat.matrix.checkpoint import checkpoint_name, resolve_checkpoint, with_checkpoint
from toto_compat.matrix.load import load_matrix

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
MATRIX = load_matrix(Path(__file__).parent.parent.parent / "matrix.yaml")


def test_a_local_folder_is_taken_relative_to_the_matrix_file(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").touch()
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    resolved = resolve_checkpoint("weights", relative_to=tmp_path)
    assert resolved == folder.resolve()


def test_a_folder_without_weights_says_which_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(InputError, match=r"no model\.safetensors"):
        resolve_checkpoint(str(tmp_path), relative_to=tmp_path)


@pytest.mark.parametrize("named", ["no such thing", "a/b@", "a/b@../../c", "a/b@x/../../c", "a/b\n"])
def test_neither_folder_nor_hub_id_is_an_input_error(tmp_path: Path, named: str) -> None:
    with pytest.raises(InputError, match="neither a folder nor a hub id"):
        resolve_checkpoint(named, relative_to=tmp_path)


def test_an_empty_word_is_not_the_folder_that_it_would_be_relative_to(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(NO_TENSORS)
    with pytest.raises(InputError, match="no checkpoint is named"):
        resolve_checkpoint("", relative_to=tmp_path)


def test_a_hub_that_cannot_be_reached_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"organisation/name@main: cannot be fetched"):
        resolve_checkpoint("organisation/name", relative_to=tmp_path)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder that looks like a checkpoint of `base`'s shape."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text('{"patch_size": 64, "stride": 64}')
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    return folder


def test_weights_of_the_command_line_replace_the_profiles_own(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(weights.parent)
    changed = with_checkpoint(MATRIX, ["quick"], "weights")
    assert changed.workloads["quick"].checkpoint == str(weights)
    assert changed.workloads["quick"].model == "base"
    assert changed.workloads["groups"] == MATRIX.workloads["groups"]
    hub = with_checkpoint(MATRIX, ["quick"], "Datadog/Toto-Open-Base-1.0@0123abc").workloads["quick"]
    assert hub.checkpoint == "Datadog/Toto-Open-Base-1.0@0123abc"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{}", "its patches have None points"),
        ('{"stride": 48}', "its patches have 48"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_checkpoint_of_another_shape_is_told_before_anything_runs(weights: Path, config: str, message: str) -> None:
    (weights / "config.json").write_text(config)
    with pytest.raises(InputError, match=message):
        with_checkpoint(MATRIX, ["quick"], str(weights))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"not weights at all", "does not begin with a header"),
        ((9).to_bytes(8, "little") + b"{}", "does not begin with a header"),
    ],
)
def test_weights_that_cannot_be_loaded_are_told_before_anything_runs(weights: Path, content: bytes, why: str) -> None:
    (weights / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=why):
        resolve_checkpoint(str(weights), relative_to=weights)


def test_a_pipe_in_the_place_of_weights_is_not_waited_for(weights: Path) -> None:
    (weights / "model.safetensors").unlink()
    os.mkfifo(weights / "model.safetensors")
    with pytest.raises(InputError, match=r"no model\.safetensors"):
        resolve_checkpoint(str(weights), relative_to=weights)


@pytest.mark.parametrize("named", ["", "no such folder", "../none", "a/b/c@1", "/none"])
def test_weights_that_are_nowhere_are_told(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="checkpoint"):
        with_checkpoint(MATRIX, ["quick"], named)


def test_the_provenance_names_the_commit_or_what_is_in_the_folder(weights: Path, tmp_path: Path) -> None:
    assert checkpoint_name(str(weights), weights).startswith("weights (sha256 of model.safetensors: ")
    snapshot = tmp_path / "snapshots" / "0123abc"
    assert checkpoint_name("Datadog/Toto@main", snapshot) == "Datadog/Toto@0123abc"


def test_a_name_that_is_too_long_for_a_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nnn: cannot be read: File name too long"):
        resolve_checkpoint("n" * 300, relative_to=tmp_path)
