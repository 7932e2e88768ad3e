"""A C++ compiler that compiles the same kernel once per run of the tests.

Every cell of a test begins with an empty folder of compiled kernels, as it must: what is tried is the whole way from
nothing. The compiler at its end gets the same sources hundreds of times. Torch is given this script as `CXX`: what has
the same text and the same options as before is copied. Nothing outlives the run, and no test is about seconds.
"""

import shlex
from pathlib import Path

_SCRIPT = """#!/bin/sh
# Written by tests/compiler_cache.py. Anything but one .cpp that becomes one .so goes straight to the compiler.
compiler={compiler}
kept={kept}
source=$1 output= options= before=
case "$source" in *.cpp) ;; *) exec "$compiler" "$@" ;; esac
for argument; do
    if [ "$before" = -o ]; then
        output=$argument
    elif [ "$argument" != "$source" ]; then
        options="$options
$argument"
    fi
    before=$argument
done
case "$output" in *.so) ;; *) exec "$compiler" "$@" ;; esac
key=$( (printf '%s\\n' "$options"; cat "$source") | sha256sum | cut -c1-64)
if cp "$kept/$key" "$output.$$" 2>/dev/null; then exec mv "$output.$$" "$output"; fi
"$compiler" "$@" || exit
if cp "$output" "$kept/$key.$$" 2>/dev/null; then mv "$kept/$key.$$" "$kept/$key"; fi
exit 0
"""


def write_compiler_cache(folder: Path, compiler: str) -> Path:
    """Write the script that stands for `compiler`, with its own empty memory in `folder`."""
    kept, script = folder / "compiled", folder / "g++"
    kept.mkdir()
    script.write_text(_SCRIPT.format(compiler=shlex.quote(compiler), kept=shlex.quote(str(kept))), encoding="utf-8")
    script.chmod(0o755)
    return script
