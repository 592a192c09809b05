//! The result of a call as MCP writes it: data for programs, and text or an image for the model.

use emergent_wire::ErrorDetail;
use emergent_wire::error::ErrorBody;
use rmcp::model::{CallToolResult, ContentBlock};
use serde_json::Value;

use crate::tools::{ToolContent, ToolResult};

/// The result of a call.
pub(crate) fn result(answer: Result<ToolResult, ErrorDetail>) -> CallToolResult {
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => return failure(error),
    };
    let content = match answer.content {
        ToolContent::Text(text) => ContentBlock::text(text),
        ToolContent::Image { data, media_type } => ContentBlock::image(data, media_type),
    };
    let mut result = CallToolResult::success(vec![content]);
    result.structured_content = Some(answer.data).filter(Value::is_object);
    result
}

/// A tool that failed. The model sees the reason and can act on it.
fn failure(error: ErrorDetail) -> CallToolResult {
    let text = format!("{}: {}", error.code, error.message);
    let mut result = CallToolResult::error(vec![ContentBlock::text(text)]);
    result.structured_content = serde_json::to_value(ErrorBody { error }).ok();
    result
}

#[cfg(test)]
mod tests {
    use emergent_wire::ErrorCode;
    use serde_json::json;

    use super::*;

    #[test]
    fn an_image_is_an_image_block() {
        let content = ToolContent::Image { data: "aGVsbG8=".to_owned(), media_type: "image/png".to_owned() };
        let result = result(Ok(ToolResult { data: json!({"content": "aGVsbG8="}), content }));
        let [ContentBlock::Image(image)] = result.content.as_slice() else { panic!("{result:?}") };
        assert_eq!((image.mime_type.as_str(), image.data.as_str()), ("image/png", "aGVsbG8="));
        assert_eq!(result.structured_content.unwrap(), json!({"content": "aGVsbG8="}));
    }

    #[test]
    fn a_failure_has_its_reason_as_text_and_as_data() {
        let error = ErrorDetail::new(ErrorCode::DiskFull, "the disk is full: remove files")
            .with_details(json!({"free": 0}));
        let result = failure(error);
        let [ContentBlock::Text(text)] = result.content.as_slice() else { panic!("{result:?}") };
        assert_eq!(text.text, "disk_full: the disk is full: remove files");
        assert_eq!(result.is_error, Some(true));
        assert_eq!(
            result.structured_content.unwrap(),
            json!({"error": {"code": "disk_full", "message": "the disk is full: remove files", "details": {"free": 0}}})
        );
    }
}
