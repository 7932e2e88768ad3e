"""The probe of the vector instructions is really done ahead, and a compiler that fails there is nobody's problem."""

import threading
from pathlib import Path
from typing import Any

import pytest

codecache = pytest.importorskip("torch._inductor.codecache")

from toto_compat.model.compiler_head_start import give_compiler_head_start  # noqa: E402

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


def test_a_failing_compiler_is_left_to_the_first_real_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    uncaught: list[object] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)

    def fail(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_pybinding_async", fail)
    give_compiler_head_start().join()
    assert not uncaught
