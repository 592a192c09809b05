//! Images.

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use emergent_wire::ErrorCode;
use emergent_wire::error::ErrorBody;
use emergent_wire::manager::{ImageSettings, MachineImage};
use serde::Deserialize;

use super::error::ApiError;
use super::{App, run_to_end};

#[derive(Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    /// Its default program, and the variables it sets: `ImageSettings` as JSON.
    settings: Option<String>,
}

/// Show an image.
#[utoipa::path(get, path = "/v1/images/{id}", tag = "images", params(("id" = String, Path)),
    responses((status = 200, body = MachineImage), (status = "4XX", body = ErrorBody)))]
pub(super) async fn get(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Json<MachineImage>, ApiError> {
    Ok(Json(app.manager.image(&id)?))
}

/// Make an image out of an archive of files.
///
/// The body is a tar archive, such as `docker export` writes. An image that is there is left as it is.
#[utoipa::path(put, path = "/v1/images/{id}", tag = "images", params(("id" = String, Path), Settings),
    request_body(content = Vec<u8>, content_type = "application/x-tar"),
    responses((status = 200, body = MachineImage), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn put(
    State(app): State<App>,
    Path(id): Path<String>,
    Query(query): Query<Settings>,
    body: Body,
) -> Result<Json<MachineImage>, ApiError> {
    let settings: ImageSettings = match query.settings {
        None => ImageSettings::default(),
        Some(text) => serde_json::from_str(&text)
            .map_err(|error| ApiError::new(ErrorCode::BadRequest, format!("settings: {error}")))?,
    };
    run_to_end(async move { app.manager.put_image(&id, settings, body.into_data_stream()).await }).await
}
