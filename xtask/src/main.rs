//! Tasks of the project: `cargo run -p xtask -- openapi`.

use std::path::Path;

use anyhow::{Context, Result, bail};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["openapi"] => write_openapi(),
        _ => bail!("usage: cargo run -p xtask -- openapi"),
    }
}

/// Writes the API's description where it is checked in.
fn write_openapi() -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../openapi/emergent.json");
    std::fs::write(&path, emergent_control_plane::openapi_json()).with_context(|| path.display().to_string())
}
