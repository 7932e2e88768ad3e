#!/usr/bin/env bash
# A real Slurm of two emulated nodes with four declared GPUs each, without accounting:
# cluster.sh up|down|status|place|wait [FOLDER]
#
# Nothing is installed: Debian's packages are unpacked into the folder, and everything runs as the user who calls this,
# on free ports of the loopback. FOLDER/env.sh is what a shell needs to talk to it.
set -euo pipefail
base=$(realpath -m "${2:-${TOTO_COMPAT_SLURM:-${TMPDIR:-/tmp}/toto-compat-slurm-$(id -u)}}")
root=$base/root
libraries=$root/usr/lib/$(uname -m)-linux-gnu
user=$(id -un)
daemons=(n1 n2 slurmctld munged)

unpack() {
    [ ! -e "$root/usr/sbin/slurmd" ] || return 0
    command -v apt-get >/dev/null || { echo "Debian's packages are needed, and there is no apt-get" >&2; return 1; }
    mkdir -p "$base/debs/partial" "$root"
    local wanted=(munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins)
    # what the system has already is not fetched, its libraries are used
    local fetch=(apt-get -qq -y -o Debug::NoLocking=1 -o "Dir::Cache::archives=$base/debs"
        --no-install-recommends --download-only --reinstall install "${wanted[@]}")
    "${fetch[@]}" >"$base/apt.log" 2>&1 || {
        local sudo=""
        [ "$(id -u)" = 0 ] || sudo=sudo
        $sudo apt-get -qq update
        "${fetch[@]}" >"$base/apt.log" 2>&1 || { cat "$base/apt.log" >&2; return 1; }
    }
    for package in "$base"/debs/*.deb; do dpkg -x "$package" "$root"; done
    # under the names `slurmctld-wlm` and `slurmd-wlm` they pass over Gres= in slurm.conf
    for daemon in slurmctld slurmd slurmstepd; do ln -sf "$daemon-wlm" "$root/usr/sbin/$daemon"; done
}

configure() {
    mkdir -p "$base"/{munge,state,spool/n1,spool/n2,log}
    chmod 755 "$base" "$base/munge"
    [ -s "$base/munge/key" ] || (umask 077 && head -c 1024 /dev/urandom >"$base/munge/key")
    local ports
    read -r -a ports < <(python3 -c '
import socket
held = [socket.socket() for _ in range(3)]
for one in held: one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in held))')
    cat >"$base/env.sh" <<END
export PATH=$root/usr/bin:$root/usr/sbin:\$PATH SLURM_CONF=$base/slurm.conf
export LD_LIBRARY_PATH=$libraries:$libraries/slurm-wlm\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
END
    cat >"$base/slurm.conf" <<END
ClusterName=emulated
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$user
SlurmdUser=$user
PluginDir=$libraries/slurm-wlm
AuthInfo=socket=$base/munge/socket,cred_expire=10
SlurmctldPidFile=$base/slurmctld.pid
SlurmdPidFile=$base/%n.pid
StateSaveLocation=$base/state
SlurmdSpoolDir=$base/spool/%n
SlurmctldLogFile=$base/log/slurmctld.log
SlurmdLogFile=$base/log/%n.log
SlurmdParameters=config_overrides
# no cgroups: memory is not held to its limit by Slurm, but by the cell's own supervisor
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
MailProg=/bin/true
SlurmdTimeout=6
MessageTimeout=5
KillWait=2
# a machine that has much else to do takes its time to end a job; that takes no node away
UnkillableStepTimeout=600
MinJobAge=300
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
NodeName=n1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=16 RealMemory=64000 Gres=gpu:a100:4 Weight=2
NodeName=n2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=16 RealMemory=64000 Gres=gpu:a100:4 Weight=1
# on both nodes, n2 first; and on n1 alone, while a test takes n2 away
PartitionName=gpu Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=steady Nodes=n1 MaxTime=INFINITE State=UP
END
    # a GPU must be a device file, and any will do: nobody opens it
    echo "NodeName=n1,n2 Name=gpu Type=a100 File=/dev/null,/dev/zero,/dev/full,/dev/random" >"$base/gres.conf"
}

start() { # one daemon, whatever was there before
    case "$1" in
    munged)
        munged --socket="$base/munge/socket" --key-file="$base/munge/key" --log-file="$base/munge/log" \
            --pid-file="$base/munged.pid" --seed-file="$base/munge/seed"
        ;;
    slurmctld) slurmctld ;;
    *) slurmd -N "$1" -d "$root/usr/sbin/slurmstepd" ;;
    esac
}

stop() {
    local pid
    [ -s "$base/$1.pid" ] && pid=$(cat "$base/$1.pid") && kill "$pid" 2>/dev/null || return 0
    for _ in $(seq 100); do
        kill -0 "$pid" 2>/dev/null || return 0
        sleep 0.05
    done
    kill -9 "$pid" 2>/dev/null || true
}

is_up() {
    [ -e "$base/env.sh" ] || return 1
    # shellcheck source=/dev/null
    . "$base/env.sh"
    [ "$(timeout 10 sinfo -h -N -p gpu -t idle,mix,alloc -o %N 2>/dev/null | wc -l)" = 2 ]
}

case "${1:-}" in
up)
    mkdir -p "$base"
    if is_up; then echo "$base"; exit 0; fi
    unpack
    configure
    # shellcheck source=/dev/null
    . "$base/env.sh"
    start munged
    start slurmctld
    start n1
    start n2
    for _ in $(seq 200); do
        is_up && { echo "$base"; exit 0; }
        sleep 0.1
    done
    tail -n 5 "$base"/log/*.log >&2
    exit 1
    ;;
start | stop) # one daemon of a cluster that is up
    # shellcheck source=/dev/null
    . "$base/env.sh"
    "$1" "${3:?a daemon: ${daemons[*]}}"
    ;;
down)
    [ -e "$base/env.sh" ] || exit 0
    # shellcheck source=/dev/null
    . "$base/env.sh"
    timeout 10 scancel -u "$user" 2>/dev/null || true
    for daemon in "${daemons[@]}"; do stop "$daemon"; done
    # the unpacked packages stay for the next time, what a run left does not
    rm -rf "$base"/{munge,state,spool,log,env.sh,slurm.conf,gres.conf}
    ;;
status) is_up && echo "$base" ;;
place) # of a cluster that was brought up, whether it answers or not
    [ -e "$base/env.sh" ] && echo "$base"
    ;;
wait) # for one that a test has taken something away from, such as a node
    for _ in $(seq 600); do
        is_up && exit 0
        sleep 0.1
    done
    echo "the cluster in $base was brought up and does not answer: $0 down, then $0 up" >&2
    exit 1
    ;;
*)
    echo "usage: $0 up|down|status|place|wait [FOLDER] | start|stop FOLDER DAEMON" >&2
    exit 2
    ;;
esac
