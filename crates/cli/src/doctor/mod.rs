//! `phalanx doctor`: what this machine has for a job, and what it lacks.

mod libraries;
mod system;
mod variables;

use std::process::ExitCode;

use serde::Serialize;

use crate::Failure;

/// Say what this machine has: backends, libraries, processors, limits, interfaces, variables.
///
/// The exit code is 1 if something will not work; what is only missing or odd does not count.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

/// Everything that was found.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    backends: Vec<String>,
    libraries: Vec<libraries::Library>,
    system: system::System,
    variables: Vec<variables::Variable>,
    findings: Vec<Finding>,
}

/// Something that the reader should know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    level: Level,
    what: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    /// Will not work.
    Problem,
    /// Probably not what was meant.
    Warning,
    /// Something to install or to set, if wanted.
    Advice,
}

impl Finding {
    fn problem(what: impl Into<String>) -> Self {
        let (level, what) = (Level::Problem, what.into());
        Self { level, what }
    }

    fn warning(what: impl Into<String>) -> Self {
        let (level, what) = (Level::Warning, what.into());
        Self { level, what }
    }

    fn advice(what: impl Into<String>) -> Self {
        let (level, what) = (Level::Advice, what.into());
        Self { level, what }
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Failure> {
    let report = examine();
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => print(&report),
    }
    let broken = report.findings.iter().any(|f| f.level == Level::Problem);
    Ok(ExitCode::from(u8::from(broken)))
}

fn examine() -> Report {
    let backends = phalanx::backends();
    let libraries = libraries::find_all();
    let system = system::System::read();
    let variables = variables::of_interest(std::env::vars_os());
    let mut findings = Vec::new();
    if backends.is_empty() {
        findings.push(Finding::problem("no backend is built into this program"));
    }
    findings.extend(system.findings());
    findings.extend(variables::findings(&variables));
    findings.extend(libraries.iter().filter_map(libraries::Library::finding));
    Report {
        version: env!("CARGO_PKG_VERSION"),
        backends,
        libraries,
        system,
        variables,
        findings,
    }
}

fn print(report: &Report) {
    println!("phalanx {}", report.version);
    println!("\nbackends built in: {}", report.backends.join(", "));
    println!("\nlibraries and programs");
    for library in &report.libraries {
        let found = match &library.path {
            Some(path) => path.display().to_string(),
            None => "not found".to_owned(),
        };
        println!("  {:<10} {found}  ({})", library.name, library.used_for);
    }
    report.system.print();
    println!("\nvariables");
    if report.variables.is_empty() {
        println!("  none that matters is set");
    }
    for variable in &report.variables {
        println!("  {}={}", variable.name, variable.value);
    }
    println!("\nfindings");
    if report.findings.is_empty() {
        println!("  all is well");
    }
    for Finding { level, what } in &report.findings {
        let level = match level {
            Level::Problem => "PROBLEM",
            Level::Warning => "warning",
            Level::Advice => "advice",
        };
        println!("  {level:<8} {}", what.replace('\n', "\n         "));
    }
}
