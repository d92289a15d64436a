//! Where downloads of competitors are kept.

use std::path::PathBuf;

/// The directory `name` for this project in the user's cache, as the XDG base directory
/// specification has it; it need not exist.
pub(crate) fn dir(name: &str) -> Option<PathBuf> {
    let absolute = |var| {
        std::env::var_os(var)
            .map(PathBuf::from)
            .filter(|p| p.is_absolute())
    };
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(cache.join("phalanx").join(name))
}
