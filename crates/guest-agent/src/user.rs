//! The users of an image, as which servers run.
//!
//! `posix_spawn` can't change the user of a new process. So the process first runs the agent's program (`run-as`), which drops
//! its privileges and executes the server's program.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;

use crate::{family, log};

/// The agent's subcommand that changes the user.
pub(crate) const RUN_AS: &str = "run-as";
/// The agent's subcommand that ends the descendants of such a process.
pub(crate) const END_FAMILY: &str = "end-family";

/// A user; root by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) home: String,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

impl User {
    pub(crate) fn is_root(&self) -> bool {
        self.uid == 0 && self.gid == 0
    }

    /// Looks a user up as an image names it: `name` or `uid`, and perhaps `:group` or `:gid`.
    pub(crate) fn find(text: &str) -> Result<Self, String> {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        Self::find_in(text, &read("/etc/passwd"), &read("/etc/group"))
    }

    fn find_in(text: &str, users: &str, groups: &str) -> Result<Self, String> {
        let (user, group) = text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
        if user.is_empty() {
            return Ok(Self::default());
        }
        let number: Option<u32> = user.parse().ok();
        let known = users.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|fields| {
            fields.first() == Some(&user)
                || number.is_some() && fields.get(2).and_then(|uid| uid.parse().ok()) == number
        });
        let field = |index: usize| known.as_ref().and_then(|fields| fields.get(index).copied());
        let uid = field(2).and_then(|uid| uid.parse().ok()).or(number);
        let uid = uid.ok_or_else(|| format!("the image has no user '{user}'"))?;
        let own_gid = field(3).and_then(|gid| gid.parse().ok()).unwrap_or(0);
        let name = field(0).unwrap_or(user).to_owned();
        let home = field(5).filter(|home| !home.is_empty()).unwrap_or("/").to_owned();
        let groups: Vec<Vec<&str>> = groups.lines().map(|line| line.split(':').collect()).collect();
        let gid_of = |fields: &[&str]| fields.get(2).and_then(|gid| gid.parse::<u32>().ok());
        let gid = match group {
            None => own_gid,
            Some(group) => groups
                .iter()
                .find(|fields| fields.first() == Some(&group))
                .and_then(|fields| gid_of(fields))
                .or_else(|| group.parse().ok())
                .ok_or_else(|| format!("the image has no group '{group}'"))?,
        };
        let is_member = |fields: &&Vec<&str>| {
            fields.get(3).is_some_and(|members| members.split(',').any(|member| member == name))
        };
        // As with the engine, a named group replaces the user's groups.
        let others = groups.iter().filter(is_member).filter_map(|fields| gid_of(fields));
        let groups = if group.is_none() { others.collect() } else { Vec::new() };
        Ok(Self { name, home, uid, gid, groups })
    }

    /// Gives a directory to the user, unless another user than root owns it.
    pub(crate) fn own(&self, directory: &Path) {
        let _ = std::fs::create_dir_all(directory);
        // A new ext4 disk has this directory; some programs need an empty one.
        let _ = std::fs::remove_dir(directory.join("lost+found"));
        if std::fs::metadata(directory).is_ok_and(|found| found.uid() == 0)
            && let Err(error) = std::os::unix::fs::chown(directory, Some(self.uid), Some(self.gid))
        {
            log(&format!("{} can't be given to user {}: {error}", directory.display(), self.uid));
        }
    }

    /// For [`run_as`]: user, group, further groups.
    pub(crate) fn ids(&self) -> String {
        let all = [self.uid, self.gid].into_iter().chain(self.groups.iter().copied());
        all.map(|id| id.to_string()).collect::<Vec<_>>().join(",")
    }
}

/// Executes a program as another user. Returns only when that fails.
pub(crate) fn run_as(ids: &str, program: &str, arguments: &[&str]) -> Result<(), String> {
    become_user(ids)?;
    Err(format!("{program} can't be run: {}", std::process::Command::new(program).args(arguments).exec()))
}

/// Ends a family of another user's processes. Only that user can see their tags: root without all its rights can not.
pub(crate) fn end_family(ids: &str, tag: &str) -> Result<(), String> {
    become_user(ids)?;
    family::kill(tag);
    Ok(())
}

fn become_user(ids: &str) -> Result<(), String> {
    let ids: Vec<u32> = ids.split(',').filter_map(|id| id.parse().ok()).collect();
    let [uid, gid, ref groups @ ..] = ids[..] else {
        return Err("a user and a group are needed".to_owned());
    };
    let groups: Vec<u32> = std::iter::once(gid).chain(groups.iter().copied()).collect();
    // SAFETY: the list lives until the call returns; this process has one thread.
    let changed = unsafe {
        libc::setgroups(groups.len(), groups.as_ptr()) == 0
            && libc::setgid(gid) == 0
            && libc::setuid(uid) == 0
    };
    if !changed {
        return Err(format!("can't become user {uid}: {}", std::io::Error::last_os_error()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: &str = "root:x:0:0:root:/root:/bin/sh\nmcp:x:1000:1001:MCP:/home/mcp:/bin/sh\n";
    const GROUPS: &str = "root:x:0:\nmcp:x:1001:\ndocker:x:50:mcp,other\n";

    fn ids(text: &str) -> Result<String, String> {
        User::find_in(text, USERS, GROUPS).map(|user| user.ids())
    }

    #[test]
    fn a_user_is_found_as_images_name_it() {
        assert_eq!(ids("mcp"), Ok("1000,1001,50".to_owned()));
        assert_eq!(ids("1000"), Ok("1000,1001,50".to_owned()));
        assert_eq!(ids("mcp:docker"), Ok("1000,50".to_owned()));
        assert_eq!(ids("4711"), Ok("4711,0".to_owned()));
        assert_eq!(ids("4711:4712"), Ok("4711,4712".to_owned()));
        assert_eq!(ids(""), Ok("0,0".to_owned()));
        assert_eq!(ids("nobody"), Err("the image has no user 'nobody'".to_owned()));
        assert_eq!(ids("mcp:staff"), Err("the image has no group 'staff'".to_owned()));
        assert_eq!(User::find_in("mcp", USERS, GROUPS).map(|user| user.home), Ok("/home/mcp".to_owned()));
    }
}
