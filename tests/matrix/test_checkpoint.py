"""Where weights come from, decided on the host."""

from pathlib import Path

import pytest

from toto_compat.errors import InputError
from toto_compat.matrix.checkpoint import resolve_checkpoint


def test_a_local_folder_is_taken_relative_to_the_matrix_file(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    resolved = resolve_checkpoint("weights", relative_to=tmp_path)
    assert resolved == folder.resolve()


def test_a_folder_without_weights_says_which_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(InputError, match=r"no model\.safetensors"):
        resolve_checkpoint(str(tmp_path), relative_to=tmp_path)


def test_neither_folder_nor_hub_id_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a folder nor a hub id"):
        resolve_checkpoint("no such thing", relative_to=tmp_path)


def test_a_hub_that_cannot_be_reached_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"organisation/name@main: cannot be fetched"):
        resolve_checkpoint("organisation/name", relative_to=tmp_path)
