//! The tools of a workspace in the REST API: one handler for all entries of the table (`tools/`).

use std::sync::Arc;

use axum::body::{Body as HttpBody, Bytes};
use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use emergent_wire::WorkspaceId;
use emergent_wire::error::ErrorBody;
use futures_util::{Stream, StreamExt as _};
use utoipa::ToSchema;
use utoipa::openapi::path::{
    HttpMethod, OperationBuilder, ParameterBuilder, ParameterIn, PathItem, PathsBuilder,
};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::{ContentBuilder, Ref, RefOr, Required, ResponseBuilder, ResponsesBuilder, Schema};
use utoipa_axum::router::UtoipaMethodRouter;

use super::App;
use super::error::ApiError;
use super::extract::{Id, read_object};
use super::record::RecordedByDomain;
use super::route::{BODY_BYTES, RouteRule, Routes};
use super::stream::{self, OutputEvent};
use crate::caller::Caller;
use crate::tools::{
    Arguments, Output, PreparedCall, RunningTool, Streaming, ToolAnswer, ToolEntry, ToolError, ToolEvent,
    TypeSchema,
};

/// Adds a route for each tool, and for its alias.
pub(super) fn add_routes(routes: Routes, tools: &[Arc<ToolEntry>]) -> Routes {
    tools.iter().fold(routes, |routes, tool| {
        let rule = RouteRule::workspace_use(tool.name).body_bytes(tool.max_request_bytes);
        let title = format!("{}.", tool.title);
        let routes = routes.add(rule, route(tool, tool.name, &title, tool.notes));
        let Some(alias) = tool.alias else { return routes };
        let title = format!("{} (another name for `{}`).", tool.title, tool.name);
        routes.add(rule, route(tool, alias, &title, ""))
    })
}

/// A tool's path with its description and its handler.
fn route(tool: &Arc<ToolEntry>, name: &str, title: &str, notes: &str) -> UtoipaMethodRouter<App> {
    let answers = (tool.answers)();
    let types = [Some(tool.request), Some(answers.finished), answers.started].into_iter().flatten();
    let mut schemas: Vec<(String, RefOr<Schema>)> = Vec::new();
    for schema in types {
        schemas.push(((schema.name)(), (schema.schema)()));
        (schema.references)(&mut schemas);
    }
    let id = ParameterBuilder::new()
        .name("id")
        .parameter_in(ParameterIn::Path)
        .required(Required::True)
        .schema(Some(Ref::from_schema_name(WorkspaceId::name())));
    let mut responses = ResponsesBuilder::new().response("200", response(answers.finished));
    if let Some(started) = answers.started {
        responses = responses.response("202", response(started));
    }
    let error = TypeSchema::of::<ErrorBody>();
    let responses = responses.response("4XX", response(error)).response("5XX", response(error));
    let operation = OperationBuilder::new()
        .tag("tools")
        .summary(Some(title))
        .description(Some(notes).filter(|notes| !notes.is_empty()))
        .operation_id(Some(name))
        .parameter(id)
        .request_body(Some(
            RequestBodyBuilder::new()
                .content(
                    "application/json",
                    ContentBuilder::new().schema(Some(reference(tool.request))).build(),
                )
                .required(Some(Required::True))
                .build(),
        ))
        .responses(responses.build());
    let path = format!("/api/v1/agent/workspaces/{{id}}/{name}");
    let paths = PathsBuilder::new().path(path, PathItem::new(HttpMethod::Post, operation)).build();
    let tool = Arc::clone(tool);
    let handler =
        post(move |state, caller, recorded, id, request| call(tool, state, caller, recorded, id, request));
    (schemas, paths, handler)
}

fn reference(schema: TypeSchema) -> Ref {
    Ref::from_schema_name((schema.name)())
}

fn response(schema: TypeSchema) -> utoipa::openapi::Response {
    let content = ContentBuilder::new().schema(Some(reference(schema))).build();
    ResponseBuilder::new().content("application/json", content).build()
}

/// Calls a tool.
async fn call(
    tool: Arc<ToolEntry>,
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Extension(recorded): Extension<RecordedByDomain>,
    Id(id): Id<WorkspaceId>,
    request: Request,
) -> Result<Response, ApiError> {
    let headers = request.headers().clone();
    // A body of unknown length may be large, too.
    let may_be_large =
        tool.max_request_bytes > BODY_BYTES && length_of(&headers).is_none_or(|length| length > BODY_BYTES);
    let _permit = if may_be_large { Some(app.tools.large_file(id).await?) } else { None };
    let body = read_object(request, &app).await?;
    recorded.set();
    let call = app.tools.prepare(&caller, id, &tool, Arguments::Json(&body)).await?;
    drop(body);
    Ok(run(call, &headers).await)
}

fn length_of(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Runs a call and answers in the form that the client accepts.
async fn run(call: PreparedCall, headers: &HeaderMap) -> Response {
    let response = match call.streaming() {
        Streaming::CommandOutput if asks_for(headers, "text/event-stream") => events(call).await,
        Streaming::FileContent if asks_for(headers, "application/octet-stream") => bytes(call).await,
        _ => call.run(Output::InAnswer).await.and_then(|answer| json(&answer)),
    };
    response.unwrap_or_else(|error| ApiError::from(error).into_response())
}

fn json(answer: &ToolAnswer) -> Result<Response, ToolError> {
    let status = if answer.is_asynchronous() { StatusCode::ACCEPTED } else { StatusCode::OK };
    let body = answer.to_json()?;
    Ok((status, [(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// The output of a command as events.
async fn events(call: PreparedCall) -> Result<Response, ToolError> {
    let output = unfold(call.start().await?).map(|event| {
        Ok(match event? {
            ToolEvent::Stdout(bytes) => OutputEvent::Stdout(bytes),
            ToolEvent::Stderr(bytes) => OutputEvent::Stderr(bytes),
            ToolEvent::Answer(answer) => OutputEvent::Answer(answer.to_json()?),
        })
    });
    let output = output.map(|event| event.map_err(|error: ToolError| ApiError::from(error).0));
    Ok(stream::events(output, None))
}

/// The bytes of a file. They are read from the sandbox as fast as the client reads them.
async fn bytes(call: PreparedCall) -> Result<Response, ToolError> {
    let mut output = Box::pin(unfold(call.start().await?));
    // The first piece is read before the response begins, so that an error has its status.
    let first = output.next().await.transpose()?.map(Ok);
    let pieces = futures_util::stream::iter(first).chain(output).map(|event| match event {
        Ok(ToolEvent::Stdout(bytes) | ToolEvent::Stderr(bytes)) => Ok(bytes),
        Ok(ToolEvent::Answer(_)) => Ok(Bytes::new()),
        Err(error) => Err(std::io::Error::other(error)),
    });
    let headers = [(header::CONTENT_TYPE, "application/octet-stream")];
    Ok((headers, HttpBody::from_stream(pieces)).into_response())
}

fn unfold(running: RunningTool) -> impl Stream<Item = Result<ToolEvent, ToolError>> + Send {
    futures_util::stream::unfold(running, async |mut running| Some((running.next().await?, running)))
}

/// Whether the client asks for this media type by name.
pub(super) fn asks_for(headers: &HeaderMap, media_type: &str) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted
        .flat_map(|value| value.split(','))
        .any(|value| value.split(';').next().unwrap_or("").trim() == media_type)
}
