//! The program `phalanx`.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    phalanx_cli::main()
}
