#!/usr/bin/env bash
# a real Slurm of two emulated nodes from Debian packages, for the tests marked `slurm`
set -euo pipefail
cd "$(dirname "$0")/../.."

case "$1" in
up | down) tests/runtimes/slurm/cluster.sh "$1" ;;
esac
