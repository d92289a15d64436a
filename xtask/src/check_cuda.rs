//! `cargo xtask check-cuda`: what only builds where CUDA is.

use std::process::ExitCode;

use crate::Failure;
use crate::shell::{Cmd, target_dir};
use crate::wheels::Wheels;

/// Type-check and lint what needs CUDA's compiler to build: candle's tensors as buffers of the nccl
/// backend. Needs no GPU and runs nothing; fetches the compiler from PyPI
#[derive(clap::Args)]
pub(crate) struct Args {}

/// The compiler with what it needs.
const WHEELS: Wheels = Wheels {
    what: "CUDA's compiler 13.4",
    dir: "cuda-13.4.92",
    size: "127 MB to download, 344 MB on disk",
    packages: &[
        (
            "nvidia-cuda-nvcc==13.4.92",
            [
                "a1f3bfb27299e060b444d5df1f4bcd762501326cf0fd3141ed61756816ab9a0e",
                "d6fc9f720c3b73b9e526f4c759dbc6581e1a300ba2c8191e3f0ed91c848a92c8",
            ],
        ),
        (
            "nvidia-nvvm==13.4.92",
            [
                "e4c81cb321dd9743bcf871c5e7e8fecd7f05dea607944426e102bdda8d49e137",
                "6b70f49442461c1b1033e599ff021676ea3d20840be1e7f92e1d6560daf08637",
            ],
        ),
        (
            "nvidia-cuda-crt==13.4.92",
            [
                "731ce3de11df8add8306404417a1edaede225dbe27eb233aed37c8de9d4fe720",
                "212dbd6410b090f5c5b88e8671e44df5d43c591c12f232dae3197b137b616009",
            ],
        ),
        (
            "nvidia-cuda-runtime==13.4.92",
            [
                "9641f797da20ce1dd8e779b6e96d08cf9ba564cec8e8225458811ee26423f3a5",
                "bef071788589550ab02846fcbc732a2b88c2b16f2cd8a0f45d98e68e8c5fb0c8",
            ],
        ),
        (
            "nvidia-cuda-cccl==13.3.5.0.6",
            [
                "d5230098fa2df5021e1a00c0c4eee41797671a91119d31e892463e5ccf3ee326",
                "6f30b8076b3e69951c459c94ae190bde51924b320076ebaec376d36848b4c76e",
            ],
        ),
    ],
    files: &[
        "nvidia/cu13/bin/nvcc",
        "nvidia/cu13/nvvm/bin/cicc",
        "nvidia/cu13/include/cuda_runtime.h",
        "nvidia/cu13/include/crt/host_config.h",
        "nvidia/cu13/include/cccl/cuda/std/version",
    ],
};

/// A device that candle supports, and CUDA 13 still does: there is none to ask.
const COMPUTE_CAPABILITY: &str = "80";

/// Kernels that nobody runs need not be fast, and take three times as long with optimisation. One of
/// them does not compile without any.
const HARDLY_OPTIMISED: &str = "-Xcicc -O1 -Xptxas -O0";

pub(crate) fn run(_: &Args) -> Result<ExitCode, Failure> {
    WHEELS.fetch()?;
    let cuda = WHEELS.path()?.join("nvidia/cu13");
    let old = std::env::var_os("PATH").unwrap_or_default();
    let paths = [cuda.join("bin")]
        .into_iter()
        .chain(std::env::split_paths(&old));
    let paths = std::env::join_paths(paths)?;
    let lints = ["--", "-D", "warnings"];
    for (command, rest) in [
        ("check", &[][..]),
        ("clippy", &lints),
        ("doc", &["--no-deps"]),
    ] {
        let with_candle = ["--package", "phalanx-nccl", "--features", "candle-0_11"];
        let cargo = Cmd::cargo().arg(command).args(with_candle).args(rest);
        // Of its own: with another compiler in the path much is built anew.
        let cargo = cargo.env("CARGO_TARGET_DIR", target_dir().join("check-cuda"));
        let cargo = cargo.env("RUSTDOCFLAGS", "-D warnings");
        let cargo = cargo.env("CUDA_COMPUTE_CAP", COMPUTE_CAPABILITY);
        let cargo = cargo.env("NVCC_APPEND_FLAGS", HARDLY_OPTIMISED);
        let cargo = cargo.env("NVCC", cuda.join("bin/nvcc")).env("PATH", &paths);
        let homes = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"].into_iter();
        let cargo = homes.fold(cargo, |cargo, name| cargo.env(name, &cuda));
        if !cargo.status()?.success() {
            return Ok(ExitCode::FAILURE);
        }
    }
    println!("what needs CUDA's compiler type-checks and has no lints; nothing of it was run");
    Ok(ExitCode::SUCCESS)
}
