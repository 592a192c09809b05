//! The default program of an image.

/// The program that an image runs by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageProgram {
    /// The program and its fixed arguments.
    pub entrypoint: Vec<String>,
    /// The default arguments, which a caller may replace.
    pub arguments: Vec<String>,
    /// The working directory.
    pub directory: Option<String>,
    /// The user that the program runs as.
    pub user: Option<String>,
}
