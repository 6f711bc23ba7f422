#!/usr/bin/env bash
# A Slurm of one node with accounting, on this machine alone, for the tests of jobs.
# Needs root and Debian's slurm-wlm, munge, slurmdbd and mariadb-server.
#
#     eval "$(scripts/one_node_slurm.sh start)"    # exports SLURM_CONF
#     scripts/one_node_slurm.sh stop
set -euo pipefail
folder=${SLURM_FOLDER:-/tmp/minivllm-slurm} # short: it holds sockets
node=$(hostname -s)
wait_s=60

fail() {
    echo "one_node_slurm: $1" >&2
    exit 1
}

# Waits until a command succeeds.
await() {
    local what=$1
    shift
    for _ in $(seq $((wait_s * 5))); do
        "$@" >/dev/null 2>&1 && return
        sleep 0.2
    done
    fail "$what does not answer; see $folder/*.log"
}

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

configure() {
    local memory_mb ports=()
    memory_mb=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
    for _ in 1 2 3 4; do ports+=("$(free_port)"); done
    mkdir -p "$folder"/{state,spool,munge,sql}
    chmod 755 "$folder" "$folder/munge"
    dd if=/dev/urandom of="$folder/munge.key" bs=128 count=1 status=none
    chmod 400 "$folder/munge.key"
    sql_port=${ports[3]}
    # The kernel enforces a job's memory where control groups can be made; else Slurm looks each second.
    local task=task/none memory_rule=JobAcctGatherParams=OverMemoryKill
    if mkdir /sys/fs/cgroup/memory/minivllm-probe 2>/dev/null; then
        rmdir /sys/fs/cgroup/memory/minivllm-probe
        task=task/cgroup memory_rule=
    fi
    printf '%s\n' CgroupMountpoint=/sys/fs/cgroup CgroupPlugin=cgroup/v1 ConstrainRAMSpace=yes \
        ConstrainSwapSpace=yes AllowedSwapSpace=0 >"$folder/cgroup.conf"
    cat >"$folder/slurm.conf" <<CONF
ClusterName=tests
SlurmctldHost=$node(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=$task
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
$memory_rule
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmctldParameters=enable_configless
SlurmdParameters=config_overrides # eight CPUs, whatever the machine has
KillWait=5
OverTimeLimit=0
MinJobAge=300
MailProg=/bin/true
ReturnToService=2
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=${ports[2]}
AccountingStoragePass=$folder/munge/socket
GresTypes=gpu
NodeName=$node NodeAddr=127.0.0.1 CPUs=8 RealMemory=$memory_mb Gres=gpu:1 Features=h100 State=UNKNOWN
PartitionName=all Nodes=$node Default=YES MaxTime=INFINITE State=UP
PartitionName=gpu Nodes=$node MaxTime=INFINITE State=UP
CONF
    echo "Name=gpu File=/dev/null" >"$folder/gres.conf" # a GPU in name, for the settings of jobs
    cat >"$folder/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
DbdHost=localhost
DbdPort=${ports[2]}
SlurmUser=root
LogFile=$folder/slurmdbd.log
PidFile=$folder/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$sql_port
StorageUser=root
StoragePass=tests
StorageLoc=accounting
CONF
    chmod 600 "$folder/slurmdbd.conf"
}

start() {
    local program
    for program in munged mariadbd slurmdbd slurmctld slurmd sacctmgr; do
        command -v "$program" >/dev/null || fail "$program is missing"
    done
    stop
    rm -rf "${folder:?}"
    configure
    munged --force --key-file="$folder/munge.key" --socket="$folder/munge/socket" \
        --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
    mariadb-install-db --user=root --datadir="$folder/sql" --auth-root-authentication-method=normal \
        >"$folder/sql_install.log" 2>&1
    setsid mariadbd --no-defaults --user=root --datadir="$folder/sql" --socket="$folder/sql.sock" \
        --port="$sql_port" --bind-address=127.0.0.1 --pid-file="$folder/mariadbd.pid" \
        >"$folder/mariadbd.log" 2>&1 </dev/null &
    await MariaDB mariadb --no-defaults -S "$folder/sql.sock" -u root -e 'select 1'
    mariadb --no-defaults -S "$folder/sql.sock" -u root \
        -e "alter user root@localhost identified by 'tests';" >&2
    export SLURM_CONF="$folder/slurm.conf"
    slurmdbd >&2
    await slurmdbd sacctmgr -i show cluster
    sacctmgr -i add cluster tests >/dev/null 2>&1 || true
    slurmctld >&2
    slurmd >&2
    await "the node" sh -c "sinfo -h -o %T | grep -q idle"
    echo "export SLURM_CONF=$folder/slurm.conf"
}

stop() {
    local name pid
    for name in slurmd slurmctld slurmdbd mariadbd munged; do
        [ -f "$folder/$name.pid" ] || continue
        pid=$(cat "$folder/$name.pid")
        [ "$(ps -o comm= -p "$pid")" = "$name" ] && kill "$pid" || true # it may be another's by now
    done
}

case ${1:-} in
start)
    trap stop EXIT # a start that fails leaves nothing behind
    start
    trap - EXIT
    ;;
stop) stop ;;
*) fail "start or stop" ;;
esac
