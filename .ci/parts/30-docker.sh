#!/usr/bin/env bash
# a container engine and a base image, both from Debian packages: the tests marked `docker` run for real
set -euo pipefail
cd "$(dirname "$0")/../.."

case "$1" in
up)
    if ! docker/engine.sh status 2>/dev/null && [ "$(id -u)" != 0 ]; then
        echo "no engine and not root: tests marked docker will be skipped"
        exit 0
    fi
    # with a stand-in for NVIDIA's hook: the tests ask the engine for GPUs, and are refused as the real one refuses
    TOTO_COMPAT_ENGINE_PATH="$PWD/tests/runtimes/nvidia/bin" docker/engine.sh start
    docker/offline-base.sh
    ;;
down)
    if docker/engine.sh status >/dev/null 2>&1; then
        docker ps -aq --filter label=toto-compat | xargs -r docker rm -f >/dev/null
    fi
    docker/engine.sh stop
    ;;
esac
