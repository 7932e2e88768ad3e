#!/bin/sh
# A container engine on a machine that has none: Debian's docker.io, started by hand where no init system does it.
#   docker/engine.sh start    install (as root, with apt) and start dockerd unless an engine already answers
#   docker/engine.sh stop     stop the dockerd that `start` started; leaves any other engine alone
#   docker/engine.sh status   exit 0 if an engine answers
# TOTO_COMPAT_ENGINE_PATH: a folder before the engine's PATH; it looks for NVIDIA's hook there, once, when it starts.
set -eu

socket="${DOCKER_HOST:-unix:///var/run/docker.sock}"
state="${TOTO_COMPAT_ENGINE_STATE:-/var/lib/toto-compat-engine}"
pid_file="$state/dockerd.pid"
log="$state/dockerd.log"

answers() {
    docker version --format '{{.Server.Version}}' >/dev/null 2>&1
}

wait_for_answer() {
    tries=0
    while ! answers; do
        tries=$((tries + 1))
        if [ "$tries" -gt 60 ] || { [ -n "${1:-}" ] && ! kill -0 "$1" 2>/dev/null; }; then
            return 1
        fi
        sleep 0.5
    done
}

# One that was killed stays in the table as a zombie until its parent looks, which on some machines takes minutes.
is_dead() {
    case "$(ps -o stat= -p "$1" 2>/dev/null)" in "" | Z*) return 0 ;; *) return 1 ;; esac
}

is_running() {
    for pid in $(pgrep -x dockerd); do
        is_dead "$pid" || return 0
    done
    return 1
}

install_packages() {
    if command -v dockerd >/dev/null 2>&1 && command -v docker >/dev/null 2>&1 && command -v iptables >/dev/null 2>&1; then
        return
    fi
    command -v apt-get >/dev/null 2>&1 || {
        echo "error: dockerd is not installed and this is not a Debian system; install Docker for it first" >&2
        exit 1
    }
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends docker.io iptables ca-certificates
}

start() {
    if answers; then
        echo "engine $(docker version --format '{{.Server.Version}}') already answers at $socket"
        return
    fi
    case "$socket" in
    unix:///var/run/docker.sock) ;;
    *) echo "error: DOCKER_HOST is $socket and does not answer; start that engine, or unset DOCKER_HOST" >&2; exit 1 ;;
    esac
    [ "$(id -u)" = 0 ] || { echo "error: starting an engine needs root: sudo $0 start" >&2; exit 1; }
    install_packages
    # A second dockerd takes the network bridge away from the first one: wait for the one that is there.
    tries=0
    while is_running; do
        if answers; then
            echo "engine was starting already, and answers"
            return
        fi
        tries=$((tries + 1))
        [ "$tries" -le 60 ] || { echo "error: dockerd runs but does not answer; look at its log, or stop it first" >&2; exit 1; }
        sleep 0.5
    done
    mkdir -p "$state"
    rm -f /var/run/docker.pid
    # dockerd takes a zombie for the containerd that it left behind, and waits for its answer in vain
    containerd_pid=$(cat /var/run/docker/containerd/containerd.pid 2>/dev/null || true)
    if [ -n "$containerd_pid" ] && is_dead "$containerd_pid"; then rm -f /var/run/docker/containerd/containerd.pid; fi
    PATH="${TOTO_COMPAT_ENGINE_PATH:+$TOTO_COMPAT_ENGINE_PATH:}$PATH" setsid dockerd >"$log" 2>&1 </dev/null &
    pid=$!
    echo "$pid" >"$pid_file"
    wait_for_answer "$pid" || {
        echo "error: dockerd did not come up; its last lines:" >&2
        tail -n 15 "$log" >&2
        exit 1
    }
    echo "engine $(docker version --format '{{.Server.Version}}') started, log in $log"
}

stop() {
    [ -f "$pid_file" ] || { echo "no engine was started by this script"; return; }
    pid=$(cat "$pid_file")
    # The number may belong to another program by now.
    if [ "$(cat "/proc/$pid/comm" 2>/dev/null || true)" = dockerd ]; then
        kill "$pid"
        tries=0
        while kill -0 "$pid" 2>/dev/null && [ "$tries" -lt 60 ]; do
            tries=$((tries + 1))
            sleep 0.5
        done
    fi
    rm -f "$pid_file"
    echo "engine stopped"
}

case "${1:-}" in
start) start ;;
stop) stop ;;
status) answers || { echo "no engine answers at $socket"; exit 1; } ;;
*) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
