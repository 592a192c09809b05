//! read, write and edit: one file at a time.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use std::borrow::Cow;
use std::time::Duration;

use emergent_guest_client::Event;
use emergent_guest_protocol::{GuestCall, WriteCall};
use emergent_wire::tools::{
    ContentEncoding, EditAnswer, EditRequest, MAX_FILE_BYTES, MAX_READ_BYTES, ReadAnswer, ReadRequest,
    WriteAnswer, WriteRequest,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::call::{FILE_TOOL_TIMEOUT, Output, ToolContext};
use super::error::ToolError;
use super::large_files::LargeFile;
use super::table::{AnswerTypes, Effect, MAX_REQUEST_BYTES, Shown, Streaming, Tool, TypeSchema};
use super::text;
use crate::summary::{Summarize, short};
use crate::workspace::{GuestRequest, OutputLimit, RunningCall, TimeLimit, WorkspaceError};

/// The largest request of write: 64 MiB as JSON text or base64.
const MAX_WRITE_REQUEST_BYTES: usize = 140 << 20;
/// The time limit for each piece of a file that is sent to a client.
const PIECE_TIMEOUT: Duration = Duration::from_secs(120);

impl Tool for ReadRequest {
    const TITLE: &'static str = "Read a file or list a directory";
    const NOTES: &'static str = "With `raw` the exact bytes, base64 in `content`, or as they are with `Accept: application/octet-stream`.";
    const INSTRUCTIONS: &'static str = READ;
    const EFFECT: Effect = Effect::ReadsFiles;

    async fn run(&self, context: &ToolContext<'_>) -> Result<ReadAnswer, ToolError> {
        let call = GuestCall::Read(self.clone());
        if !self.raw {
            return context.request(call).await;
        }
        if let Output::Streamed(_) = context.output {
            // The client decides how fast the file is read.
            let time_limit = TimeLimit::EachPiece(PIECE_TIMEOUT);
            let mut running = context.start(GuestRequest { call, input: None, time_limit }).await?;
            context.forward(&mut running, OutputLimit::NONE).await?;
            return Ok(ReadAnswer::default());
        }
        let time_limit = TimeLimit::Total(FILE_TOOL_TIMEOUT);
        let mut running = context.start(GuestRequest { call, input: None, time_limit }).await?;
        let (content, _place) = collect(context, &mut running).await?;
        Ok(ReadAnswer {
            content: BASE64.encode(&content),
            file_size: content.len() as u64,
            sha256: Some(hex::encode(Sha256::digest(&content))),
            is_binary: std::str::from_utf8(&content).is_err(),
            ..ReadAnswer::default()
        })
    }

    fn show(&self, answer: &ReadAnswer) -> Shown {
        if self.raw { show_raw(answer) } else { Shown::Text(text::read(answer)) }
    }

    fn streaming(&self) -> Streaming {
        if self.raw { Streaming::FileContent } else { Streaming::None }
    }

    fn answers() -> AnswerTypes {
        AnswerTypes { finished: TypeSchema::of::<ReadAnswer>(), started: None }
    }
}

/// Collects a file, with a place among the large files if it is one.
async fn collect(
    context: &ToolContext<'_>,
    running: &mut RunningCall,
) -> Result<(Vec<u8>, Option<LargeFile>), ToolError> {
    let limit = context.max_raw_bytes.unwrap_or(MAX_FILE_BYTES);
    let (mut content, mut place) = (Vec::new(), None);
    loop {
        let (Event::Stdout(bytes) | Event::Stderr(bytes)) = running.next().await? else {
            return Ok((content, place));
        };
        let length = content.len() + bytes.len();
        if length as u64 > limit {
            return Err(WorkspaceError::FileTooLarge { limit }.into());
        }
        if length > MAX_REQUEST_BYTES && place.is_none() {
            place = Some(context.large_file().await?);
        }
        content.extend_from_slice(&bytes);
    }
}

impl Summarize for ReadRequest {
    fn summary(&self) -> Value {
        json!({ "file_path": short(&self.file_path), "offset": self.offset, "limit": self.limit, "raw": self.raw })
    }
}

/// The image formats that models can see: the first bytes of their files, and their media types.
const IMAGES: [(&[u8], &str); 4] = [
    (b"\x89PNG\r\n\x1A\n", "image/png"),
    (b"\xFF\xD8\xFF", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
];

/// The bytes of a file as an image or as text. Bytes that a model can't use are described.
fn show_raw(answer: &ReadAnswer) -> Shown {
    if let Some(media_type) = image_type(&answer.content) {
        return Shown::Image { data: answer.content.clone(), media_type };
    }
    let bytes = BASE64.decode(&answer.content).unwrap_or_default();
    Shown::Text(match String::from_utf8(bytes).ok().filter(|text| !text.contains('\0')) {
        Some(text) if text.is_empty() => "[empty file]".to_owned(),
        Some(text) if text.len() <= MAX_READ_BYTES => text,
        Some(_) => format!("[{} bytes of text, in base64 in structuredContent.content]", answer.file_size),
        None => format!("[{} binary bytes, in base64 in structuredContent.content]", answer.file_size),
    })
}

/// The image format of base64 data.
fn image_type(content: &str) -> Option<&'static str> {
    let head = BASE64.decode(content.get(..16)?).ok()?;
    let (_, media_type) = IMAGES.iter().find(|(magic, _)| head.starts_with(magic))?;
    // Other formats begin with RIFF, too.
    (*media_type != "image/webp" || head.ends_with(b"WEBP")).then_some(media_type)
}

const READ: &str = "\
Read a text file as numbered lines (`12: text`), or list a directory (entries one a line, `/` after directories). \
Prefer it to cat, head, tail, sed and ls.

- Paths are absolute, or relative to /workspace.
- Up to 2000 lines or 50 KiB are shown at once, and 2000 characters of a line. When `truncated`, read on with `offset` \
set to `next_offset`; with `offset` and `limit` read just the part you need, for instance around a line that grep found.
- The numbers are not part of the file: leave them out of `old_string` of edit.
- `sha256` is the file's version: pass it as `expected_sha256` to edit so that the edit fails if the file was changed meanwhile.
- A binary file is named by kind and size instead of shown. With `raw` you get the exact bytes of any file up to 4 MiB \
in base64, and a picture (PNG, JPEG, GIF, WebP) to look at.";

impl Tool for WriteRequest {
    const TITLE: &'static str = "Write a file";
    const INSTRUCTIONS: &'static str = WRITE;
    const EFFECT: Effect = Effect::ReplacesFile;
    const MAX_REQUEST_BYTES: usize = MAX_WRITE_REQUEST_BYTES;

    async fn run(&self, context: &ToolContext<'_>) -> Result<WriteAnswer, ToolError> {
        let content = content_of(self)?;
        context.refuse_without_room_for(content.len() as u64)?;
        let call = GuestCall::Write(WriteCall { file_path: self.file_path.clone() });
        context.write(call, &content).await
    }

    fn show(&self, answer: &WriteAnswer) -> Shown {
        Shown::Text(text::write(answer))
    }

    fn answers() -> AnswerTypes {
        AnswerTypes { finished: TypeSchema::of::<WriteAnswer>(), started: None }
    }
}

impl Summarize for WriteRequest {
    fn summary(&self) -> Value {
        json!({ "file_path": short(&self.file_path), "content_bytes": self.content.len() })
    }
}

fn content_of(request: &WriteRequest) -> Result<Cow<'_, [u8]>, ToolError> {
    let content = match request.encoding {
        ContentEncoding::Utf8 => Cow::Borrowed(request.content.as_bytes()),
        ContentEncoding::Base64 => Cow::Owned(BASE64.decode(&request.content).map_err(ToolError::NotBase64)?),
    };
    if content.len() as u64 > MAX_FILE_BYTES {
        return Err(ToolError::ContentTooLarge { bytes: content.len(), limit: MAX_FILE_BYTES });
    }
    Ok(content)
}

const WRITE: &str = "\
Write a whole file: a new one, or in place of the old content, which is lost. Missing directories are made. To change \
a part of a file use edit, which sends less and can't lose the rest.

- Paths are absolute, or relative to /workspace.
- The file holds exactly `content`: end text with a line end yourself.
- For bytes that are not text set `encoding` to base64.
- The whole call may have 5 MiB; make larger files with bash.";

impl Tool for EditRequest {
    const TITLE: &'static str = "Replace text in a file";
    const INSTRUCTIONS: &'static str = EDIT;
    const EFFECT: Effect = Effect::ChangesFile;

    async fn run(&self, context: &ToolContext<'_>) -> Result<EditAnswer, ToolError> {
        context.refuse_without_room_for(0)?;
        context.request(GuestCall::Edit(self.clone())).await
    }

    fn show(&self, answer: &EditAnswer) -> Shown {
        Shown::Text(text::edit(answer))
    }

    fn answers() -> AnswerTypes {
        AnswerTypes { finished: TypeSchema::of::<EditAnswer>(), started: None }
    }
}

impl Summarize for EditRequest {
    fn summary(&self) -> Value {
        json!({
            "file_path": short(&self.file_path),
            "old_bytes": self.old_string.len(),
            "new_bytes": self.new_string.len(),
            "replace_all": self.replace_all,
        })
    }
}

const EDIT: &str = "\
Replace a piece of text in a file; all other bytes stay as they are. Prefer it to write and to sed for changes.

- `old_string` must be in the file exactly once: copy it as read shows it, without the line numbers, with enough lines \
around to make it unique. If it occurs more often the edit is refused (multiple_matches); give more context, or set \
`replace_all` to change every occurrence.
- When it is not there exactly, small differences such as white space are accepted if only one place matches; \
`matched_by` and `diff` show what was found and changed. Otherwise the edit fails (old_string_not_found): read again.
- An empty `old_string` makes a new file out of `new_string`.
- With `expected_sha256` (from read) the edit is refused if the file was changed meanwhile (stale_file).
- Paths are absolute, or relative to /workspace.";

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(bytes: &[u8]) -> Shown {
        let request = ReadRequest { file_path: "file".to_owned(), raw: true, ..ReadRequest::default() };
        let (content, file_size) = (BASE64.encode(bytes), bytes.len() as u64);
        request.show(&ReadAnswer { content, file_size, ..ReadAnswer::default() })
    }

    #[track_caller]
    fn shown_text(bytes: &[u8]) -> String {
        match shown(bytes) {
            Shown::Text(text) => text,
            image @ Shown::Image { .. } => panic!("{image:?}"),
        }
    }

    #[test]
    fn a_raw_image_is_shown_as_an_image() {
        for (bytes, media_type) in [
            (b"\x89PNG\r\n\x1A\n\0\0\0\rIHDR".as_slice(), "image/png"),
            (b"\xFF\xD8\xFF\xE0\0\x10JFIF\0\x01", "image/jpeg"),
            (b"GIF89a\x01\0\x01\0\0\0\0", "image/gif"),
            (b"RIFF\x10\0\0\0WEBPVP8 ", "image/webp"),
        ] {
            assert_eq!(shown(bytes), Shown::Image { data: BASE64.encode(bytes), media_type });
        }
        assert!(shown_text(b"RIFF\x10\0\0\0WAVEfmt ").contains("bytes"));
    }

    #[test]
    fn raw_text_is_shown_as_text() {
        assert_eq!(shown_text(b"hello\r\n"), "hello\r\n");
        assert_eq!(shown_text(b""), "[empty file]");
        assert!(shown_text(&[0xFF; 20]).starts_with("[20 binary bytes"));
        assert!(shown_text(&vec![b'x'; 60 * 1024]).starts_with("[61440 bytes of text"));
    }

    #[test]
    fn content_is_decoded_and_bounded() {
        let write = |content: &str, encoding| WriteRequest {
            file_path: "file".to_owned(),
            content: content.to_owned(),
            encoding,
        };
        assert_eq!(*content_of(&write("aGk=", ContentEncoding::Base64)).unwrap(), *b"hi");
        assert_eq!(*content_of(&write("aGk=", ContentEncoding::Utf8)).unwrap(), *b"aGk=");
        let refused = |request: WriteRequest| content_of(&request).unwrap_err();
        assert!(matches!(refused(write("a", ContentEncoding::Base64)), ToolError::NotBase64(_)));
        let large = "x".repeat(usize::try_from(MAX_FILE_BYTES).unwrap() + 1);
        assert!(matches!(refused(write(&large, ContentEncoding::Utf8)), ToolError::ContentTooLarge { .. }));
    }
}
