//! Finding the program before any rank is started.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Exit codes of shells for programs that are not there, or not programs.
pub(super) const NOT_FOUND: u8 = 127;
pub(super) const NOT_EXECUTABLE: u8 = 126;

/// Why a program cannot be started, and the exit code for that.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unusable {
    pub(super) why: String,
    pub(super) code: u8,
}

/// Looks for `program` as the system will, so that a typing error is one message and not one for
/// each rank.
pub(super) fn check(program: &OsStr) -> Result<(), Unusable> {
    let path = Path::new(program);
    let shown = program.display();
    let found = match path.components().count() > 1 || path.is_absolute() {
        true => Some(path.to_owned()).filter(|path| path.exists()),
        false => in_search_path(path),
    };
    let Some(found) = found else {
        let hint = match path.parent() == Some(Path::new("")) && path.is_file() {
            true => format!("there is one in this directory: write ./{shown}"),
            false if path.components().count() > 1 => "is it built?".to_owned(),
            false => "it is not in PATH; write its path, for example ./target/debug/train".into(),
        };
        return Err(Unusable {
            why: format!("no program {shown}: {hint}"),
            code: NOT_FOUND,
        });
    };
    let why = if found.is_dir() {
        format!("{shown} is a directory")
    } else if is_executable(&found) {
        return Ok(());
    } else {
        let interpreter = match found.extension().and_then(OsStr::to_str) {
            Some("py") => Some("python3"),
            Some("sh") => Some("sh"),
            _ => None,
        };
        match interpreter {
            Some(interpreter) => {
                format!("{shown} is not executable; write: -- {interpreter} {shown}")
            }
            None => format!("{shown} is not executable; is it the program?"),
        }
    };
    let code = NOT_EXECUTABLE;
    Err(Unusable { why, code })
}

fn in_search_path(name: &Path) -> Option<PathBuf> {
    let dirs = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&dirs).map(|dir| dir.join(name));
    found.into_iter().find(|path| path.is_file())
}

fn is_executable(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_run_is_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("train.py");
        std::fs::write(&script, "print(1)\n").unwrap();
        let cases = [
            (OsStr::new("no-such-program-here"), NOT_FOUND, "not in PATH"),
            (OsStr::new("./no/such/program"), NOT_FOUND, "is it built?"),
            (OsStr::new("Cargo.toml"), NOT_FOUND, "write ./Cargo.toml"),
            (dir.path().as_os_str(), NOT_EXECUTABLE, "is a directory"),
            (script.as_os_str(), NOT_EXECUTABLE, "-- python3 "),
        ];
        for (program, code, why) in cases {
            let unusable = check(program).unwrap_err();
            assert_eq!(unusable.code, code, "{unusable:?}");
            assert!(unusable.why.contains(why), "{unusable:?}");
        }
        check(OsStr::new("sh")).unwrap();
        check(OsStr::new("/bin/sh")).unwrap();
    }
}
