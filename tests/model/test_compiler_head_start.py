"""The probe of the vector instructions is really done ahead, and a compiler that fails there is nobody's problem."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

codecache = pytest.importorskip("torch._inductor.codecache")

from torch._inductor import config  # noqa: E402

from toto_compat.model.bound import CompileSpec  # noqa: E402
from toto_compat.model.compile_step import _lowering  # noqa: E402
from toto_compat.model.compiler_head_start import give_compiler_head_start, vectors_are_known_to_work  # noqa: E402

pytestmark = pytest.mark.cell


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    give_compiler_head_start.cache_clear()


def test_the_compiler_is_asked_once_and_only_for_what_every_kernel_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    probes = []
    pick_vec_isa = codecache.pick_vec_isa

    def counted() -> Any:
        probes.append(1)
        return pick_vec_isa()

    monkeypatch.setattr(codecache, "pick_vec_isa", counted)
    thread = give_compiler_head_start()
    assert give_compiler_head_start() is thread
    thread.join()
    assert probes == [1]
    (source,) = (path for path in tmp_path.rglob("*.cpp") if "float* out_ptr0" in path.read_text(encoding="utf-8"))
    assert not source.with_suffix(".so").exists()


# Picks the vectors as a first compile would, with or without torch's own word for them; says which, and what was built.
PICK = """
import json, resource, sys
from pathlib import Path
import torch
from torch._inductor import config
from torch._inductor.cpu_vec_isa import pick_vec_isa
from toto_compat.model.compiler_head_start import vectors_are_known_to_work

known = vectors_are_known_to_work() and sys.argv[2] == "known"
with config.patch({"cpp.vec_isa_ok": True} if known else {}):
    picked = pick_vec_isa()
sources = [path.read_text() for path in Path(sys.argv[1]).rglob("*.cpp")]
children = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({
    "known": known,
    "picked": [str(picked), picked.build_arch_flags(), picked.build_macro()],
    "proofs": sum("at::vec" in source for source in sources),
    "seconds": children.ru_utime + children.ru_stime,
}))
"""


def test_vectors_that_are_taken_for_granted_are_those_that_inductor_would_have_proven(tmp_path: Path) -> None:
    found = {}
    for how in ("known", "proven"):
        folder = tmp_path / how
        folder.mkdir()
        variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
        variables.pop("TORCHINDUCTOR_VEC_ISA_OK", None)
        done = subprocess.run(
            [sys.executable, "-c", PICK, str(folder), how], env=variables, capture_output=True, text=True, check=True
        )
        found[how] = json.loads(done.stdout)
    assert found["known"]["picked"] == found["proven"]["picked"]
    assert found["proven"]["proofs"] > 0
    assert found["known"]["proofs"] == (0 if found["known"]["known"] else found["proven"]["proofs"])


def test_a_failing_compiler_is_left_to_the_first_real_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    uncaught: list[object] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)

    def fail(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_pybinding_async", fail)
    give_compiler_head_start().join()
    assert not uncaught


def test_an_option_without_a_type_is_not_given_to_releases_that_take_none_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every compile of fixed_size raised on 2.4.1 and 2.5.1: `Unexpected type of attr cpp.vec_isa_ok`."""
    assert ("cpp.vec_isa_ok" in _lowering(CompileSpec())["options"]) is vectors_are_known_to_work()
    for one in type(config).__mro__:
        if "get_type" in vars(one):
            monkeypatch.delattr(one, "get_type")
    assert "cpp.vec_isa_ok" not in _lowering(CompileSpec())["options"]
