//! grep of a large tree, against `rg` by the bash tool in the same sandbox.
//!
//! `tree.py` makes the tree in the sandbox. Both search the whole tree, which a comparison of their matches checks.

use std::cell::Cell;

use anyhow::{Result, ensure};
use serde_json::json;

use crate::bench::report::{Promise, Ratio, Row};
use crate::bench::session::{Session, Workspace};
use crate::bench::turns::{Rounds, in_turns};

const TREE: &str = "/workspace/tree";
const SCRIPT: &str = include_str!("tree.py");

struct Search {
    name: &'static str,
    pattern: &'static str,
    ignore_case: bool,
}

/// `tree.py` writes the matching lines.
const SEARCHES: [Search; 3] = [
    Search { name: "a rare literal", pattern: "needle_in_the_haystack", ignore_case: false },
    Search { name: "a regex with classes", pattern: r"[A-Z]+_[0-9]{4}_handle\(\w+\)", ignore_case: false },
    Search { name: "ignoring case", pattern: "Needle_In_The_Haystack", ignore_case: true },
];

pub(super) async fn measure(session: &Session) -> Result<Vec<Row>> {
    let (_, workspace) = session.create("gvisor").await?;
    let mebibytes = session.either(64, 1024);
    session.tool(&workspace, "write", &json!({ "file_path": "/tmp/tree.py", "content": SCRIPT })).await?;
    let (took, made) = session.bash(&workspace, &format!("python3 /tmp/tree.py {TREE} {mebibytes}")).await?;
    session.progress(&format!("grep: a tree of {} in {:.1} s", made.trim(), took.as_secs_f64()));

    let mut rows = Vec::new();
    for search in &SEARCHES {
        session.progress(&format!("grep: {} …", search.name));
        rows.push(compare(session, &workspace, search, mebibytes).await?);
    }
    session.destroy(workspace).await?;
    Ok(rows)
}

async fn compare(session: &Session, workspace: &Workspace, search: &Search, mebibytes: u32) -> Result<Row> {
    let request = json!({
        "pattern": search.pattern, "path": TREE, "ignore_case": search.ignore_case, "limit": 10_000,
    });
    let flag = if search.ignore_case { " --ignore-case" } else { "" };
    let command = format!("rg --hidden --no-heading -n{flag} '{}' {TREE}", search.pattern);
    let found = Cell::new((0, 0));

    let ours = async || {
        let (took, answer) = session.tool(workspace, "grep", &request).await?;
        ensure!(
            answer["truncated"] == false && answer["skipped"].is_null(),
            "not all was searched: {answer}"
        );
        let count = answer["matches"].as_array().map_or(0, Vec::len);
        found.set((count, found.get().1));
        Ok(took)
    };
    let rg = async || {
        let (took, printed) = session.bash(workspace, &command).await?;
        found.set((found.get().0, printed.lines().count()));
        Ok(took)
    };
    let pair = in_turns(Rounds { warm_up: 1, counted: session.either(7, 9) }, ours, rg).await?;
    let (ours, rg) = found.get();
    ensure!(ours == rg && ours > 0, "grep found {ours} lines with '{}', rg {rg}", search.pattern);

    let name = format!("grep {mebibytes} MiB, {} / rg", search.name);
    Ok(Row::compared(&name, pair, Ratio::TimesAsLong, &[Promise::AtMostTimes(1.2)]))
}
