# shellcheck shell=bash
# Rust and cargo tools. The user installs Rust.

ensure_rust() {
    have cargo || die 'Rust is missing.' 'Install it (https://rustup.rs), open a new shell, and run this again.'
    [ "$setup_goal" = test ] || return 0
    if ! have cargo-clippy || ! have cargo-fmt; then
        die 'clippy or rustfmt is missing.' 'rustup component add clippy rustfmt'
    fi
}

# Test tools run for seconds and build for minutes, so they are built without optimisations.
cargo_install() {
    cd / && CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_DEBUG=0 \
        CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 cargo install --locked "$@"
}

ensure_cargo_tools() {
    have cargo-nextest || step 'building cargo-nextest (some minutes, once)' \
        cargo_install cargo-nextest --no-default-features --features default-no-update
    have cargo-deny || step 'building cargo-deny (some minutes, once)' cargo_install cargo-deny
    have cargo-machete || step 'building cargo-machete (some minutes, once)' cargo_install cargo-machete
}
