# Runs one PostgreSQL cluster for one test process, and removes it when that process ends.
#
# Argument: the directory of PostgreSQL's programs. Standard input: each line is a TCP port to try. The input ends also when the
# test process is killed; then the script stops the cluster and removes its directory. Standard output: `directory DIR`, then
# `ready` or `retry` for each port. Other lines are error messages.
set -u
bin=$1
pid=
dir=$(mktemp -d "${TMPDIR:-/tmp}/emergent-postgres.XXXXXX") || exit 1

finish() {
    trap '' INT TERM HUP
    if [ -n "$pid" ]; then
        kill -QUIT "$pid" 2>/dev/null # immediate shutdown
        wait "$pid"
    fi
    rm -rf "$dir"
}
trap finish EXIT
trap 'exit 1' INT TERM HUP

# PostgreSQL refuses to run as root. If this script is killed, the kernel stops PostgreSQL (pdeathsig).
as="setpriv --pdeathsig QUIT"
if [ "$(id -u)" = 0 ]; then
    user=postgres
    id -u "$user" >/dev/null 2>&1 || user=nobody
    chown "$user" "$dir"
    as="$as --reuid=$(id -u "$user") --regid=$(id -g "$user") --init-groups"
fi

cd "$dir" || exit 1
$as "$bin/initdb" -D "$dir/data" -U emergent -A trust -E UTF8 --no-locale --no-sync \
    >"$dir/log" 2>&1 </dev/null || { tail -n 5 "$dir/log"; exit 1; }
echo "directory $dir"

while read -r port; do
    $as "$bin/postgres" -D "$dir/data" -p "$port" -c listen_addresses=127.0.0.1 \
        -c "unix_socket_directories=$dir" -c fsync=off -c synchronous_commit=off -c full_page_writes=off \
        -c shared_buffers=32MB -c max_connections=200 >>"$dir/log" 2>&1 </dev/null &
    pid=$!
    until "$bin/pg_isready" -q -h "$dir" -p "$port"; do
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.02
    done
    if kill -0 "$pid" 2>/dev/null; then
        echo ready
    else
        wait "$pid"
        pid=
        tail -n 5 "$dir/log"
        echo retry
    fi
done
