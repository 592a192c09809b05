//! The result of a call as MCP writes it: data for programs, and text or an image for the model.

use emergent_wire::ErrorDetail;
use emergent_wire::error::ErrorBody;
use serde::Serialize;
use serde_json::Value;

use crate::tools::{ToolContent, ToolResult};

/// The result of a call.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CallResult {
    /// Only in the modern era.
    #[serde(skip_serializing_if = "Option::is_none")]
    result_type: Option<&'static str>,
    content: [Content; 1],
    #[serde(skip_serializing_if = "Option::is_none")]
    structured_content: Option<Value>,
    is_error: bool,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Content {
    Text {
        text: String,
    },
    Image {
        data: String,
        #[serde(rename = "mimeType")]
        mime_type: String,
    },
}

impl CallResult {
    /// A tool that failed is a result, too: the model sees the reason and can act on it.
    pub(crate) fn of(answer: Result<ToolResult, ErrorDetail>, is_modern: bool) -> Self {
        let is_error = answer.is_err();
        let (content, data) = match answer {
            Ok(ToolResult { data, content: ToolContent::Text(text) }) => (Content::Text { text }, data),
            Ok(ToolResult { data, content: ToolContent::Image { data: image, media_type } }) => {
                (Content::Image { data: image, mime_type: media_type }, data)
            }
            Err(error) => {
                let text = format!("{}: {}", error.code, error.message);
                (Content::Text { text }, serde_json::to_value(ErrorBody { error }).unwrap_or_default())
            }
        };
        Self {
            result_type: is_modern.then_some("complete"),
            content: [content],
            structured_content: Some(data).filter(Value::is_object),
            is_error,
        }
    }

    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use emergent_wire::ErrorCode;
    use serde_json::json;

    use super::*;

    fn written(answer: Result<ToolResult, ErrorDetail>, is_modern: bool) -> Value {
        serde_json::from_str(&CallResult::of(answer, is_modern).to_json()).unwrap()
    }

    #[test]
    fn an_image_is_an_image_block() {
        let content = ToolContent::Image { data: "aGVsbG8=".to_owned(), media_type: "image/png".to_owned() };
        let result = written(Ok(ToolResult { data: json!({"content": "aGVsbG8="}), content }), true);
        let image = json!({"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"});
        assert_eq!(
            result,
            json!({"resultType": "complete", "content": [image], "structuredContent": {"content": "aGVsbG8="},
                "isError": false})
        );
    }

    #[test]
    fn a_failure_has_its_reason_as_text_and_as_data() {
        let error = ErrorDetail::new(ErrorCode::DiskFull, "the disk is full: remove files")
            .with_details(json!({"free": 0}));
        let result = written(Err(error), false);
        assert_eq!(result["content"][0]["text"], "disk_full: the disk is full: remove files");
        assert_eq!(result["isError"], true);
        assert_eq!(
            result["structuredContent"],
            json!({"error": {"code": "disk_full", "message": "the disk is full: remove files", "details": {"free": 0}}})
        );
    }

    #[test]
    fn data_that_is_not_an_object_is_left_out() {
        let content = ToolContent::Text("text".to_owned());
        let result = written(Ok(ToolResult { data: json!(["a"]), content }), false);
        assert_eq!(result, json!({"content": [{"type": "text", "text": "text"}], "isError": false}));
    }
}
