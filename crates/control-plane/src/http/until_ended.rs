//! The body of an answer that is cut off when a future completes.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use tracing::Span;

/// A body that ends with its own end or with a future's, whichever comes first. It is read within the span of its request, so that
/// log lines of a stream carry the request's fields.
pub(super) struct UntilEnded {
    body: Body,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
    span: Span,
}

impl UntilEnded {
    pub(super) fn new(body: Body, ended: Pin<Box<dyn Future<Output = ()> + Send>>) -> Self {
        Self { body, ended, span: Span::current() }
    }
}

impl HttpBody for UntilEnded {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let span = self.span.clone();
        let _entered = span.enter();
        if self.ended.as_mut().poll(context).is_ready() {
            // An error, so that the client does not take the body for complete.
            let cut_off = std::io::Error::other("the token can't be used any more");
            return Poll::Ready(Some(Err(axum::Error::new(cut_off))));
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use axum::body::to_bytes;

    use super::*;

    #[tokio::test]
    async fn a_body_is_read_within_the_span_of_its_request() {
        let _default = tracing::subscriber::set_default(tracing_subscriber::registry());
        let name_of_span = || Span::current().metadata().map_or("none", |span| span.name());
        let body = futures_util::stream::once(async move { Ok::<_, Infallible>(name_of_span()) });
        let never_ended = Box::pin(std::future::pending());
        let body =
            tracing::info_span!("request").in_scope(|| UntilEnded::new(Body::from_stream(body), never_ended));
        assert_eq!(to_bytes(Body::new(body), 100).await.unwrap(), "request");
    }
}
