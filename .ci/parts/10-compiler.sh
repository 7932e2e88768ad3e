#!/usr/bin/env bash
# inductor on a CPU compiles C++ against Python.h, and python3 must be able to make virtualenvs
set -euo pipefail
[ "$1" = up ] || exit 0

missing=()
command -v g++ >/dev/null || missing+=(g++)
python3 -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' ||
    missing+=(python3-dev)
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
[ ${#missing[@]} -gt 0 ] || exit 0

sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo
$sudo apt-get update -q
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -q -y --no-install-recommends "${missing[@]}"
