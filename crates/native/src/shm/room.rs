//! How much memory may be taken.

use std::fs::read_to_string;
use std::path::Path;

/// Bytes that can be taken without somebody being killed for it; `None` if nothing says.
pub(crate) fn available() -> Option<u64> {
    let machine = read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| of_machine(&text));
    let group = read_to_string("/proc/self/cgroup").ok().and_then(|text| {
        let folder = Path::new("/sys/fs/cgroup").join(folder_of(&text)?);
        of_group(&folder)
    });
    machine.into_iter().chain(group).min()
}

fn of_machine(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

/// The folder of the unified hierarchy, relative to its root.
fn folder_of(cgroup: &str) -> Option<&str> {
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(path)
}

fn of_group(folder: &Path) -> Option<u64> {
    let number =
        |name: &str| -> Option<u64> { read_to_string(folder.join(name)).ok()?.trim().parse().ok() };
    Some(number("memory.max")?.saturating_sub(number("memory.current")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_understood() {
        let meminfo = "MemTotal:       24608392 kB\nMemAvailable:   1024 kB\nBuffers: 1 kB\n";
        assert_eq!(of_machine(meminfo), Some(1 << 20));
        assert_eq!(of_machine("MemTotal: 5 kB"), None);
        assert_eq!(
            folder_of("1:cpu:/x\n0::/user.slice/a\n"),
            Some("user.slice/a")
        );
        assert_eq!(folder_of("1:cpu:/x"), None);
        let folder = std::env::temp_dir().join(format!("phalanx-room-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("memory.max"), "1000\n").unwrap();
        std::fs::write(folder.join("memory.current"), "400\n").unwrap();
        assert_eq!(of_group(&folder), Some(600));
        std::fs::write(folder.join("memory.max"), "max\n").unwrap();
        assert_eq!(of_group(&folder), None);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
