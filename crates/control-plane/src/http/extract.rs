//! Extractors for bodies, parameters and ids. Their errors have the error body of the API.

use std::str::FromStr;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use emergent_wire::{ErrorCode, Valid, Validate};
use serde::de::DeserializeOwned;

use super::error::ApiError;
use super::summary::SummarySlot;
use crate::summary::Summarize;

/// The time limit for a whole body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// A JSON body that was validated. The content type is not checked: web pages can't send a bearer token without their user's will.
pub(crate) struct Body<T>(pub(crate) Valid<T>);

impl<S: Send + Sync, T: DeserializeOwned + Summarize + Validate> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let summary = request.extensions().get::<SummarySlot>().cloned();
        let bytes = read_object(request, state).await?;
        let value: T = serde_json::from_slice(&bytes).map_err(|error| {
            ApiError::new(ErrorCode::BadRequest, format!("the body can't be read: {error}"))
        })?;
        if let Some(slot) = summary {
            slot.set(value.summary());
        }
        Ok(Self(Valid::new(value)?))
    }
}

/// Reads a body that must be a JSON object.
pub(crate) async fn read_object<S: Send + Sync>(request: Request, state: &S) -> Result<Bytes, ApiError> {
    let bytes = match tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(request, state)).await {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(rejection)) if rejection.status() == 413 => {
            return Err(ApiError::new(ErrorCode::TooLarge, "the body is larger than this address takes"));
        }
        Ok(Err(rejection)) => return Err(ApiError::new(ErrorCode::BadRequest, rejection.body_text())),
        Err(_) => {
            return Err(ApiError::new(ErrorCode::BadRequest, "the body did not arrive within 60 s"));
        }
    };
    // An empty body means that all fields have their defaults.
    let bytes = if bytes.is_empty() { Bytes::from_static(b"{}") } else { bytes };
    // serde would read a list as the fields in their order.
    if bytes.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
        return Err(ApiError::new(ErrorCode::BadRequest, "the body must be a JSON object"));
    }
    Ok(bytes)
}

/// The parameters after `?`.
pub(crate) struct Params<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(params)) => Ok(Self(params)),
            Err(rejection) => Err(ApiError::new(ErrorCode::BadRequest, rejection.body_text())),
        }
    }
}

/// The rows of a page unless the client names a number.
const DEFAULT_PAGE: u32 = 100;
/// The limit on the rows of a page.
const MAX_PAGE: u32 = 500;

/// The number of rows of a page.
pub(crate) fn page_limit(requested: Option<u32>) -> Result<u32, ApiError> {
    let limit = requested.unwrap_or(DEFAULT_PAGE);
    if (1..=MAX_PAGE).contains(&limit) {
        return Ok(limit);
    }
    Err(ApiError::new(ErrorCode::BadRequest, format!("limit must be from 1 to {MAX_PAGE}")))
}

/// An id in the path. A text that is no id is answered with `not_found`.
pub(crate) struct Id<T>(pub(crate) T);

impl<S: Send + Sync, T: FromStr> FromRequestParts<S> for Id<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let text = Path::<Vec<(String, String)>>::from_request_parts(parts, state)
            .await
            .ok()
            .and_then(|Path(pairs)| pairs.into_iter().next_back().map(|(_, value)| value))
            .unwrap_or_default();
        parse(&text).map(Self)
    }
}

/// Two ids in the path.
pub(crate) struct Ids<A, B>(pub(crate) A, pub(crate) B);

impl<S: Send + Sync, A: FromStr, B: FromStr> FromRequestParts<S> for Ids<A, B> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Ok(Path((first, second))) = Path::<(String, String)>::from_request_parts(parts, state).await
        else {
            return Err(ApiError::new(ErrorCode::NotFound, "there is nothing at this address"));
        };
        Ok(Self(parse(&first)?, parse(&second)?))
    }
}

fn parse<T: FromStr>(text: &str) -> Result<T, ApiError> {
    text.parse().map_err(|_| {
        let shown: String = text.chars().take(64).collect();
        ApiError::new(ErrorCode::NotFound, format!("'{shown}' is not an id that exists here"))
    })
}
