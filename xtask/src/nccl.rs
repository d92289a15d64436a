//! NVIDIA's NCCL for tests, and the long checks of its backend.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::shell::{Cmd, root};
use crate::{Failure, cache};

/// The newest version that nccl-sys knows.
const VERSION: &str = "2.32.3";

/// What it takes, measured.
const SIZE: &str = "305 MB to download, 360 MB on disk";

/// The wheels by their digests: for x86-64 and for ARM.
const HASHES: [&str; 2] = [
    "1459723080ac889d73a26edfa3e04383a7928ab31ac8f0ec43b3ea9548b04ff3",
    "a5bee92b2f4af218c109f8d221c3c9adcc752b94ae0ffcb0ed5abf9341a7724c",
];

/// Where the wheel's `include` and `lib` are, or would be.
pub(crate) fn dir() -> Result<PathBuf, Failure> {
    Ok(cache::dir(&format!("nccl-{VERSION}"))?.join("nvidia/nccl"))
}

pub(crate) fn is_there() -> bool {
    let files = ["include/nccl.h", "lib/libnccl.so.2"];
    dir().is_ok_and(|dir| files.iter().all(|file| dir.join(file).exists()))
}

/// Downloads the wheel into the user's cache directory unless it is there.
pub(crate) fn fetch() -> Result<(), Failure> {
    if is_there() {
        return Ok(());
    }
    let target = cache::dir(&format!("nccl-{VERSION}"))?;
    println!("fetching NCCL {VERSION} into {} ({SIZE})", target.display());
    let hashes: Vec<String> = HASHES
        .iter()
        .map(|h| format!("--hash=sha256:{h}"))
        .collect();
    let wanted = format!("nvidia-nccl-cu13=={VERSION} {}\n", hashes.join(" "));
    let list = target.join("requirements.txt");
    std::fs::write(&list, wanted)?;
    let install = [
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--only-binary",
        ":all:",
    ];
    let pip = Cmd::new("python3").args(install).arg("--require-hashes");
    let pip = pip.arg("--upgrade").arg("--target").arg(&target);
    match pip.arg("--requirement").arg(&list).status()?.success() {
        true => Ok(()),
        false => Err("pip failed; on Debian: apt-get install python3-pip".into()),
    }
}

/// Faults on the emulated device, then the build beside others' features of cudarc.
pub(crate) fn soak(runs: u32) -> Result<ExitCode, Failure> {
    let test = ["test", "--package", "phalanx-nccl", "--test", "emulated"];
    let faults = Cmd::cargo().args(test).args(["--", "faults::"]);
    let faults = faults.env("EMU_REPEAT", runs.to_string());
    let mut failed = !faults.status()?.success();
    for (who, features) in NEIGHBOURS {
        println!("\n=== beside {who}");
        failed |= !check_beside(features)?;
    }
    Ok(match failed {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}

/// The features of cudarc that other crates of a program may switch on.
const NEIGHBOURS: [(&str, &str); 4] = [
    ("nobody", r#""std", "driver""#),
    (
        "candle-core 0.11",
        r#""std", "cublas", "cublaslt", "curand", "driver", "nvrtc", "f16",
           "cuda-version-from-build-system", "dynamic-linking""#,
    ),
    (
        "cubecl-cuda 0.11",
        r#""std", "driver", "nvrtc", "nccl", "fallback-dynamic-loading",
           "cuda-version-from-build-system", "fallback-latest""#,
    ),
    (
        "both",
        r#""std", "cublas", "cublaslt", "curand", "driver", "nvrtc", "nccl", "f16",
           "dynamic-linking", "fallback-dynamic-loading", "cuda-version-from-build-system",
           "fallback-latest""#,
    ),
];

/// Whether a crate that has both the backend and cudarc with these features type-checks.
fn check_beside(features: &str) -> Result<bool, Failure> {
    let dir = tempfile::tempdir()?;
    let backend = root().join("crates/nccl");
    let manifest = format!(
        "[package]\nname = \"beside\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n\
         [dependencies]\nphalanx-nccl = {{ path = {backend:?} }}\n\
         cudarc = {{ version = \"0.19\", default-features = false, features = [{features}] }}\n"
    );
    std::fs::write(dir.path().join("Cargo.toml"), manifest)?;
    std::fs::create_dir(dir.path().join("src"))?;
    let source = "//! Both in one program.\npub use {cudarc, phalanx_nccl};\n";
    std::fs::write(dir.path().join("src/lib.rs"), source)?;
    std::fs::copy(root().join("Cargo.lock"), dir.path().join("Cargo.lock"))?;
    let target = crate::shell::target_dir().join("beside");
    let check = Cmd::cargo().arg("check").arg("--manifest-path");
    let check = check.arg(dir.path().join("Cargo.toml"));
    Ok(check.env("CARGO_TARGET_DIR", target).status()?.success())
}
