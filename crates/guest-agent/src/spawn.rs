//! Starts processes without `fork`.
//!
//! On gVisor a fork costs more than the rest of a process's start: it copies the agent's memory map, and each page that the
//! agent writes to afterwards is a fault. `posix_spawn` shares the memory until the new program runs.

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The standard input of a new process.
pub(crate) enum Input {
    Nothing,
    /// A pipe; [`Spawned::stdin`] is its other end.
    Pipe,
    File(File),
}

/// A program to start, in a session of its own.
pub(crate) struct Program<'a> {
    pub(crate) path: &'a Path,
    pub(crate) arguments: &'a [&'a str],
    pub(crate) directory: &'a Path,
    pub(crate) environment: &'a BTreeMap<String, String>,
    /// One more variable.
    pub(crate) tag: (&'a str, &'a str),
}

/// A started process, and the agent's ends of its streams.
pub(crate) struct Spawned {
    pub(crate) pid: i32,
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
}

/// Starts a program.
pub(crate) fn spawn(program: &Program<'_>, input: &Input) -> io::Result<Spawned> {
    let (stdin, child_stdin) = match input {
        Input::Nothing => (None, OwnedFd::from(File::open("/dev/null")?)),
        Input::File(file) => (None, file.try_clone()?.into()),
        Input::Pipe => {
            let (reader, writer) = io::pipe()?;
            (Some(writer.into()), reader.into())
        }
    };
    let (stdout, child_stdout) = io::pipe()?;
    let (stderr, child_stderr) = io::pipe()?;
    let streams = [child_stdin.as_raw_fd(), child_stdout.as_raw_fd(), child_stderr.as_raw_fd()];
    let path = c_string(program.path.as_os_str())?;
    let arguments = program.arguments.iter().map(|argument| c_string(OsStr::new(argument)));
    let arguments: Vec<CString> =
        std::iter::once(Ok(path.clone())).chain(arguments).collect::<Result<_, _>>()?;
    let mut environment = Vec::with_capacity(program.environment.len() + 1);
    let variables = program.environment.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    for (name, value) in variables.chain([program.tag]) {
        environment.push(CString::new(format!("{name}={value}"))?);
    }
    let actions = Actions::new(streams, &c_string(program.directory.as_os_str())?)?;
    let attributes = Attributes::new()?;
    let mut pid = 0;
    // SAFETY: the strings, the pointers to them and both descriptions live until the call returns.
    let error = unsafe {
        libc::posix_spawn(
            &raw mut pid,
            path.as_ptr(),
            &raw const actions.0,
            &raw const attributes.0,
            pointers(&arguments).as_ptr(),
            pointers(&environment).as_ptr(),
        )
    };
    check(error)?;
    Ok(Spawned { pid, stdin, stdout: stdout.into(), stderr: stderr.into() })
}

fn c_string(text: &OsStr) -> io::Result<CString> {
    Ok(CString::new(text.as_bytes())?)
}

/// The strings as a list for C.
fn pointers(strings: &[CString]) -> Vec<*mut libc::c_char> {
    strings.iter().map(|text| text.as_ptr().cast_mut()).chain([std::ptr::null_mut()]).collect()
}

fn check(error: i32) -> io::Result<()> {
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// The descriptors and the directory of the new process.
struct Actions(libc::posix_spawn_file_actions_t);

impl Actions {
    fn new(streams: [RawFd; 3], directory: &CString) -> io::Result<Self> {
        let mut actions = MaybeUninit::uninit();
        // SAFETY: initialised by the first call before anything else uses it; the directory's name is copied.
        unsafe {
            check(libc::posix_spawn_file_actions_init(actions.as_mut_ptr()))?;
            let mut actions = Self(actions.assume_init());
            for (stream, number) in streams.into_iter().zip(0..) {
                check(libc::posix_spawn_file_actions_adddup2(&raw mut actions.0, stream, number))?;
            }
            check(libc::posix_spawn_file_actions_addchdir_np(&raw mut actions.0, directory.as_ptr()))?;
            Ok(actions)
        }
    }
}

impl Drop for Actions {
    fn drop(&mut self) {
        // SAFETY: was initialised.
        unsafe { libc::posix_spawn_file_actions_destroy(&raw mut self.0) };
    }
}

/// A session of its own, and the default signal settings in place of the agent's.
struct Attributes(libc::posix_spawnattr_t);

impl Attributes {
    fn new() -> io::Result<Self> {
        const FLAGS: libc::c_int = libc::POSIX_SPAWN_SETSID as libc::c_int
            | libc::POSIX_SPAWN_SETSIGMASK
            | libc::POSIX_SPAWN_SETSIGDEF;
        let mut attributes = MaybeUninit::uninit();
        // SAFETY: initialised by the first call before anything else uses it; the sets live on this stack.
        unsafe {
            check(libc::posix_spawnattr_init(attributes.as_mut_ptr()))?;
            let mut attributes = Self(attributes.assume_init());
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            check(libc::posix_spawnattr_setsigmask(&raw mut attributes.0, &raw const set))?;
            libc::sigaddset(&raw mut set, libc::SIGPIPE);
            check(libc::posix_spawnattr_setsigdefault(&raw mut attributes.0, &raw const set))?;
            #[allow(clippy::cast_possible_truncation, reason = "three small flags")]
            check(libc::posix_spawnattr_setflags(&raw mut attributes.0, FLAGS as libc::c_short))?;
            Ok(attributes)
        }
    }
}

impl Drop for Attributes {
    fn drop(&mut self) {
        // SAFETY: was initialised.
        unsafe { libc::posix_spawnattr_destroy(&raw mut self.0) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    fn run(arguments: &[&str], directory: &str, input: &Input) -> io::Result<(Spawned, String)> {
        let environment = BTreeMap::from([("GREETING".to_owned(), "hello".to_owned())]);
        let program = Program {
            path: Path::new("/bin/sh"),
            arguments,
            directory: Path::new(directory),
            environment: &environment,
            tag: ("TAG", "7"),
        };
        let mut spawned = spawn(&program, input)?;
        if let Some(stdin) = spawned.stdin.take() {
            File::from(stdin).write_all(b"from the pipe")?;
        }
        let mut output = String::new();
        File::from(spawned.stdout.try_clone()?).read_to_string(&mut output)?;
        let mut status = 0;
        // SAFETY: waits for a child of this test.
        unsafe { libc::waitpid(spawned.pid, &raw mut status, 0) };
        Ok((spawned, output))
    }

    #[test]
    fn a_program_gets_its_input_directory_and_variables_and_no_other_descriptors() {
        const DESCRIPTORS: &str = "ls /proc/self/fd | wc -l";
        let script = format!("cat; pwd; echo $GREETING $TAG ${{HOME-none}}; {DESCRIPTORS}");
        let (_, output) = run(&["-c", &script], "/usr", &Input::Pipe).unwrap();
        // The runner of this test may have left descriptors open.
        let usual = std::process::Command::new("/bin/sh").args(["-c", DESCRIPTORS]).output().unwrap().stdout;
        let usual = String::from_utf8(usual).unwrap();
        assert_eq!(output, format!("from the pipe/usr\nhello 7 none\n{usual}"));
    }

    #[test]
    fn a_program_leads_its_own_session_and_gets_its_signals() {
        // The signals of grep, which inherits them: those of a shell change while it starts a program.
        let script = "cut -d' ' -f6 /proc/$$/stat; grep -E 'SigBlk|SigIgn' /proc/self/status";
        let (spawned, output) = run(&["-c", script], "/", &Input::Nothing).unwrap();
        let [session, _, blocked, _, ignored] = output.split_ascii_whitespace().collect::<Vec<_>>()[..]
        else {
            panic!("{output}");
        };
        assert_eq!(session, spawned.pid.to_string());
        assert_eq!(blocked, "0000000000000000");
        let ignored = u64::from_str_radix(ignored, 16).unwrap();
        assert_eq!(ignored & (1 << (libc::SIGPIPE - 1)), 0, "{ignored:x}");
    }

    #[test]
    fn a_start_with_a_missing_directory_a_long_argument_or_a_nul_byte_fails() {
        let error =
            |result: io::Result<(Spawned, String)>| result.err().and_then(|error| error.raw_os_error());
        assert_eq!(error(run(&["-c", "true"], "/nowhere", &Input::Nothing)), Some(libc::ENOENT));
        let long = "x".repeat(4 << 20);
        assert_eq!(error(run(&["-c", &long], "/", &Input::Nothing)), Some(libc::E2BIG));
        assert!(run(&["-c", "a\0b"], "/", &Input::Nothing).is_err());
    }
}
