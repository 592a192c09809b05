# shellcheck shell=bash
# What every script of this repository shares. Sourced, never run.

set -euo pipefail
# mke2fs, losetup and iptables are not on a normal user's path.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
# The server talks to this engine too; the client's "current context" could be another one.
export DOCKER_HOST=${DOCKER_HOST:-unix:///var/run/docker.sock}

repo_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# Everything that is costly to make lives outside the clone, so that a second clone finds it.
cache_dir=${EMERGENT_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/emergent}
readonly repo_root cache_dir

have() { command -v "$1" >/dev/null 2>&1; }

say() { printf '%s\n' "$*" >&2; }

# die LINE…: the first line says what is wrong, the others what to do.
die() {
    printf 'error: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '       %s\n' "$@" >&2
    exit 1
}

now_ms() { printf '%s' "$((${EPOCHREALTIME/[.,]/} / 1000))"; }

# seconds_since START_MS: "12.3 s"
seconds_since() {
    local ms=$(($(now_ms) - $1))
    printf '%d.%d s' $((ms / 1000)) $((ms % 1000 / 100))
}

# step LABEL COMMAND…: runs COMMAND with its output in a log, prints one line with the duration,
# and the end of the log if COMMAND fails.
step() {
    local label=$1 log out in started status
    shift
    log=$(mktemp "${TMPDIR:-/tmp}/emergent-step.XXXXXX")
    exec {out}>"$log" {in}<"$log"
    # Only open from here on: nothing is left behind, however this ends.
    rm -f "$log"
    started=$(now_ms)
    printf '  %s … ' "$label" >&2
    set +e
    (set -e && "$@") >&"$out" 2>&1 </dev/null {in}<&- {out}>&-
    status=$?
    set -e
    if [ "$status" -eq 0 ]; then
        printf 'done (%s)\n' "$(seconds_since "$started")" >&2
    else
        printf 'failed (%s)\n' "$(seconds_since "$started")" >&2
        tail -n 20 <&"$in" | sed 's/^/    | /' >&2
    fi
    exec {out}>&- {in}<&-
    return "$status"
}

# as_root COMMAND…: as root, by sudo where that is needed. Call need_root first, outside of a step:
# a password prompt must not end up in a log.
as_root() {
    if [ "$EUID" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

# need_root WHY
need_root() {
    [ "$EUID" -ne 0 ] || return 0
    have sudo || die "$1 needs root, and there is no sudo." \
        "Run this once as root: $repo_root/scripts/setup $setup_goal"
    sudo -n true 2>/dev/null || sudo -v -p "$1 needs root; password of %u: " ||
        die "$1 needs root." "Run this once as root: $repo_root/scripts/setup $setup_goal"
}
# What `scripts/setup` was asked for; named in messages.
setup_goal=${setup_goal:-run}

# os_release FIELD: ID, VERSION_CODENAME, … of this system; empty where unknown.
os_release() {
    # shellcheck source=/dev/null
    (. /etc/os-release 2>/dev/null && printf '%s' "${!1:-}") || true
}

# systemd, or a System V style init that runs services.
init_is_running() {
    [ -d /run/systemd/system ] || [ "$(cat /proc/1/comm 2>/dev/null)" = init ]
}

# bounded SECONDS COMMAND…: no call to an engine may hang. In the foreground, so that Ctrl-C reaches it.
bounded() { timeout --foreground --kill-after=5 "$@"; }
