//! The body of an answer that ends early when something else happens.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};

/// A body that ends with its own end or with a future's, whichever comes first.
pub(super) struct UntilEnded {
    body: Body,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl UntilEnded {
    pub(super) fn new(body: Body, ended: Pin<Box<dyn Future<Output = ()> + Send>>) -> Self {
        Self { body, ended }
    }
}

impl HttpBody for UntilEnded {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.ended.as_mut().poll(context).is_ready() {
            // Not the body's own end: a client that counts bytes must see that it was cut off.
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
