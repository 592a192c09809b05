//! `workspace glob` and `grep`.

use anyhow::Result;
use clap::Args;
use emergent_wire::tools::{GlobAnswer, GlobRequest, GrepAnswer, GrepMatch, GrepRequest};

use super::files::tool;
use crate::context::Context;
use crate::output;

/// The exit code of `grep` without a match.
const EXIT_NO_MATCH: u8 = 1;

/// Find files by name, newest first
///
/// Files that .gitignore excludes are left out. Hidden files are found.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent workspace glob 3fa2c9d1 '**/*.py'
  emergent workspace glob 3fa2c9d1 '*.{ts,tsx}' --path src --limit 1000")]
pub(super) struct GlobArgs {
    /// The workspace's id, or a unique prefix or suffix of it
    id: String,
    /// The pattern, such as '**/*.rs'
    #[arg(allow_hyphen_values = true)]
    pattern: String,
    /// The directory to search [default: /workspace]
    #[arg(long)]
    path: Option<String>,
    /// The maximum number of paths [default: 100]
    #[arg(long, value_name = "N")]
    limit: Option<u32>,
}

/// Search the contents of files (ripgrep's engine)
///
/// Prints `path:line:text`. Exits with 1 when nothing matches, like grep.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent workspace grep 3fa2c9d1 'def \\w+'
  emergent workspace grep 3fa2c9d1 todo -i --include '*.rs' --path src
  emergent workspace grep 3fa2c9d1 panic --context 3")]
pub(super) struct GrepArgs {
    /// The workspace's id, or a unique prefix or suffix of it
    id: String,
    /// The regular expression
    #[arg(allow_hyphen_values = true)]
    pattern: String,
    /// The file or directory to search [default: /workspace]
    #[arg(long)]
    path: Option<String>,
    /// Only files whose name or path matches this glob
    #[arg(long, short = 'g', value_name = "GLOB")]
    include: Option<String>,
    /// The maximum number of matching lines [default: 100]
    #[arg(long, value_name = "N")]
    limit: Option<u32>,
    /// Ignore the case of letters
    #[arg(long, short)]
    ignore_case: bool,
    /// The number of lines to print before and after each match
    #[arg(long, short = 'C', value_name = "LINES")]
    context: Option<u32>,
}

pub(super) async fn glob(context: &Context, args: GlobArgs) -> Result<u8> {
    let request = GlobRequest { pattern: args.pattern, path: args.path, limit: args.limit };
    let answer = tool(context, &args.id, &request).await?;
    context.show(&answer, |found: GlobAnswer| {
        found.matches.iter().try_for_each(output::line)?;
        if found.truncated {
            output::note(format_args!("note: only {} are shown; --limit shows more", found.count));
        }
        Ok(())
    })?;
    Ok(0)
}

pub(super) async fn grep(context: &Context, args: GrepArgs) -> Result<u8> {
    let request = GrepRequest {
        pattern: args.pattern,
        path: args.path,
        include: args.include,
        limit: args.limit,
        ignore_case: args.ignore_case,
        context: args.context,
    };
    let with_context = args.context.is_some_and(|lines| lines > 0);
    let answer = tool(context, &args.id, &request).await?;
    let found: GrepAnswer = answer.parse()?;
    let any = !found.matches.is_empty();
    context.show(&answer, |found: GrepAnswer| {
        output::text(&render(&found.matches, with_context))?;
        for skipped in &found.skipped {
            output::note(format_args!("note: not searched: {}", output::one_line(skipped)));
        }
        if found.truncated {
            output::note(format_args!(
                "note: only {} lines are shown; --limit shows more",
                found.matches.len()
            ));
        }
        Ok(())
    })?;
    Ok(if any { 0 } else { EXIT_NO_MATCH })
}

/// Renders matches like ripgrep: `path:line:text`, and with context `path-line-text` and `--` between groups. A line in the
/// context of two matches is printed once.
fn render(matches: &[GrepMatch], with_context: bool) -> String {
    let mut text = String::new();
    // The file and number of the last printed line.
    let mut last: Option<(&str, u64)> = None;
    for (index, found) in matches.iter().enumerate() {
        let path = found.file_path.as_str();
        let last_number = match last {
            Some((last_path, line)) if last_path == path => line,
            _ => 0,
        };
        let first = found.line_number.saturating_sub(found.before.len() as u64).max(1);
        if with_context && last.is_some_and(|(last_path, line)| last_path != path || first > line + 1) {
            text.push_str("--\n");
        }
        for (line, number) in found.before.iter().zip(first..) {
            if number > last_number {
                text.push_str(&format!("{path}-{number}-{line}\n"));
            }
        }
        text.push_str(&format!("{path}:{}:{}\n", found.line_number, found.line));
        let next = matches.get(index + 1).filter(|next| next.file_path == path);
        let end = next.map_or(u64::MAX, |next| next.line_number);
        let mut printed = found.line_number;
        for (line, number) in found.after.iter().zip(found.line_number + 1..) {
            if number < end {
                text.push_str(&format!("{path}-{number}-{line}\n"));
                printed = number;
            }
        }
        last = Some((path, printed));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, line_number: u64, before: &[&str], after: &[&str]) -> GrepMatch {
        let lines = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect();
        GrepMatch {
            file_path: path.into(),
            line_number,
            line: format!("match {line_number}"),
            before: lines(before),
            after: lines(after),
        }
    }

    #[test]
    fn matches_render_like_ripgrep() {
        let matches = [found("/a", 3, &[], &[]), found("/b", 1, &[], &[])];
        assert_eq!(render(&matches, false), "/a:3:match 3\n/b:1:match 1\n");
        assert_eq!(render(&[], false), "");
    }

    #[test]
    fn context_lines_are_printed_once_and_in_groups() {
        let matches = [
            found("/a", 2, &["one"], &["three"]),
            found("/a", 4, &["three"], &["five"]),
            found("/a", 5, &["match 4"], &["six"]),
            found("/a", 9, &["eight"], &["ten"]),
            found("/b", 1, &[], &["two"]),
        ];
        assert_eq!(
            render(&matches, true),
            "/a-1-one\n/a:2:match 2\n/a-3-three\n/a:4:match 4\n/a:5:match 5\n/a-6-six\n--\n\
             /a-8-eight\n/a:9:match 9\n/a-10-ten\n--\n/b:1:match 1\n/b-2-two\n"
        );
    }
}
