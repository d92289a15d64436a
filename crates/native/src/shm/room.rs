//! How much memory may be taken.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// Bytes that can be taken without somebody being killed for it; `None` if nothing says.
pub(crate) fn available() -> Option<u64> {
    let machine = read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| of_machine(&text));
    let group = read_to_string("/proc/self/cgroup")
        .ok()
        .and_then(|text| of_groups(&text, Path::new("/sys/fs/cgroup")));
    machine.into_iter().chain(group).min()
}

fn of_machine(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

/// What the files of a control group's memory are called.
#[derive(Clone, Copy)]
struct Names {
    limit: &'static str,
    usage: &'static str,
    /// In `memory.stat`: what is given back when it is needed.
    reclaimable: &'static str,
}

const UNIFIED: Names = Names {
    limit: "memory.max",
    usage: "memory.current",
    reclaimable: "inactive_file ",
};
const VERSION_1: Names = Names {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file ",
};

/// The least that the process's control groups and those above them leave, in either hierarchy.
fn of_groups(cgroup: &str, root: &Path) -> Option<u64> {
    let left = cgroup.lines().flat_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        let (names, top) = match controllers {
            "" => (UNIFIED, root.to_owned()),
            list if list.split(',').any(|name| name == "memory") => {
                (VERSION_1, root.join("memory"))
            }
            _ => return Vec::new(),
        };
        let folder: PathBuf = top.join(path.trim_start_matches('/'));
        let above = folder
            .ancestors()
            .take_while(|folder| folder.starts_with(&top));
        above.filter_map(|folder| of_group(folder, names)).collect()
    });
    left.min()
}

fn of_group(folder: &Path, names: Names) -> Option<u64> {
    let read = |name: &str| read_to_string(folder.join(name)).ok();
    let number = |name: &str| -> Option<u64> { read(name)?.trim().parse().ok() };
    let stat = read("memory.stat").unwrap_or_default();
    let reclaimable = stat
        .lines()
        .find_map(|line| line.strip_prefix(names.reclaimable)?.parse().ok());
    let used = number(names.usage)?.saturating_sub(reclaimable.unwrap_or(0));
    Some(number(names.limit)?.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_file_is_understood() {
        let meminfo = "MemTotal:       24608392 kB\nMemAvailable:   1024 kB\nBuffers: 1 kB\n";
        assert_eq!(of_machine(meminfo), Some(1 << 20));
        assert_eq!(of_machine("MemTotal: 5 kB"), None);
    }

    #[test]
    fn the_tightest_group_counts_in_either_hierarchy() {
        let root = std::env::temp_dir().join(format!("phalanx-room-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let unified = "1:cpu:/x\n0::/user.slice/a\n";
        assert_eq!(of_groups(unified, &root), None);
        write("user.slice/a/memory.max", "1000\n");
        write("user.slice/a/memory.current", "400\n");
        assert_eq!(of_groups(unified, &root), Some(600));
        // Files that are only kept in memory are no reason to say no.
        write("user.slice/a/memory.stat", "anon 1\ninactive_file 100\n");
        assert_eq!(of_groups(unified, &root), Some(700));
        write("user.slice/memory.max", "900\n");
        write("user.slice/memory.current", "850\n");
        assert_eq!(of_groups(unified, &root), Some(50));
        write("user.slice/memory.max", "max\n");
        assert_eq!(of_groups(unified, &root), Some(700));

        let first = "5:cpu,cpuacct:/x\n4:hugetlb,memory:/job/1\n0::/\n";
        write("memory/job/1/memory.limit_in_bytes", "5000\n");
        write("memory/job/1/memory.usage_in_bytes", "1000\n");
        write("memory/job/1/memory.stat", "total_inactive_file 500\n");
        assert_eq!(of_groups(first, &root), Some(4500));
        assert_eq!(of_groups("4:hugetlb:/job/1\nnonsense\n", &root), None);
        std::fs::remove_dir_all(&root).unwrap();
    }
}
