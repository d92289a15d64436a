//! `cargo xtask fuzz`: the fuzz targets for longer than the tests run them.

use std::path::Path;
use std::process::ExitCode;

use crate::Failure;
use crate::shell::{Cmd, root};

/// cargo-fuzz needs flags that only this toolchain has.
const TOOLCHAIN: &str = "nightly";

/// Run each fuzz target of fuzz/ for some time, starting from the committed seeds.
///
/// Needs a nightly toolchain and cargo-fuzz. What the fuzzer finds on the way stays in
/// fuzz/corpus, inputs that crash in fuzz/artifacts. The same bodies run as bounded property
/// tests in `cargo xtask test`, without either.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long each target runs
    #[arg(long, default_value_t = 60)]
    seconds: u64,

    /// Run only these targets
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,

    /// Install cargo-fuzz with `cargo install` if it is not there
    #[arg(long)]
    install: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Failure> {
    let fuzz = root().join("fuzz");
    if !fuzz.join("Cargo.toml").exists() {
        return Err("there are no fuzz targets: fuzz/Cargo.toml is missing".into());
    }
    provide_tools(args.install)?;
    let all = Cmd::cargo_of(TOOLCHAIN).args(["fuzz", "list"]).read()?;
    let targets = choose(&all, &args.targets)?;
    let mut failed = Vec::new();
    for (i, target) in targets.iter().enumerate() {
        println!(
            "\n=== {} of {}: {target}, {} s",
            i + 1,
            targets.len(),
            args.seconds
        );
        if !run_target(&fuzz, target, args.seconds)? {
            failed.push(*target);
        }
    }
    println!(
        "\n{} targets passed, {} failed",
        targets.len() - failed.len(),
        failed.len()
    );
    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(format!("failed: {}; see fuzz/artifacts", failed.join(", ")).into())
}

fn provide_tools(install: bool) -> Result<(), Failure> {
    if !Cmd::cargo_of(TOOLCHAIN).arg("--version").succeeds() {
        return Err("no nightly toolchain; rustup toolchain install nightly".into());
    }
    if Cmd::cargo_of(TOOLCHAIN)
        .args(["fuzz", "--version"])
        .succeeds()
    {
        return Ok(());
    }
    if !install {
        return Err(
            "no cargo-fuzz; --install installs it, as cargo install cargo-fuzz does".into(),
        );
    }
    println!("installing cargo-fuzz into cargo's bin directory");
    let status = Cmd::cargo()
        .args(["install", "--locked", "cargo-fuzz"])
        .status()?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("cargo-fuzz could not be installed: {status}").into()),
    }
}

fn choose<'a>(all: &'a str, wanted: &[String]) -> Result<Vec<&'a str>, Failure> {
    let all: Vec<&str> = all.split_whitespace().collect();
    if let Some(unknown) = wanted.iter().find(|name| !all.contains(&name.as_str())) {
        let known = all.join(", ");
        return Err(format!("there is no fuzz target {unknown}; there are {known}").into());
    }
    let chosen = all.into_iter();
    Ok(chosen
        .filter(|name| wanted.is_empty() || wanted.iter().any(|w| w == name))
        .collect())
}

fn run_target(fuzz: &Path, target: &str, seconds: u64) -> Result<bool, Failure> {
    // The first directory is where finds are written to; the seeds are only read.
    let (corpus, seeds) = (
        fuzz.join("corpus").join(target),
        fuzz.join("seeds").join(target),
    );
    std::fs::create_dir_all(&corpus)?;
    let run = Cmd::cargo_of(TOOLCHAIN)
        .args(["fuzz", "run", target])
        .arg(corpus);
    let run = match seeds.is_dir() {
        true => run.arg(seeds),
        false => run,
    };
    let limit = format!("-max_total_time={seconds}");
    Ok(run.args(["--", limit.as_str()]).status()?.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_all_or_those_asked_for() {
        let all = "replies\nrequests\n";
        assert_eq!(choose(all, &[]).unwrap(), ["replies", "requests"]);
        assert_eq!(choose(all, &["requests".into()]).unwrap(), ["requests"]);
        let unknown = choose(all, &["request".into()]).unwrap_err().to_string();
        assert!(unknown.contains("there are replies, requests"), "{unknown}");
    }
}
