//! Checkpoints as files of one directory.
//!
//! | file | what is in it |
//! |---|---|
//! | `step_000000000012.json` | the state of each rank, and the name and digest of the tensor file |
//! | `step_000000000012-9f86d081884c7d65.safetensors` | the tensors, in a file named by its digest |
//!
//! The first file makes the checkpoint: it appears by a rename, after the other is on disk. Tensor
//! files are never written twice, so a step that is saved again does not touch what is there.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The version of the files; another is not read.
const FORMAT: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    format: u32,
    step: u64,
    tensors: String,
    sha256: String,
    states: Vec<serde_json::Value>,
}

/// A checkpoint as it is on disk.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Contents {
    pub(super) step: u64,
    pub(super) tensors: Vec<u8>,
    /// JSON, one for each rank.
    pub(super) states: Vec<String>,
}

pub(super) fn write(
    dir: &Path,
    step: u64,
    tensors: &[u8],
    states: &[String],
    keep: usize,
) -> Result<(), String> {
    let sha256 = hex(&Sha256::digest(tensors));
    let name = format!("step_{step:012}-{}.safetensors", &sha256[..16]);
    let states = states.iter().map(|state| serde_json::from_str(state));
    let manifest = Manifest {
        format: FORMAT,
        step,
        tensors: name.clone(),
        sha256,
        states: states
            .collect::<Result<_, _>>()
            .map_err(|e| e.to_string())?,
    };
    let text = serde_json::to_vec_pretty(&manifest).map_err(|err| err.to_string())?;
    fs::create_dir_all(dir).map_err(at(dir))?;
    replace(dir, &name, tensors).map_err(at(dir))?;
    replace(dir, &format!("step_{step:012}.json"), &text).map_err(at(dir))?;
    // The checkpoint is safe; that old ones are still there is not a failure to save it.
    if let Err(err) = forget_old(dir, keep) {
        tracing::warn!("old checkpoints in {} stay: {err}", dir.display());
    }
    Ok(())
}

/// Writes a file that appears as a whole, and is on disk when this returns.
fn replace(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let temporary = dir.join(format!(".{name}.tmp"));
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&temporary, dir.join(name))?;
    // The rename itself is on disk when the directory is.
    File::open(dir)?.sync_all()
}

/// The newest checkpoint that is whole. An error if there are some, and none is.
pub(super) fn newest(dir: &Path) -> Result<Option<Contents>, String> {
    let mut problem = None;
    for path in manifests(dir).map_err(at(dir))?.into_iter().rev() {
        match read(dir, &path) {
            Ok(contents) => return Ok(Some(contents)),
            Err(why) => {
                tracing::warn!("{} is left out: {why}", path.display());
                problem.get_or_insert(format!("{}: {why}", path.display()));
            }
        }
    }
    match problem {
        None => Ok(None),
        Some(problem) => Err(format!("no checkpoint is whole; the newest, {problem}")),
    }
}

fn read(dir: &Path, path: &Path) -> Result<Contents, String> {
    let text = fs::read(path).map_err(|err| err.to_string())?;
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|err| err.to_string())?;
    if manifest.format != FORMAT {
        return Err(format!("it has format {}, not {FORMAT}", manifest.format));
    }
    let name = Path::new(&manifest.tensors);
    if name.file_name() != Some(name.as_os_str()) {
        return Err(format!("{:?} is not a file name", manifest.tensors));
    }
    let tensors = fs::read(dir.join(name)).map_err(|err| format!("{}: {err}", manifest.tensors))?;
    if hex(&Sha256::digest(&tensors)) != manifest.sha256 {
        return Err(format!("{} is damaged", manifest.tensors));
    }
    Ok(Contents {
        step: manifest.step,
        tensors,
        states: manifest.states.iter().map(|s| s.to_string()).collect(),
    })
}

/// The files that make checkpoints, oldest first.
fn manifests(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(err) if err.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let step = name
            .strip_prefix("step_")
            .and_then(|n| n.strip_suffix(".json"));
        if let Some(step) = step.and_then(|step| step.parse::<u64>().ok()) {
            found.push((step, entry.path()));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Removes all but the newest, and what an interrupted save has left.
fn forget_old(dir: &Path, keep: usize) -> io::Result<()> {
    let all = manifests(dir)?;
    let (old, kept) = all.split_at(all.len().saturating_sub(keep));
    for path in old {
        fs::remove_file(path)?;
    }
    let mut needed = Vec::new();
    for path in kept {
        let manifest = serde_json::from_slice::<Manifest>(&fs::read(path)?);
        needed.extend(manifest.map(|manifest| manifest.tensors));
    }
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        let tensors = name.starts_with("step_") && name.ends_with(".safetensors");
        let temporary = name.starts_with(".step_") && name.ends_with(".tmp");
        if temporary || (tensors && !needed.iter().any(|needed| *needed == name)) {
            fs::remove_file(dir.join(name.as_ref()))?;
        }
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn at(dir: &Path) -> impl Fn(io::Error) -> String {
    move |err| format!("{}: {err}", dir.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(dir: &Path, step: u64, tensors: &[u8]) {
        write(dir, step, tensors, &["1".into(), "{\"at\":2}".into()], 2).unwrap();
    }

    fn names(dir: &Path) -> Vec<String> {
        let names = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|n| n.into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_newest_is_read_and_old_ones_go() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("made/for/it");
        assert_eq!(newest(&dir), Ok(None));
        for step in [1, 2, 10] {
            save(&dir, step, &step.to_le_bytes());
        }
        let contents = newest(&dir).unwrap().unwrap();
        assert_eq!(
            (contents.step, contents.tensors),
            (10, 10u64.to_le_bytes().to_vec())
        );
        assert_eq!(contents.states, ["1", "{\"at\":2}"]);
        assert_eq!(names(&dir).len(), 4, "{:?}", names(&dir));
    }

    #[test]
    fn what_was_interrupted_or_damaged_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        save(dir, 1, b"one");
        save(dir, 2, b"two");
        // An interrupted save: a part of a file, and tensors that nothing names.
        fs::write(dir.join(".step_000000000003.json.tmp"), "{").unwrap();
        fs::write(dir.join("step_000000000003-00.safetensors"), "three").unwrap();
        assert_eq!(newest(dir).unwrap().unwrap().step, 2);
        let tensors = |step: &str| {
            let found = names(dir).into_iter();
            let mut found = found.filter(|n| n.starts_with(&format!("{step}-")));
            dir.join(found.next().unwrap())
        };
        fs::write(tensors("step_000000000002"), "twa").unwrap();
        assert_eq!(newest(dir).unwrap().unwrap().step, 1);
        fs::remove_file(tensors("step_000000000001")).unwrap();
        let why = newest(dir).unwrap_err();
        assert!(why.contains("no checkpoint is whole"), "{why}");
        assert!(
            why.contains("step_000000000002.json") && why.contains("damaged"),
            "{why}"
        );
        save(dir, 4, b"four");
        save(dir, 5, b"five");
        assert_eq!(names(dir).len(), 4, "leftovers go: {:?}", names(dir));
    }

    #[test]
    fn a_step_saved_again_replaces_the_first() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), 7, b"first");
        save(dir.path(), 7, b"second");
        assert_eq!(newest(dir.path()).unwrap().unwrap().tensors, b"second");
        assert_eq!(names(dir.path()).len(), 2);
    }

    #[test]
    fn other_formats_and_foreign_paths_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), 7, b"tensors");
        let path = dir.path().join("step_000000000007.json");
        let text = fs::read_to_string(&path).unwrap();
        let tries = [
            ("\"format\": 1", "\"format\": 2", "format 2"),
            (
                "\"step_000000000007-",
                "\"../step_000000000007-",
                "not a file name",
            ),
        ];
        for (from, to, expected) in tries {
            fs::write(&path, text.replace(from, to)).unwrap();
            let why = newest(dir.path()).unwrap_err();
            assert!(why.contains(expected), "{why}");
        }
    }
}
