# shellcheck shell=bash
# gVisor as the engine's runtime `runsc`. A runtime that works is not changed. Otherwise runsc is registered, with
# a wrapper if the kernel needs one (see scripts/runsc-wrapper).

readonly daemon_json=/etc/docker/daemon.json
readonly wrapper=/usr/local/lib/emergent/runsc-wrapper
readonly verified_stamp=$cache_dir/runsc-verified

gvisor_wrapper_text() { sed "s|@RUNSC@|$(command -v runsc)|" "$repo_root/scripts/runsc-wrapper"; }

# False if the registered runtime is another version of our wrapper.
gvisor_wrapper_is_current() {
    [ "$engine_runsc" != "$wrapper" ] || gvisor_wrapper_text | cmp -s - "$wrapper"
}

# The state that the test of the runtime depends on. After a change of any part the runtime is tested again.
gvisor_fingerprint() {
    cat /proc/sys/kernel/random/boot_id
    echo "$engine_id $engine_runsc"
    stat -L -c '%n %s %Y' "$engine_runsc" "$(command -v runsc || echo /)" "$daemon_json" 2>/dev/null || true
}

gvisor_is_verified() { gvisor_fingerprint | cmp -s - "$verified_stamp"; }

gvisor_is_ready() { [ -n "$engine_runsc" ] && gvisor_wrapper_is_current && gvisor_is_verified; }

# Whether a new network namespace shows the file by which runsc recognises the host's namespace.
gvisor_needs_wrapper() { as_root unshare --net test -e /proc/sys/net/core/rmem_default; }

gvisor_install_wrapper() {
    gvisor_wrapper_text | as_root install -D -m 755 /dev/stdin "$wrapper"
}

# Without this argument of newer versions, changes to the root filesystem are kept in memory, and lost when a
# workspace is stopped.
gvisor_arguments() {
    case $(runsc flags 2>&1 || true) in
    *-overlay2*) echo '["--overlay2=none"]' ;;
    *) echo '[]' ;;
    esac
}

# gvisor_daemon_json PATH: the engine's configuration with the runtime added.
gvisor_daemon_json() {
    { as_root cat "$daemon_json" 2>/dev/null || echo '{}'; } |
        jq --arg path "$1" --argjson arguments "$(gvisor_arguments)" \
            '.runtimes.runsc = {path: $path, runtimeArgs: $arguments}'
}

gvisor_write_daemon_json() {
    local text
    text=$(gvisor_daemon_json "$1") || {
        echo "$daemon_json is not valid JSON: correct it, then run this again"
        return 1
    }
    if as_root test -e "$daemon_json"; then
        if [ "$text" = "$(as_root jq . "$daemon_json")" ]; then return 0; fi
        as_root cp -p "$daemon_json" "$daemon_json.before-emergent-$(date +%Y%m%d%H%M%S)"
    fi
    echo "$text" | as_root install -D -m 644 /dev/stdin "$daemon_json.new"
    as_root mv "$daemon_json.new" "$daemon_json"
}

gvisor_register() {
    local path
    path=$(command -v runsc)
    if gvisor_needs_wrapper; then
        gvisor_install_wrapper
        path=$wrapper
    fi
    gvisor_write_daemon_json "$path"
    ! engine_answers || gvisor_activate "$path"
}

# gvisor_activate PATH: makes a running engine use the runtime.
gvisor_activate() {
    local attempt
    engine_reload
    for attempt in {1..25}; do
        engine_look
        [ "$engine_runsc" != "$1" ] || return 0
        sleep 0.2
    done
    echo "the engine did not load the runtime at SIGHUP (after $attempt checks)"
    if [ -n "$(bounded 15 docker ps -q)" ]; then
        echo 'containers are running: restart the Docker engine yourself, then run this again'
        return 1
    fi
    engine_stop
    engine_start
    engine_look
    [ "$engine_runsc" = "$1" ]
}

# Whether the engine has the runtime, or will have it when it starts.
gvisor_is_configured() {
    engine_answers || jq -e .runtimes.runsc "$daemon_json" >/dev/null 2>&1
}

ensure_runtime_registered() {
    if [ -n "$engine_runsc" ] && gvisor_wrapper_is_current; then return 0; fi
    engine_is_local || die "the engine at $DOCKER_HOST has no runtime runsc." \
        'Install gVisor there: https://gvisor.dev/docs/user_guide/install/'
    need_root 'Registering the runtime runsc'
    step 'registering gVisor with the engine' gvisor_register
    engine_look
}

# Starts a container twice. It must run on gVisor, have a network, and keep a file outside of volumes.
gvisor_probe() {
    local container output
    container=$(bounded 30 docker create --runtime=runsc --label emergent.setup=probe "$workspace_image" \
        sh -c 'dmesg | grep -i gvisor && if [ -e /kept ]; then echo kept; else touch /kept; fi') || return
    # shellcheck disable=SC2064  # the id is known now
    trap "bounded 30 docker rm -f $container" EXIT
    bounded 60 docker start -a "$container" || return
    output=$(bounded 60 docker start -a "$container") || return
    case $output in
    *kept*) ;;
    *)
        echo 'the runtime runsc loses changes to the root filesystem at stop:'
        echo "add --overlay2=none to its runtimeArgs in $daemon_json"
        return 1
        ;;
    esac
}

gvisor_remember() {
    mkdir -p "$cache_dir"
    gvisor_fingerprint >"$verified_stamp"
}

# A registered runtime that does not work is replaced. The old configuration is kept beside the new one.
ensure_runtime_works() {
    ! gvisor_is_verified || return 0
    if step 'starting a gVisor container' gvisor_probe; then
        gvisor_remember
        return 0
    fi
    engine_is_local || die "the runtime runsc of the engine at $DOCKER_HOST does not work."
    have runsc || { need_root 'Installing gVisor' && step 'installing runsc' apt_install runsc; }
    need_root 'Registering the runtime runsc'
    step 'registering gVisor again' gvisor_register
    engine_look
    step 'starting a gVisor container' gvisor_probe ||
        die 'gVisor does not work on this machine.' 'For details: emergent doctor'
    gvisor_remember
}
