# shellcheck shell=bash
# Functions that all scripts of this repository share. Sourced, not run.

set -euo pipefail
# mke2fs, losetup and iptables are not on a normal user's path.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
# The server uses this engine too. Without the variable, docker could use another one by its "current context".
export DOCKER_HOST=${DOCKER_HOST:-unix:///var/run/docker.sock}

repo_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# Files that take long to make are outside of the clone, so that other clones use them too.
cache_dir=${EMERGENT_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/emergent}
readonly repo_root cache_dir

have() { command -v "$1" >/dev/null 2>&1; }

say() { printf '%s\n' "$*" >&2; }

# die LINE…: prints an error and exits. The first line is the problem, the others are the next steps.
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
    # The open descriptors keep the log readable, and no file is left if the script is killed.
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

# as_root COMMAND…: runs COMMAND as root, with sudo if necessary. Call need_root first, outside of a step, because
# a password prompt must not go to a log.
as_root() {
    if [ "$EUID" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

# need_root WHY: asks for sudo's password if necessary.
need_root() {
    [ "$EUID" -ne 0 ] || return 0
    have sudo || die "$1 needs root, and there is no sudo." \
        "Run this once as root: $repo_root/scripts/setup $setup_goal"
    sudo -n true 2>/dev/null || sudo -v -p "$1 needs root; password of %u: " ||
        die "$1 needs root." "Run this once as root: $repo_root/scripts/setup $setup_goal"
}
# The goal of `scripts/setup`, for messages.
setup_goal=${setup_goal:-run}

# os_release FIELD: ID, VERSION_CODENAME, … of this system. Empty if unknown.
os_release() {
    # shellcheck source=/dev/null
    (. /etc/os-release 2>/dev/null && printf '%s' "${!1:-}") || true
}

# Whether systemd or a System V style init runs services.
init_is_running() {
    [ -d /run/systemd/system ] || [ "$(cat /proc/1/comm 2>/dev/null)" = init ]
}

# bounded SECONDS COMMAND…: runs COMMAND with a time limit, because an engine may hang. It stays in the foreground, so that
# Ctrl-C ends it.
bounded() { timeout --foreground --kill-after=5 "$@"; }
