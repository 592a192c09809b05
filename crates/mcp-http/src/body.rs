//! Bodies of requests, within a size and a time.

use std::fmt::Display;
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};

use crate::Refusal;

/// The largest body.
const MAX_BYTES: usize = 5 << 20;
/// The time for all of a body to arrive.
const MAX_TIME: Duration = Duration::from_secs(60);

/// Reads a whole body.
pub(crate) async fn read<B>(body: B) -> Result<Bytes, Refusal>
where
    B: Body + Send,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Display,
{
    match tokio::time::timeout(MAX_TIME, Limited::new(body, MAX_BYTES).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        // A limit of the server around this one is reported by an error inside another.
        Ok(Err(error)) if is_length_limit(&*error) => Err(Refusal::BodyTooLarge(MAX_BYTES)),
        Ok(Err(error)) => Err(Refusal::BodyUnreadable(error.to_string())),
        Err(_) => Err(Refusal::BodyTooSlow(MAX_TIME.as_secs())),
    }
}

fn is_length_limit(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source()).any(|error| error.is::<LengthLimitError>())
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::{StreamExt as _, stream};
    use http_body::Frame;
    use http_body_util::{Full, StreamBody};

    use super::*;

    #[tokio::test]
    async fn a_body_over_the_limit_is_refused() {
        let body = Bytes::from(vec![b' '; MAX_BYTES]);
        assert_eq!(read(Full::new(body.clone())).await.unwrap().len(), MAX_BYTES);
        let pieces = [body, Bytes::from_static(b" ")];
        let pieces = stream::iter(pieces).map(|piece| Ok::<_, Infallible>(Frame::data(piece)));
        assert_eq!(read(StreamBody::new(pieces)).await, Err(Refusal::BodyTooLarge(MAX_BYTES)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_arrives_byte_by_byte_is_refused_after_its_time() {
        let drip = stream::unfold((), |()| async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Some((Ok::<_, Infallible>(Frame::data(Bytes::from_static(b" "))), ()))
        });
        let begun = tokio::time::Instant::now();
        assert_eq!(read(StreamBody::new(drip)).await, Err(Refusal::BodyTooSlow(60)));
        assert_eq!(begun.elapsed(), MAX_TIME);
    }
}
