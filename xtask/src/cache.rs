//! Where downloads and builds that are not part of the work tree go.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::Failure;

/// The directory `name` for this project in the user's cache, created if need be.
pub(crate) fn dir(name: &str) -> Result<PathBuf, Failure> {
    let root = root(std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME"));
    let dir = root.ok_or("neither XDG_CACHE_HOME nor HOME is set; set one of them")?;
    let dir = dir.join(name);
    std::fs::create_dir_all(&dir).map_err(|err| format!("create {}: {err}", dir.display()))?;
    Ok(dir)
}

/// As the XDG base directory specification has it: a relative path counts as none.
fn root(cache_home: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let cache_home = cache_home.map(PathBuf::from).filter(|p| p.is_absolute());
    let home = home.map(PathBuf::from).filter(|p| p.is_absolute());
    let cache = cache_home.or_else(|| Some(home?.join(".cache")))?;
    Some(cache.join("phalanx"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_where_the_user_wants_it() {
        let root = |cache: &str, home: &str| root(Some(cache.into()), Some(home.into()));
        assert_eq!(root("/c", "/h"), Some("/c/phalanx".into()));
        assert_eq!(root("", "/h"), Some("/h/.cache/phalanx".into()));
        assert_eq!(root("c", "/h"), Some("/h/.cache/phalanx".into()));
        assert_eq!(root("", ""), None);
    }
}
