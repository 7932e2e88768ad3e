"""A cell gets what torch reads of production's variables, and nothing that reaches through its walls."""

from pathlib import Path

import pytest

from toto_compat.errors import InputError
from toto_compat.matrix.load import load_matrix
from toto_compat.repro.incident import load_incident
from toto_compat.repro.reproduce import incident_request
from toto_compat.repro.variables import checked_variables, why_refused

ROOT = Path(__file__).parents[2]
INCIDENT = ROOT / "incidents" / "2025-10-30-recompile-limit.yaml"


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "HOME", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSTARTUP", "TMPDIR", "CXX", "USER"),
        *("TOTO_COMPAT_CACHE", "DOCKER_HOST", "http_proxy", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "BASH_ENV"),
        *("CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_LOGS", "TORCH_TRACE"),
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "CUDA_MPS_PIPE_DIRECTORY", "OMP_TOOL_LIBRARIES"),
        *("TORCH_HOME", "CUDA_HOME", "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH", "CUDA_INJECTION64_PATH"),
        *("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "OMP_NUM_THREADS", "TOTO_COMPILE_MODE", "", "torch_x"),
    ],
)
def test_a_variable_that_could_break_isolation_or_make_the_cell_blind_is_refused(name: str) -> None:
    assert why_refused(name, "1")
    with pytest.raises(InputError, match="is not passed into a cell"):
        checked_variables({name: "1"})


@pytest.mark.parametrize(
    "name", ["TORCHINDUCTOR_FREEZING", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"]
)
def test_what_torch_and_its_libraries_read_reaches_the_cell(name: str) -> None:
    incident = load_incident(INCIDENT).model_copy(update={"variables": {name: "1"}})
    matrix = load_matrix(ROOT / "matrix.yaml")
    request = incident_request(incident, ROOT, matrix, ROOT / "matrix.yaml")
    plain = incident_request(load_incident(INCIDENT), ROOT, matrix, ROOT / "matrix.yaml")
    assert request.variables == {**plain.variables, name: "1"}


def test_a_refused_variable_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "incident.yaml"
    path.write_text(f"variables:\n  LD_PRELOAD: /tmp/x.so\n{INCIDENT.read_text()}")
    with pytest.raises(InputError, match=r":2: variables.LD_PRELOAD: found the variable LD_PRELOAD; accepted others"):
        load_incident(path)


@pytest.mark.parametrize("name", ["TOTO_LOGIN", "TOTO_PSK", "TOTO_DB", "TOTO_COMPILE_MODES"])
def test_a_name_that_only_looks_like_toto_compats_own_is_refused(name: str) -> None:
    assert why_refused(name, "1").startswith("nothing reads it: toto-compat's own are TOTO_DISABLE_COMPILE, ")


def test_what_toto_compat_reads_and_no_key_says_may_stand_in_an_incident() -> None:
    assert checked_variables({"TOTO_COMPILE_FORCE": "1"}) == {"TOTO_COMPILE_FORCE": "1"}
