//! `workspace read`, `write` and `edit`.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use emergent_wire::tools::{
    ContentEncoding, EditAnswer, EditRequest, MAX_FILE_BYTES, ReadAnswer, ReadRequest, ToolRequest,
    WriteAnswer, WriteRequest,
};

use crate::client::{Answer, calls};
use crate::context::Context;
use crate::output;

/// Read a file as numbered lines, or list a directory
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent workspace read 3fa2c9d1 src/main.py
  emergent workspace read 3fa2c9d1 src/main.py --offset 2001 --limit 500
  emergent workspace read 3fa2c9d1 src                                   lists the directory
  emergent workspace read 3fa2c9d1 picture.png --raw > picture.png       copies the exact bytes")]
pub(super) struct ReadArgs {
    /// The workspace's id, or a unique prefix or suffix of it
    id: String,
    /// The file or directory, absolute or relative to /workspace
    path: String,
    /// The number of the first line, from 1
    #[arg(long, value_name = "LINE")]
    offset: Option<u64>,
    /// The maximum number of lines [default: 2000]
    #[arg(long, value_name = "LINES")]
    limit: Option<u64>,
    /// Write the file's exact bytes to stdout (with --json: base64)
    #[arg(long, conflicts_with_all = ["offset", "limit"])]
    raw: bool,
}

/// Write a whole file
///
/// Missing directories are created. An existing file is replaced atomically and keeps its mode. The limit is 64 MiB.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent workspace write 3fa2c9d1 hello.py --content 'print(\"hello\")'
  emergent workspace write 3fa2c9d1 data/picture.png ./picture.png
  tar -c src | emergent workspace write 3fa2c9d1 src.tar -")]
pub(super) struct WriteArgs {
    /// The workspace's id, or a unique prefix or suffix of it
    id: String,
    /// The file to write, absolute or relative to /workspace
    path: String,
    /// The local file with the content; - is standard input
    #[arg(value_name = "FILE", required_unless_present = "content", conflicts_with = "content")]
    source: Option<PathBuf>,
    /// The content
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    content: Option<String>,
}

/// Replace text in a file, and print the diff
///
/// The old text must occur exactly once, unless --replace-all is given. White space and indentation may differ slightly; a note
/// then names the matcher that found the text. An empty --old creates a new file.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent workspace edit 3fa2c9d1 hello.py --old hello --new goodbye
  emergent workspace edit 3fa2c9d1 hello.py --old $'a = 1\\nb = 2' --new 'a, b = 1, 2'
  emergent workspace edit 3fa2c9d1 hello.py --old old_name --new new_name --replace-all")]
pub(super) struct EditArgs {
    /// The workspace's id, or a unique prefix or suffix of it
    id: String,
    /// The file, absolute or relative to /workspace
    path: String,
    /// The text to replace
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    old: String,
    /// The new text
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    new: String,
    /// Replace every occurrence
    #[arg(long)]
    replace_all: bool,
    /// Fail unless the file has this SHA-256, which `read --json` prints
    #[arg(long, value_name = "HEX")]
    expected_sha256: Option<String>,
}

/// Calls a tool of a workspace.
pub(super) async fn tool<T: ToolRequest>(context: &Context, id: &str, request: &T) -> Result<Answer> {
    let id = context.workspace_id(id).await?;
    context.client.call(calls::tool(id, T::NAME).body(request)?).await
}

pub(super) async fn read(context: &Context, args: ReadArgs) -> Result<u8> {
    let request = ReadRequest { file_path: args.path, offset: args.offset, limit: args.limit, raw: args.raw };
    if args.raw && !context.json {
        let id = context.workspace_id(&args.id).await?;
        let call = calls::tool(id, ReadRequest::NAME).body(&request)?.raw_bytes();
        let mut response = context.client.send(call).await?;
        while let Some(chunk) = response.chunk().await.context("the connection to the server was lost")? {
            output::bytes(&chunk)?;
        }
        return Ok(0);
    }
    let answer = tool(context, &args.id, &request).await?;
    context.show(&answer, |file: ReadAnswer| {
        if file.is_binary {
            let kind = file.media_type.as_deref().unwrap_or("binary data");
            return output::line(format_args!("{kind}, {} bytes (--raw for the bytes)", file.file_size));
        }
        output::text(&file.content)?;
        if let Some(note) = &file.note {
            output::note(format_args!("note: {note}"));
        } else if let Some(next) = file.next_offset {
            output::note(format_args!("note: there are more lines; continue with --offset {next}"));
        }
        Ok(())
    })?;
    Ok(0)
}

pub(super) async fn write(context: &Context, args: WriteArgs) -> Result<u8> {
    let bytes = match (args.content, args.source) {
        (Some(text), _) => text.into_bytes(),
        (None, Some(path)) => load(&path)?,
        (None, None) => bail!("give the content with --content, or a file"),
    };
    let (content, encoding) = match String::from_utf8(bytes) {
        Ok(text) => (text, ContentEncoding::Utf8),
        Err(not_text) => (STANDARD.encode(not_text.as_bytes()), ContentEncoding::Base64),
    };
    let request = WriteRequest { file_path: args.path, content, encoding };
    let answer = tool(context, &args.id, &request).await?;
    context.show(&answer, |written: WriteAnswer| {
        let result = if written.created { "created" } else { "replaced" };
        output::line(format_args!(
            "{result} {} ({} bytes)",
            output::one_line(&written.file_path),
            written.bytes_written
        ))
    })?;
    Ok(0)
}

/// The content of a local file, or of standard input.
fn load(path: &Path) -> Result<Vec<u8>> {
    let (source, name): (Box<dyn Read>, String) = if path == Path::new("-") {
        (Box::new(std::io::stdin().lock()), "standard input".to_owned())
    } else {
        let file = std::fs::File::open(path).with_context(|| format!("can't read {}", path.display()))?;
        (Box::new(file), path.display().to_string())
    };
    let mut bytes = Vec::new();
    source.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).with_context(|| format!("can't read {name}"))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        bail!("{name} has more than {} MiB, the limit of write", MAX_FILE_BYTES >> 20);
    }
    Ok(bytes)
}

pub(super) async fn edit(context: &Context, args: EditArgs) -> Result<u8> {
    let request = EditRequest {
        file_path: args.path,
        old_string: args.old,
        new_string: args.new,
        replace_all: args.replace_all,
        expected_sha256: args.expected_sha256,
    };
    let answer = tool(context, &args.id, &request).await?;
    context.show(&answer, |edited: EditAnswer| {
        output::text(&edited.diff)?;
        if edited.matched_by != "exact" {
            output::note(format_args!("note: the old text was found by the matcher '{}'", edited.matched_by));
        }
        if edited.replacements > 1 {
            output::note(format_args!("note: {} occurrences were replaced", edited.replacements));
        }
        Ok(())
    })?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: WriteArgs,
    }

    #[test]
    fn write_needs_exactly_one_source_of_content() {
        let parse = |line: &str| Line::try_parse_from(format!("write id path {line}").trim().split(' '));
        assert_eq!(parse("--content -x").unwrap().args.content.as_deref(), Some("-x"));
        assert_eq!(parse("-").unwrap().args.source.as_deref(), Some(Path::new("-")));
        assert!(parse("").is_err());
        assert!(parse("file --content x").is_err());
    }

    #[test]
    fn file_over_the_limit_is_refused_before_it_is_sent() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("large");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(MAX_FILE_BYTES).unwrap();
        assert_eq!(load(&path).unwrap().len() as u64, MAX_FILE_BYTES);
        file.set_len(MAX_FILE_BYTES + 1).unwrap();
        assert!(load(&path).unwrap_err().to_string().contains("64 MiB"));
        assert!(load(Path::new("/no/such/file")).is_err());
    }
}
