//! The tolerant matchers, for an `old_string` that is nearly but not exactly in the file.
//!
//! They are tried in order. A matcher decides if it finds exactly one place; with `replace_all`, if it finds any (the two
//! matchers by similarity must be unique even then). A matcher never changes the words of the new text. It changes the white
//! space around them where old and new text agree.
//!
//! | matcher | the file may differ in |
//! |---|---|
//! | `line_trimmed` | white space at both ends of each line |
//! | `block_anchor` | the lines between the first and the last, if at least half alike |
//! | `whitespace_normalized` | the amount and kind of white space between words |
//! | `indentation_flexible` | the indentation of the block as a whole |
//! | `escape_normalized` | `\n`, `\"`, … written out in `old_string` where the file has the character |
//! | `trimmed_boundary` | white space before and after the whole text |
//! | `context_aware` | half of the lines between the first and the last |

use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use emergent_wire::ErrorDetail;

use super::exact::{self, Wanted};
use super::lines::{Budget, Lines, Stop};
use super::similarity::block_similarity;
use super::white_space::{OriginalOffsets, extend_left, extend_right, normalize, unescape};
use crate::error::cancelled;

/// The budget of each matcher, in about the number of bytes it reads: well below a second.
const WORK: u64 = 50_000_000;
/// The least similarity of the lines inside a block.
const LEAST_SIMILARITY: f64 = 0.5;
/// With more candidate blocks, the first and the last line are too common to be anchors.
const MAX_ANCHORED_BLOCKS: usize = 100;

/// A place, and the part of the new text for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Match {
    pub(super) range: Range<usize>,
    pub(super) new: Range<usize>,
}

/// The result of a matcher.
#[derive(Debug)]
pub(super) struct Found<'a> {
    pub(super) matched_by: &'static str,
    /// Whether the matcher compared by similarity.
    pub(super) is_fuzzy: bool,
    /// The new text, which `Match::new` cuts from.
    pub(super) new: Cow<'a, [u8]>,
    pub(super) matches: Vec<Match>,
}

impl Found<'_> {
    /// Whether the places can be replaced: there is one, or all are asked for and are certain.
    pub(super) fn is_decided(&self, replace_all: bool) -> bool {
        self.matches.len() == 1 || (replace_all && !self.is_fuzzy)
    }
}

/// The input of the matchers: the file without byte order mark, old and new text with `\n` only.
pub(super) struct Search<'a> {
    pub(super) body: &'a [u8],
    pub(super) old: &'a [u8],
    pub(super) new: &'a [u8],
    file: Lines<'a>,
    block: Lines<'a>,
    wanted: Wanted,
    cancel: &'a AtomicBool,
}

type Find = for<'a> fn(&Search<'a>, &mut Budget<'_>) -> Result<Vec<Match>, Stop>;

struct Matcher {
    name: &'static str,
    find: Find,
    /// It matches by similarity, so its match must be unique even with `replace_all`.
    is_fuzzy: bool,
    /// The places are for the new text without its escapes.
    unescapes_new: bool,
}

impl Matcher {
    const fn new(name: &'static str, find: Find) -> Self {
        Self { name, find, is_fuzzy: false, unescapes_new: false }
    }

    const fn fuzzy(name: &'static str, find: Find) -> Self {
        Self { is_fuzzy: true, ..Self::new(name, find) }
    }
}

const MATCHERS: [Matcher; 7] = [
    Matcher::new("line_trimmed", line_trimmed),
    Matcher::fuzzy("block_anchor", block_anchor),
    Matcher::new("whitespace_normalized", whitespace_normalized),
    Matcher::new("indentation_flexible", indentation_flexible),
    Matcher { unescapes_new: true, ..Matcher::new("escape_normalized", escape_normalized) },
    Matcher::new("trimmed_boundary", trimmed_boundary),
    Matcher::fuzzy("context_aware", context_aware),
];

impl<'a> Search<'a> {
    pub(super) fn new(
        body: &'a [u8],
        old: &'a [u8],
        new: &'a [u8],
        wanted: Wanted,
        cancel: &'a AtomicBool,
    ) -> Self {
        Self { body, old, new, file: Lines::new(body), block: Lines::new(old), wanted, cancel }
    }

    /// Tries the matchers in order. If none decides, the result is that of the first matcher that found several places.
    pub(super) fn run(&self, replace_all: bool) -> Result<Option<Found<'a>>, ErrorDetail> {
        let mut ambiguous = None;
        if self.old.trim_ascii().is_empty() {
            return Ok(None);
        }
        for Matcher { name, find, is_fuzzy, unescapes_new } in MATCHERS {
            let matches = match find(self, &mut Budget::new(WORK, self.cancel)) {
                Ok(matches) => matches,
                Err(Stop::Exhausted) => continue,
                Err(Stop::Cancelled) => return Err(cancelled()),
            };
            if matches.is_empty() {
                continue;
            }
            let new = if unescapes_new { unescape(self.new) } else { Cow::Borrowed(self.new) };
            let found = Found { matched_by: name, is_fuzzy, new, matches };
            if found.is_decided(replace_all) {
                return Ok(Some(found));
            }
            ambiguous.get_or_insert(found);
        }
        Ok(ambiguous)
    }

    /// The place of `count` whole lines. The last line's end belongs to it if the old text ends in one.
    fn whole_lines(&self, first: usize, count: usize) -> Match {
        let last = first + count - 1;
        let start = self.file.start(first);
        if !self.old.ends_with(b"\n") {
            return Match { range: start..self.file.end(last), new: 0..self.new.len() };
        }
        let has_line_end = self.file.next(last) > self.file.end(last);
        let new_length = match self.new.strip_suffix(b"\n") {
            Some(new) if !has_line_end => new.len(),
            _ => self.new.len(),
        };
        Match { range: start..self.file.next(last), new: 0..new_length }
    }

    fn without_overlaps(&self, firsts: Vec<usize>) -> Vec<usize> {
        if self.wanted.overlapping {
            return firsts;
        }
        let mut free = 0;
        firsts
            .into_iter()
            .filter(|&first| {
                let is_free = first >= free;
                if is_free {
                    free = first + self.block.len();
                }
                is_free
            })
            .collect()
    }

    /// The place of the old text's words, fitted to the white space around them: where old and new text begin (or
    /// end) with the same white space the file's own stays, else the file's is replaced along with the words.
    fn fit_boundaries(&self, words: Range<usize>) -> Match {
        let blank_start = |text: &[u8]| text.len() - text.trim_ascii_start().len();
        let blank_end = |text: &[u8]| text.len() - text.trim_ascii_end().len();
        let line_feeds = |text: &[u8]| text.iter().filter(|&&byte| byte == b'\n').count();

        let (old_lead, old_trail) = (&self.old[..blank_start(self.old)], blank_end(self.old));
        let old_trail = &self.old[self.old.len() - old_trail..];
        let new_lead = &self.new[..blank_start(self.new)];
        let new_rest = &self.new[new_lead.len()..];
        let new_trail = &new_rest[new_rest.len() - blank_end(new_rest)..];

        let mut fitted = Match { range: words.clone(), new: 0..self.new.len() };
        if old_lead == new_lead {
            fitted.new.start = new_lead.len();
        } else {
            fitted.range.start = extend_left(self.body, words.start, line_feeds(old_lead));
        }
        if old_trail == new_trail {
            fitted.new.end = self.new.len() - new_trail.len();
        } else {
            fitted.range.end = extend_right(self.body, words.end, line_feeds(old_trail));
        }
        fitted
    }

    /// Whether the file has white space (or its end) where the old text begins or ends with white space.
    fn has_room(&self, words: &Range<usize>) -> bool {
        let is_blank = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_whitespace);
        let before = words.start.checked_sub(1).and_then(|at| self.body.get(at));
        let starts_blank = self.old.first().is_some_and(u8::is_ascii_whitespace);
        let ends_blank = self.old.last().is_some_and(u8::is_ascii_whitespace);
        (!starts_blank || is_blank(before)) && (!ends_blank || is_blank(self.body.get(words.end)))
    }

    fn find_exactly(&self, old: &[u8]) -> Result<Vec<Range<usize>>, Stop> {
        match exact::find(self.body, old, self.wanted, self.cancel) {
            Ok(places) => Ok(places.ranges),
            Err(_) => Err(Stop::Cancelled),
        }
    }
}

fn line_trimmed(search: &Search<'_>, budget: &mut Budget<'_>) -> Result<Vec<Match>, Stop> {
    let count = search.block.len();
    let firsts = search.file.find_blocks(&search.block, search.wanted.most, budget)?;
    let firsts = search.without_overlaps(firsts);
    Ok(firsts.into_iter().map(|first| search.whole_lines(first, count)).collect())
}

fn block_anchor(search: &Search<'_>, budget: &mut Budget<'_>) -> Result<Vec<Match>, Stop> {
    let (file, block) = (&search.file, &search.block);
    let count = block.len();
    if count < 3 || block.is_blank(0) || block.is_blank(count - 1) {
        return Ok(Vec::new());
    }
    let tolerance = (count / 4).max(1);
    let mut matches = Vec::new();
    let mut blocks = 0;
    for first in 0..file.len() {
        if !file.same(first, block, 0) {
            continue;
        }
        let least = (first + 2).max((first + count - 1).saturating_sub(tolerance));
        let most = (first + count - 1 + tolerance).min(file.len().saturating_sub(1));
        let mut best: Option<(f64, usize)> = None;
        for last in least..=most {
            budget.spend(1)?;
            if !file.same(last, block, count - 1) {
                continue;
            }
            blocks += 1;
            if blocks > MAX_ANCHORED_BLOCKS {
                return Err(Stop::Exhausted);
            }
            let similarity = block_similarity(block, 1..count - 1, file, first + 1..last, budget)?;
            if similarity >= LEAST_SIMILARITY && best.is_none_or(|(highest, _)| similarity > highest) {
                best = Some((similarity, last));
            }
        }
        if let Some((_, last)) = best {
            matches.push(search.whole_lines(first, last - first + 1));
        }
    }
    Ok(matches)
}

fn whitespace_normalized(search: &Search<'_>, budget: &mut Budget<'_>) -> Result<Vec<Match>, Stop> {
    budget.spend(search.body.len())?;
    let words = normalize(search.old.trim_ascii());
    let text = normalize(search.body);
    let mut matches = Vec::new();
    let finder = memchr::memmem::Finder::new(&words);
    let mut from = 0;
    let mut walk = OriginalOffsets::new(search.body);
    let mut free = 0;
    while matches.len() < search.wanted.most {
        let Some(at) = finder.find(&text[from..]) else {
            break;
        };
        let start = from + at;
        from = start + 1;
        let range = walk.original(start)..walk.clone().original(start + words.len() - 1) + 1;
        budget.spend(words.len())?;
        if !search.has_room(&range) || (!search.wanted.overlapping && range.start < free) {
            continue;
        }
        free = range.end;
        matches.push(search.fit_boundaries(range));
    }
    Ok(matches)
}

fn indentation_flexible(search: &Search<'_>, budget: &mut Budget<'_>) -> Result<Vec<Match>, Stop> {
    let (file, block) = (&search.file, &search.block);
    let count = block.len();
    let block_indent = least_indent(block, 0, count);
    let mut firsts = Vec::new();
    for first in file.find_blocks(block, usize::MAX, budget)? {
        budget.spend(file.end(first + count - 1) - file.start(first))?;
        let indent = least_indent(file, first, count);
        let is_same = (0..count).all(|index| {
            block.is_blank(index)
                || file.text(first + index)[indent..].trim_ascii_end()
                    == block.text(index)[block_indent..].trim_ascii_end()
        });
        if is_same {
            firsts.push(first);
        }
    }
    let firsts = search.without_overlaps(firsts);
    Ok(firsts.into_iter().map(|first| search.whole_lines(first, count)).collect())
}

fn escape_normalized(search: &Search<'_>, _: &mut Budget<'_>) -> Result<Vec<Match>, Stop> {
    let Cow::Owned(old) = unescape(search.old) else {
        return Ok(Vec::new());
    };
    let new_length = unescape(search.new).len();
    let ranges = search.find_exactly(&old)?;
    Ok(ranges.into_iter().map(|range| Match { range, new: 0..new_length }).collect())
}

fn trimmed_boundary(search: &Search<'_>, _: &mut Budget<'_>) -> Result<Vec<Match>, Stop> {
    let words = search.old.trim_ascii();
    if words.len() == search.old.len() {
        return Ok(Vec::new());
    }
    let mut ranges = search.find_exactly(words)?;
    ranges.retain(|range| search.has_room(range));
    Ok(ranges.into_iter().map(|range| search.fit_boundaries(range)).collect())
}

fn context_aware(search: &Search<'_>, budget: &mut Budget<'_>) -> Result<Vec<Match>, Stop> {
    let (file, block) = (&search.file, &search.block);
    let count = block.len();
    if count < 3 || block.is_blank(0) || block.is_blank(count - 1) || count > file.len() {
        return Ok(Vec::new());
    }
    let mut matches = Vec::new();
    for first in 0..=file.len() - count {
        if !file.same(first, block, 0) || !file.same(first + count - 1, block, count - 1) {
            continue;
        }
        budget.spend(count * 8)?;
        let inner: Vec<usize> = (1..count - 1).filter(|&index| !block.is_blank(index)).collect();
        let same = inner.iter().filter(|&&index| file.same(first + index, block, index)).count();
        if same * 2 >= inner.len() {
            matches.push(search.whole_lines(first, count));
        }
    }
    Ok(matches)
}

/// The white space that all lines with words begin with, in bytes.
fn least_indent(lines: &Lines<'_>, first: usize, count: usize) -> usize {
    (first..first + count)
        .filter(|&index| !lines.is_blank(index))
        .map(|index| lines.text(index).len() - lines.text(index).trim_ascii_start().len())
        .min()
        .unwrap_or(0)
}
