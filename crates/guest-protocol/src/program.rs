//! The agent's program in a sandbox: its path, and the commands that the host runs it with.

/// The path of the program.
pub const AGENT_PATH: &str = "/.emergent/guest";
/// The command for the first process of a container. The first channel is its standard input and output.
pub const INIT_COMMAND: &str = "init";
/// The command that opens another channel, on its own standard input and output.
pub const CONNECT_COMMAND: &str = "connect";

#[cfg(test)]
mod tests {
    use emergent_wire::tools::AGENT_DIR;

    use super::*;

    #[test]
    fn the_program_is_in_the_agents_directory() {
        assert_eq!(AGENT_PATH.rsplit_once('/').map(|(directory, _)| directory), Some(AGENT_DIR));
    }
}
