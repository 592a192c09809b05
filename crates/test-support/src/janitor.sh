# Removes all that a test server left, when the test process is gone.
#
# Argument: the server's data directory. Standard input: a pipe that only the test process holds open; at its end,
# which also comes when that process is killed, the server is killed and everything that carries its installation's
# label is removed, and the directory with it.
set -u
dir=$1
trap '' INT TERM HUP
while read -r _; do :; done

for pid in $(pgrep -f -- "--data-dir $dir( |\$)"); do kill -KILL "$pid" 2>/dev/null; done
id=$(cat "$dir/installation-id" 2>/dev/null)
if [ -n "$id" ]; then
    # An engine that is being restarted comes back; what it holds must not outlive the name it is found by.
    for _ in $(seq 60); do timeout 5 docker version >/dev/null 2>&1 && break; sleep 1; done
    label="label=emergent.installation=$id"
    containers=$(docker ps --all --quiet --filter "$label" 2>/dev/null)
    [ -z "$containers" ] || docker rm --force $containers
    volumes=$(docker volume ls --quiet --filter "$label" 2>/dev/null)
    [ -z "$volumes" ] || docker volume rm --force $volumes
    networks=$(docker network ls --quiet --filter "$label" 2>/dev/null)
    [ -z "$networks" ] || docker network rm $networks
    docker rmi --force "emergent-test:$id"
    short=$(printf %s "$id" | tr -d - | tail -c 10)
    for tables in iptables ip6tables; do
        for table in filter security mangle; do
            for parent in DOCKER-USER FORWARD; do $tables -w 5 -t $table -D $parent -i "em-$short" -j "em-$short-fwd"; done
            $tables -w 5 -t $table -D INPUT -i "em-$short" -j "em-$short-in"
            for chain in "em-$short-fwd" "em-$short-in"; do
                $tables -w 5 -t $table -F "$chain" && $tables -w 5 -t $table -X "$chain"
            done
        done
    done
fi
for device in $(losetup --noheadings --output NAME,BACK-FILE | awk -v dir="$dir/" 'index($2, dir) == 1 { print $1 }'); do
    losetup --detach "$device"
done
rm -rf "$dir"
