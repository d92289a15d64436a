//! Finding the library.

use std::error::Error;
use std::ffi::{OsStr, c_int};
use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::Library;

use crate::table::Nccl;
use crate::types::ncclSuccess;

/// Names the library to load, instead of those that are tried otherwise.
pub const LIBRARY_VAR: &str = "PHALANX_NCCL_LIBRARY";

/// The oldest version that is served: 2.18.
pub const OLDEST: c_int = 21800;

/// What the loader looks for: the name that packages and wheels install, then the one that only
/// development packages have.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Why there is no library.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// None of these could be opened.
    #[error(
        "no NCCL library could be opened ({}); install libnccl2 or the wheel nvidia-nccl-cu12, \
         add its directory to LD_LIBRARY_PATH, or set {LIBRARY_VAR}",
        tried.join("; ")
    )]
    NotFound {
        /// Each name with the loader's reason.
        tried: Vec<String>,
    },
    /// It is not NCCL, or too old.
    #[error("{} has no {function}: {reason}", path.display())]
    Lacks {
        /// What was opened.
        path: PathBuf,
        /// The first function that is missing.
        function: &'static str,
        /// The loader's reason.
        reason: String,
    },
    /// It is too old.
    #[error(
        "{} is NCCL {}, at least {} is needed", path.display(), dotted(*version), dotted(OLDEST)
    )]
    TooOld {
        /// What was opened.
        path: PathBuf,
        /// Its version.
        version: c_int,
    },
}

/// What the loader says, which is behind libloading's own words.
pub(crate) fn reason(err: &libloading::Error) -> String {
    err.source().map_or(err.to_string(), ToString::to_string)
}

/// 22907 as 2.29.7.
fn dotted(version: c_int) -> String {
    format!(
        "{}.{}.{}",
        version / 10_000,
        version / 100 % 100,
        version % 100
    )
}

impl Nccl {
    /// The process's library, opened at the first call: what [`LIBRARY_VAR`] names, else
    /// `libnccl.so.2` or `libnccl.so` where the loader finds them.
    pub fn get() -> Result<&'static Nccl, LoadError> {
        static NCCL: OnceLock<Result<Nccl, LoadError>> = OnceLock::new();
        let loaded = NCCL.get_or_init(|| match std::env::var_os(LIBRARY_VAR) {
            Some(chosen) => Self::open_first(&[chosen]),
            None => Self::open_first(&NAMES),
        });
        loaded.as_ref().map_err(Clone::clone)
    }

    fn open_first<S: AsRef<OsStr>>(names: &[S]) -> Result<Nccl, LoadError> {
        let mut reasons = Vec::new();
        for name in names {
            match Self::open(name.as_ref()) {
                Err(LoadError::NotFound { tried }) => reasons.extend(tried),
                other => return other,
            }
        }
        Err(LoadError::NotFound { tried: reasons })
    }

    /// Opens one library by path or name. It stays in memory for good.
    pub fn open(name: &OsStr) -> Result<Nccl, LoadError> {
        // SAFETY: loading runs the library's initialisers. It is NCCL, or what the user named in
        // its place; its initialisers do nothing that this process relies on not being done.
        let library = unsafe { Library::new(name) }.map_err(|err| LoadError::NotFound {
            tried: vec![format!("{}: {}", name.display(), reason(&err))],
        })?;
        let mut nccl = Self::bind(library, name.into())?;
        let mut version = 0;
        // SAFETY: the argument points to an integer.
        let asked = unsafe { (nccl.ncclGetVersion)(&mut version) };
        if asked != ncclSuccess || version < OLDEST {
            let path = nccl.path;
            return Err(LoadError::TooOld { path, version });
        }
        nccl.version = version;
        Ok(nccl)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_says_what_to_do() {
        let names = ["libnone-of-this-name.so.2", "/none/at/all.so"];
        let err = Nccl::open_first(&names).unwrap_err();
        let text = err.to_string();
        assert!(names.iter().all(|name| text.contains(name)), "{text}");
        assert!(text.contains("No such file"), "{text}");
        assert!(
            text.contains("LD_LIBRARY_PATH") && text.contains(LIBRARY_VAR),
            "{text}"
        );
    }

    #[test]
    fn another_library_is_told_apart() {
        // The C library of this process, which has nothing of NCCL's.
        let err = Nccl::open("libc.so.6".as_ref()).unwrap_err();
        let text = err.to_string();
        assert!(text.contains("libc.so.6 has no ncclGetVersion"), "{text}");
    }

    #[test]
    fn versions_are_shown_as_people_write_them() {
        assert_eq!(dotted(22907), "2.29.7");
        let err = LoadError::TooOld {
            path: "x.so".into(),
            version: 21605,
        };
        let expected = "x.so is NCCL 2.16.5, at least 2.18.0 is needed";
        assert_eq!(err.to_string(), expected);
    }
}
