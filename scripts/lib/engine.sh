# shellcheck shell=bash
# The Docker engine: a running one, else one that is started here.

readonly dockerd_log=/var/log/emergent-dockerd.log
readonly dockerd_pid=/var/run/docker.pid
readonly containerd_pid=/var/run/docker/containerd/containerd.pid
readonly start_limit_seconds=60

engine_id=''
engine_runsc=''

# Reads the engine's state into variables. Call it again after each change of the engine.
engine_look() {
    local answer=''
    engine_id='' engine_runsc=''
    have docker || return 0
    answer=$(bounded 15 docker info \
        --format '{{.ID}}|{{with index .Runtimes "runsc"}}{{.Path}}{{end}}' 2>/dev/null) || true
    case $answer in
    ?*'|'*)
        engine_id=${answer%%|*}
        engine_runsc=${answer#*|}
        ;;
    esac
}

engine_answers() { [ -n "$engine_id" ]; }

# Whether the engine runs on this machine with the default configuration file. Only such an engine can be changed.
engine_is_local() {
    case $DOCKER_HOST in
    unix:///var/run/docker.sock | unix:///run/docker.sock) [ "$(uname -s)" = Linux ] ;;
    *) return 1 ;;
    esac
}

# A server of this user can't use an engine that only root may use.
engine_refuse_denied() {
    local socket=${DOCKER_HOST#unix://}
    if [ "$EUID" -ne 0 ] && [ -S "$socket" ] && [ ! -w "$socket" ]; then
        die "a Docker engine runs, but this user may not use it." \
            "sudo usermod -aG docker $(id -un)   then log in again (this group gives the permissions of root)."
    fi
}

# process_lives PIDFILE NAME: whether the process runs. A zombie ("Z") does not.
process_lives() {
    local pid
    pid=$(as_root cat "$1" 2>/dev/null) || return 1
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ] && ! grep -q '^State:.Z' "/proc/$pid/status"
}

engine_process_lives() { process_lives "$dockerd_pid" dockerd; }

# A crash leaves these files. The next engine then refuses to start, or waits for a containerd that does not run.
engine_drop_stale_pids() {
    process_lives "$dockerd_pid" dockerd || as_root rm -f "$dockerd_pid"
    process_lives "$containerd_pid" containerd || as_root rm -f "$containerd_pid"
}

engine_answers_root() { as_root "$(command -v timeout)" 5 docker -H "$DOCKER_HOST" version >/dev/null 2>&1; }

# engine_wait: waits until the engine answers. Fails when its process has ended.
engine_wait() {
    local started=$SECONDS
    while [ $((SECONDS - started)) -lt "$start_limit_seconds" ]; do
        if engine_answers_root; then return 0; fi
        if [ $((SECONDS - started)) -ge 3 ] && ! engine_process_lives; then break; fi
        sleep 0.2
    done
    echo "the engine does not answer at $DOCKER_HOST $((SECONDS - started)) s after its start"
    [ ! -e "$dockerd_log" ] || as_root tail -n 15 "$dockerd_log"
    return 1
}

# Starts the engine without an init system, in a session of its own, so that it outlives this script and its
# terminal. Descriptor 9 is the lock of this script, and 3 to 8 may belong to make.
engine_start_without_init() {
    engine_drop_stale_pids
    # shellcheck disable=SC2016  # expanded by the inner shell
    as_root setsid --fork sh -c '
        ulimit -n 1048576 2>/dev/null
        cd /
        exec dockerd >>"$1" 2>&1 </dev/null' dockerd "$dockerd_log" 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-
}

engine_start() {
    if [ -d /run/systemd/system ]; then
        as_root systemctl start docker 9>&-
    elif engine_process_lives && engine_wait; then
        return 0
    elif init_is_running && [ -x /etc/init.d/docker ]; then
        as_root service docker start 9>&-
    else
        engine_start_without_init
    fi
    engine_wait
}

ensure_engine() {
    ! engine_answers || return 0
    engine_is_local || die "no Docker engine answers at $DOCKER_HOST." "Start it, or unset DOCKER_HOST to use one on this machine."
    engine_refuse_denied
    need_root "Starting the Docker engine"
    step 'starting the Docker engine' engine_start
    engine_look
    engine_answers || { engine_refuse_denied && die "the Docker engine does not answer at $DOCKER_HOST."; }
}

# The engine reads the runtimes of its configuration again at SIGHUP.
engine_reload() {
    if [ -d /run/systemd/system ]; then
        as_root systemctl reload docker 9>&-
    else
        as_root kill -HUP "$(as_root cat "$dockerd_pid")"
    fi
}

engine_stop() {
    if [ -d /run/systemd/system ]; then
        as_root systemctl stop docker
        return
    fi
    as_root kill "$(as_root cat "$dockerd_pid")"
    local limit=$((SECONDS + start_limit_seconds))
    while engine_process_lives && [ "$SECONDS" -lt "$limit" ]; do sleep 0.2; done
}
