//! Compiles what only C can say about MPI: the constants that are not values to bindgen.

fn main() {
    println!("cargo::rerun-if-changed=shim/constants.c");
    let library = match build_probe_mpi::probe() {
        Ok(library) => library,
        Err(reasons) => {
            let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
            println!(
                "cargo::error=MPI is needed for the feature `mpi`: {}",
                reasons.join("; ")
            );
            println!(
                "cargo::error=install it with libclang (Debian and Ubuntu: apt install \
                 libopenmpi-dev openmpi-bin libclang-dev), or build without the feature `mpi`"
            );
            std::process::exit(1);
        }
    };
    let mut build = cc::Build::new();
    build
        .file("shim/constants.c")
        .includes(library.include_paths);
    if let Some(mpicc) = library.mpicc {
        build.compiler(mpicc);
    }
    build.compile("phalanx_mpi_constants");
}
