//! The similarity of two blocks of lines.

use std::ops::Range;

use super::lines::{Budget, Lines, Stop};
use crate::text::edit_distance;

/// Lines are compared letter by letter only in small blocks and up to this length.
const MAX_COMPARED_LINE: usize = 256;
const MAX_COMPARED_PAIRS: usize = 4096;

/// The share of the lines `block[inner]` that the lines `file[lines]` have in the same order: from 0 to 1.
/// Blank lines don't count.
pub(super) fn block_similarity(
    block: &Lines<'_>,
    inner: Range<usize>,
    file: &Lines<'_>,
    lines: Range<usize>,
    budget: &mut Budget<'_>,
) -> Result<f64, Stop> {
    budget.spend(inner.len() + lines.len())?;
    let wanted: Vec<usize> = inner.filter(|&index| !block.is_blank(index)).collect();
    let there: Vec<usize> = lines.filter(|&index| !file.is_blank(index)).collect();
    if wanted.is_empty() {
        return Ok(if there.is_empty() { 1.0 } else { 0.0 });
    }
    let by_letter = wanted.len() * there.len() <= MAX_COMPARED_PAIRS;
    // The best sum of an alignment that keeps the order, row by row.
    let mut row = vec![0.0_f64; there.len() + 1];
    for &index in &wanted {
        let mut diagonal = 0.0;
        for (column, &other) in there.iter().enumerate() {
            budget.spend(1)?;
            let similarity = if block.same(index, file, other) {
                1.0
            } else if by_letter {
                line_similarity(block.trimmed(index), file.trimmed(other), budget)?
            } else {
                0.0
            };
            let aligned = diagonal + similarity;
            diagonal = row[column + 1];
            row[column + 1] = aligned.max(diagonal).max(row[column]);
        }
    }
    #[allow(clippy::cast_precision_loss, reason = "a few thousand lines")]
    Ok(row[there.len()] / wanted.len() as f64)
}

/// The similarity of two lines: 1 less the share of letters that must be changed (Levenshtein).
fn line_similarity(a: &[u8], b: &[u8], budget: &mut Budget<'_>) -> Result<f64, Stop> {
    let longest = a.len().max(b.len());
    if longest == 0 {
        return Ok(1.0);
    }
    let shortest = a.len().min(b.len());
    if shortest * 3 < longest {
        return Ok(0.0);
    }
    let edits = if longest > MAX_COMPARED_LINE {
        let start = a.iter().zip(b).take_while(|(x, y)| x == y).count();
        let end = a.iter().rev().zip(b.iter().rev()).take_while(|(x, y)| x == y).count();
        longest - (start + end).min(shortest)
    } else {
        budget.spend(a.len() * b.len())?;
        edit_distance(a, b)
    };
    #[allow(clippy::cast_precision_loss, reason = "a line")]
    Ok(1.0 - edits as f64 / longest as f64)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn blocks_are_compared_by_the_lines_they_share() {
        let cancel = AtomicBool::new(false);
        let mut budget = Budget::new(1_000_000, &cancel);
        let mut compare = |a: &str, b: &str| {
            let (a, b) = (Lines::new(a.as_bytes()), Lines::new(b.as_bytes()));
            block_similarity(&a, 0..a.len(), &b, 0..b.len(), &mut budget).unwrap()
        };
        assert!((compare("one\ntwo", "one\n\n two ") - 1.0).abs() < 1e-9);
        assert!(compare("let a = 1;", "let b = 1;") > 0.8);
        assert!(compare("one\ntwo\nthree", "alpha\nbeta") < 0.4);
        assert!((compare("\n", "") - 1.0).abs() < 1e-9);
    }
}
