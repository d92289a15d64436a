//! Finds Gloo, builds the shim against it and links both.

use std::env::{self, VarError};
use std::path::{Path, PathBuf};
use std::process::exit;

/// Where `gloo/context.h` and its siblings are; without it the usual places are tried.
const INCLUDE_VAR: &str = "GLOO_INCLUDE_DIR";
/// Where the library is; without it the linker's own places.
const LIB_VAR: &str = "GLOO_LIB_DIR";
/// What to link, separated by commas, if not `gloo`.
const NAME_VAR: &str = "GLOO_LIB_NAME";
/// The dialect of C++, for headers that need another than `c++17`.
const STD_VAR: &str = "GLOO_CXX_STD";

const USUAL: [&str; 3] = [
    "/usr/include",
    "/usr/local/include",
    "/opt/homebrew/include",
];
const HEADER: &str = "gloo/rendezvous/context.h";

fn main() {
    println!("cargo::rerun-if-changed=shim");
    for name in [INCLUDE_VAR, LIB_VAR, NAME_VAR, STD_VAR] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    if env::var_os("DOCS_RS").is_some() {
        return;
    }
    let include = include_dir().unwrap_or_else(|why| give_up(&why));
    compile(&include);
    if let Some(dir) = var(LIB_VAR) {
        println!("cargo::rustc-link-search=native={dir}");
    }
    let names = var(NAME_VAR).unwrap_or_else(|| "gloo".into());
    for name in names.split(',') {
        println!("cargo::rustc-link-lib=dylib={name}");
    }
}

fn var(name: &str) -> Option<String> {
    match env::var(name) {
        Ok(text) if text.is_empty() => None,
        Ok(text) => Some(text),
        Err(VarError::NotPresent) => None,
        Err(VarError::NotUnicode(_)) => give_up(&format!("{name} is not readable as text")),
    }
}

fn include_dir() -> Result<PathBuf, String> {
    let has_gloo = |dir: &Path| dir.join(HEADER).exists();
    match var(INCLUDE_VAR) {
        Some(dir) if has_gloo(Path::new(&dir)) => Ok(dir.into()),
        Some(dir) => Err(format!("{INCLUDE_VAR}={dir} has no {HEADER}")),
        None => USUAL
            .iter()
            .map(PathBuf::from)
            .find(|dir| has_gloo(dir))
            .ok_or_else(|| format!("found no {HEADER} in {}", USUAL.join(", "))),
    }
}

fn compile(include: &Path) {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std(&var(STD_VAR).unwrap_or_else(|| "c++17".into()))
        .file("shim/shim.cc")
        // Its inner loops are the library's templates.
        .opt_level(3)
        .flag_if_supported("-Wno-unused-parameter")
        .flag_if_supported("-Wno-sign-compare");
    if include != Path::new("/usr/include") {
        build.include(include);
    }
    if let Err(err) = build.try_compile("phalanx_gloo_shim") {
        give_up(&format!(
            "the shim does not compile against {}: {err}",
            include.display()
        ));
    }
}

fn give_up(why: &str) -> ! {
    println!("cargo::error=Gloo is needed for the feature `gloo`: {why}");
    println!(
        "cargo::error=install it with a C++ compiler (Debian and Ubuntu: apt install libgloo-dev \
         g++), or set {INCLUDE_VAR} and {LIB_VAR}, or build without the feature `gloo`"
    );
    exit(1)
}
