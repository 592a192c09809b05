//! What a client gets for a call: the answer of REST as data, and a text for the model.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use emergent_wire::error::ErrorBody;
use emergent_wire::tools::{MAX_READ_BYTES, ReadAnswer};
use emergent_wire::{ErrorCode, ErrorDetail};
use rmcp::model::{CallToolResult, ContentBlock};
use serde_json::Value;

use crate::text;
use crate::tools::ToolAnswer;

/// The largest file that is handed out raw here: it goes through a model's context, or through its client's memory
/// twice. REST hands out more.
pub const MAX_RAW_BYTES: u64 = 4 << 20;

/// The kinds of pictures that models can look at, by how they begin.
const PICTURES: [(&[u8], &str); 4] = [
    (b"\x89PNG\r\n\x1A\n", "image/png"),
    (b"\xFF\xD8\xFF", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
];

/// What became of a call, for the client.
pub(crate) fn result(wants_raw: bool, answer: Result<ToolAnswer, ErrorDetail>) -> CallToolResult {
    match answer.and_then(|answer| success(wants_raw, &answer)) {
        Ok(result) => result,
        Err(error) => failure(error),
    }
}

/// A tool that failed. The model sees why and can do something about it.
pub(crate) fn failure(error: ErrorDetail) -> CallToolResult {
    let text = format!("{}: {}", error.code, error.message);
    let mut result = CallToolResult::error(vec![ContentBlock::text(text)]);
    result.structured_content = serde_json::to_value(ErrorBody { error }).ok();
    result
}

fn success(wants_raw: bool, answer: &ToolAnswer) -> Result<CallToolResult, ErrorDetail> {
    let content = match answer {
        ToolAnswer::Read(answer) if wants_raw => raw(answer)?,
        answer => ContentBlock::text(text::of(answer)),
    };
    let data = serde_json::to_value(answer)
        .map_err(|error| ErrorDetail::new(ErrorCode::Internal, format!("the answer is no JSON: {error}")))?;
    let mut result = CallToolResult::success(vec![content]);
    result.structured_content = Some(data).filter(Value::is_object);
    Ok(result)
}

/// A file's exact bytes: as a picture, as text, or, when a model could make nothing of them, as what they are.
fn raw(answer: &ReadAnswer) -> Result<ContentBlock, ErrorDetail> {
    if answer.file_size > MAX_RAW_BYTES {
        let message = format!(
            "the file has {} bytes: raw gives at most {MAX_RAW_BYTES} here; take a part of it with bash",
            answer.file_size
        );
        return Err(ErrorDetail::new(ErrorCode::TooLarge, message));
    }
    if let Some(kind) = picture(&answer.content) {
        return Ok(ContentBlock::image(&answer.content, kind));
    }
    let bytes = STANDARD.decode(&answer.content).unwrap_or_default();
    let described = match String::from_utf8(bytes).ok().filter(|text| !text.contains('\0')) {
        Some(text) if text.is_empty() => "[empty file]".to_owned(),
        Some(text) if text.len() <= MAX_READ_BYTES => text,
        Some(_) => format!("[{} bytes of text, in base64 in structuredContent.content]", answer.file_size),
        None => format!("[{} binary bytes, in base64 in structuredContent.content]", answer.file_size),
    };
    Ok(ContentBlock::text(described))
}

/// Which kind of picture the base64 is of.
fn picture(content: &str) -> Option<&'static str> {
    let head = STANDARD.decode(content.get(..16)?).ok()?;
    let (_, kind) = PICTURES.iter().find(|(magic, _)| head.starts_with(magic))?;
    // RIFF holds other things too.
    (*kind != "image/webp" || head.ends_with(b"WEBP")).then_some(kind)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read_raw(bytes: &[u8]) -> CallToolResult {
        let answer = ReadAnswer {
            content: STANDARD.encode(bytes),
            file_size: bytes.len() as u64,
            ..ReadAnswer::default()
        };
        result(true, Ok(answer.into()))
    }

    fn only_text(result: &CallToolResult) -> &str {
        let [ContentBlock::Text(text)] = result.content.as_slice() else { panic!("{result:?}") };
        &text.text
    }

    #[test]
    fn a_picture_is_shown_as_one() {
        for (bytes, kind) in [
            (b"\x89PNG\r\n\x1A\n\0\0\0\rIHDR".as_slice(), "image/png"),
            (b"\xFF\xD8\xFF\xE0\0\x10JFIF\0\x01", "image/jpeg"),
            (b"GIF89a\x01\0\x01\0\0\0\0", "image/gif"),
            (b"RIFF\x10\0\0\0WEBPVP8 ", "image/webp"),
        ] {
            let result = read_raw(bytes);
            let [ContentBlock::Image(image)] = result.content.as_slice() else { panic!("{result:?}") };
            assert_eq!((image.mime_type.as_str(), &image.data), (kind, &STANDARD.encode(bytes)));
            assert_eq!(result.structured_content.unwrap()["content"], STANDARD.encode(bytes));
        }
        assert!(only_text(&read_raw(b"RIFF\x10\0\0\0WAVEfmt ")).contains("bytes"));
    }

    #[test]
    fn raw_text_is_shown_as_text() {
        assert_eq!(only_text(&read_raw(b"hello\r\n")), "hello\r\n");
        assert_eq!(only_text(&read_raw(b"")), "[empty file]");
        assert!(only_text(&read_raw(&[0xFF; 20])).starts_with("[20 binary bytes"));
        assert!(only_text(&read_raw(&vec![b'x'; 60 * 1024])).starts_with("[61440 bytes of text"));
    }

    #[test]
    fn a_large_raw_file_is_refused() {
        let result = read_raw(&vec![0; 4 * 1024 * 1024 + 1]);
        assert_eq!(result.is_error, Some(true));
        assert_eq!(result.structured_content.unwrap()["error"]["code"], "too_large");
    }

    #[test]
    fn a_failure_says_why_in_both_forms() {
        let error = ErrorDetail::new(ErrorCode::DiskFull, "the disk is full: remove files")
            .with_details(json!({"free": 0}));
        let result = failure(error);
        assert_eq!(only_text(&result), "disk_full: the disk is full: remove files");
        assert_eq!(result.is_error, Some(true));
        assert_eq!(
            result.structured_content.unwrap(),
            json!({"error": {"code": "disk_full", "message": "the disk is full: remove files", "details": {"free": 0}}})
        );
    }
}
