//! A call whose output is read while it runs.

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use tracing::Instrument as _;

use super::call::{Output, Piece, PreparedCall};
use super::error::ToolError;
use super::table::ToolAnswer;

/// An event of a running call. The answer is the last one.
pub(crate) enum ToolEvent {
    Stdout(Bytes),
    Stderr(Bytes),
    Answer(ToolAnswer),
}

/// A call that runs only while its events are read, so a slow reader slows it down. Dropping it cancels the call.
pub(crate) struct RunningTool {
    /// None after the call has ended.
    run: Option<BoxFuture<'static, Result<ToolAnswer, ToolError>>>,
    output: mpsc::Receiver<Piece>,
    result: Option<Result<ToolAnswer, ToolError>>,
}

impl PreparedCall {
    /// Starts the call and waits until the agent has it. Returns the errors that come before that.
    pub(crate) async fn start(self) -> Result<RunningTool, ToolError> {
        let (sender, output) = mpsc::channel(1);
        let run = Box::pin(self.run(Output::Streamed(sender)).in_current_span());
        let mut running = RunningTool { run: Some(run), output, result: None };
        // The first piece is `Started`.
        running.next_piece().await;
        match running.result {
            Some(Err(error)) => Err(error),
            _ => Ok(running),
        }
    }
}

impl RunningTool {
    /// Waits for the next event. None after the answer or an error.
    pub(crate) async fn next(&mut self) -> Option<Result<ToolEvent, ToolError>> {
        loop {
            match self.next_piece().await {
                Some(Piece::Started) => {}
                Some(Piece::Stdout(bytes)) => return Some(Ok(ToolEvent::Stdout(bytes))),
                Some(Piece::Stderr(bytes)) => return Some(Ok(ToolEvent::Stderr(bytes))),
                None => return self.result.take().map(|result| result.map(ToolEvent::Answer)),
            }
        }
    }

    /// Runs the call until it sends a piece. None after its end, when all pieces were read.
    async fn next_piece(&mut self) -> Option<Piece> {
        loop {
            let Some(run) = &mut self.run else { return self.output.recv().await };
            let result = tokio::select! {
                biased;
                Some(piece) = self.output.recv() => return Some(piece),
                result = run => result,
            };
            self.run = None;
            self.result = Some(result);
        }
    }
}
