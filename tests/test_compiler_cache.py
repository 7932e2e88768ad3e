"""The compiler that the tests run with: what it gives is what the real one gave for the same text and options."""

import subprocess
from pathlib import Path

import pytest

from tests.compiler_cache import write_compiler_cache


class Compiler:
    """The script before a compiler that writes what it was asked, and counts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        real = folder / "the compiler"
        real.write_text(
            f"#!/bin/sh\necho \"$@\" >> '{self.calls}'\nfor last; do :; done\n"
            '[ "$1" = --version ] && { echo "g++ 12"; exit 0; }\n'
            'grep -q broken "$1" && exit 3\n'
            '{ cat "$1"; echo "$@"; } > "$last"\n',
            encoding="utf-8",
        )
        real.chmod(0o755)
        self.script = write_compiler_cache(folder, str(real))

    def compile(self, text: str, place: str, *options: str) -> subprocess.CompletedProcess[str]:
        source = self.folder / f"{place}.cpp"
        source.write_text(text, encoding="utf-8")
        command = [str(self.script), str(source), *options, "-o", str(source.with_suffix(".so"))]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    @property
    def times_called(self) -> int:
        return len(self.calls.read_text(encoding="utf-8").splitlines()) if self.calls.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path)


def test_the_same_text_is_compiled_once_wherever_it_lies(compiler: Compiler) -> None:
    assert compiler.compile("int a;", "one", "-O3", "-shared").returncode == 0
    assert compiler.compile("int a;", "two", "-O3", "-shared").returncode == 0
    assert compiler.times_called == 1
    one, two = (compiler.folder / f"{name}.so" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes() and one.read_text(encoding="utf-8").startswith("int a;")


def test_other_text_or_other_options_are_compiled(compiler: Compiler) -> None:
    compiler.compile("int a;", "one", "-O3")
    compiler.compile("int b;", "one", "-O3")
    compiler.compile("int a;", "one", "-O2")
    compiler.compile("int a;", "one", "-O", "3")
    assert compiler.times_called == 4


def test_what_does_not_compile_fails_every_time(compiler: Compiler) -> None:
    assert [compiler.compile("broken", "one").returncode for _ in range(2)] == [3, 3]
    assert compiler.times_called == 2 and not (compiler.folder / "one.so").exists()


def test_everything_else_goes_to_the_compiler(compiler: Compiler) -> None:
    told = subprocess.run([str(compiler.script), "--version"], capture_output=True, text=True, check=True)
    assert told.stdout == "g++ 12\n"
    source = compiler.folder / "header.cpp"
    source.write_text("int a;", encoding="utf-8")
    for _ in range(2):
        subprocess.run([str(compiler.script), str(source), "-E", "-o", str(compiler.folder / "header.i")], check=True)
    assert compiler.times_called == 3


def test_a_memory_that_cannot_be_written_costs_nothing_but_time(compiler: Compiler) -> None:
    (compiler.folder / "compiled").rmdir()
    assert [compiler.compile("int a;", "one").returncode for _ in range(2)] == [0, 0]
    assert compiler.times_called == 2
