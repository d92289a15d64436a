//! `cargo xtask train`: a model trained by several processes, from nothing to the last digit.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use serde_json::{Value, json};

use crate::Failure;
use crate::shell::{Cmd, as_in_tests, quoted, root, target_dir};

/// What the default number of epochs reaches; less means that something is broken.
const ACCURACY: f64 = 0.96;

/// What building with burn takes, on the two cores that this project is tested on.
const BURN_COST: &str = "which takes up to 10 minutes to compile on 2 cores";

/// Train a model on handwritten digits with several processes, then with one to compare.
///
/// Builds the program `phalanx` and an example (`digits`, `burn_digits` or `candle_digits`), and
/// starts the ranks with `phalanx run`. Rank 0 shows how it goes. The end says how many digits that nobody trained on are recognised,
/// whether all ranks have the same parameters, how long it took, and the commands to do it by hand.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of processes
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    nproc: u32,

    /// What the processes communicate through
    #[arg(long, default_value = "native", value_parser = ["native", "reference"])]
    backend: String,

    /// Where the model comes from
    #[arg(long, value_enum, default_value_t = Framework::Builtin)]
    framework: Framework,

    /// Passes over the data, if not as many as the accuracy of the end needs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    epochs: Option<u32>,

    /// Print nothing but the figures, as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Framework {
    /// Layers written by hand, compiled in seconds
    Builtin,
    /// A convolutional network with burn, which takes minutes to compile
    Burn,
    /// A convolutional network with candle, which takes minutes to compile
    Candle,
}

impl Framework {
    /// The package that has it.
    fn package(self) -> &'static str {
        match self {
            Self::Builtin => "phalanx",
            Self::Burn => "phalanx-burn",
            Self::Candle => "phalanx-candle",
        }
    }

    /// The program that is trained.
    fn example(self) -> &'static str {
        match self {
            Self::Builtin => "digits",
            Self::Burn => "burn_digits",
            Self::Candle => "candle_digits",
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Failure> {
    let built = build(args.framework, args.json)?;
    let together = Launch::new(args, args.nproc, &built).run(args.json)?;
    let alone = match args.nproc {
        1 => None,
        _ => {
            if !args.json {
                println!("and by one process, to compare");
            }
            Some(Launch::new(args, 1, &built).quietly()?)
        }
    };
    if args.json {
        let figures = json!({
            "wall_seconds": together.wall_seconds,
            "figures": together.figures,
            "one_process": alone.map(|alone| json!({
                "wall_seconds": alone.wall_seconds,
                "figures": alone.figures,
            })),
        });
        println!("{figures}");
    } else {
        conclude(args.framework, &together, alone.as_ref())?;
    }
    let accuracy = together.number("/accuracy")?;
    if args.epochs.is_none() && accuracy <= ACCURACY {
        let [accuracy, wanted] = [accuracy, ACCURACY].map(|share| 100.0 * share);
        return Err(format!("held-out accuracy {accuracy:.1} % is not above {wanted} %").into());
    }
    Ok(ExitCode::SUCCESS)
}

/// Arguments of cargo. No more than training needs: what only tests need takes longer to build than
/// all of it.
fn build_args(framework: Framework) -> [&'static str; 9] {
    let (package, example) = (framework.package(), framework.example());
    [
        "build",
        "--package",
        "phalanx-cli",
        "--bin",
        "phalanx",
        "--package",
        package,
        "--example",
        example,
    ]
}

/// Builds both programs; the directory that they are in, from the top of the work tree if below.
fn build(framework: Framework, quiet: bool) -> Result<PathBuf, Failure> {
    let build = match as_in_tests() {
        None => Cmd::cargo().args(build_args(framework)),
        Some(workspace) => {
            let targets = ["--bin", "phalanx", "--example", framework.example()];
            Cmd::cargo().arg("build").args(workspace).args(targets)
        }
    };
    let success = match quiet {
        true => build.arg("--quiet").read().is_ok(),
        false => build.status()?.success(),
    };
    if !success {
        return Err("the programs do not build; what cargo said is above".into());
    }
    let built = target_dir().join("debug");
    Ok(built.strip_prefix(root()).map_or(built.clone(), Into::into))
}

/// `phalanx run` with the example.
struct Launch {
    /// The command as one would type it at the top of the work tree.
    words: Vec<String>,
    /// Where the example writes its figures for this program.
    summary: PathBuf,
}

/// What came out of it.
struct Outcome {
    words: Vec<String>,
    wall_seconds: f64,
    /// What the example wrote.
    figures: Value,
}

impl Launch {
    fn new(args: &Args, nproc: u32, built: &Path) -> Self {
        let text = |path: PathBuf| path.display().to_string();
        // Several may run at once.
        let summary = format!("digits-{nproc}-{}.json", std::process::id());
        let mut words = vec![text(built.join("phalanx")), "run".into()];
        words.extend(["--nproc".into(), nproc.to_string(), "--".into()]);
        words.push(text(built.join("examples").join(args.framework.example())));
        words.extend(["--backend".into(), args.backend.clone()]);
        let epochs = args.epochs.map(|epochs| epochs.to_string());
        words.extend(epochs.into_iter().flat_map(|n| ["--epochs".into(), n]));
        Self {
            words,
            summary: root().join(built).join(summary),
        }
    }

    fn command(&self) -> Cmd {
        let run = Cmd::new(root().join(&self.words[0])).args(&self.words[1..]);
        // candle takes all cores otherwise, also for one process.
        let run = run.env("RAYON_NUM_THREADS", "1");
        run.arg("--summary").arg(&self.summary)
    }

    /// Runs it with the ranks' output in sight, unless `quiet`.
    fn run(self, quiet: bool) -> Result<Outcome, Failure> {
        if quiet {
            return self.quietly();
        }
        let start = Instant::now();
        let status = self.command().status()?;
        match status.success() {
            true => self.outcome(start),
            false => Err(format!("training failed: {status}").into()),
        }
    }

    /// Runs it; only errors are shown.
    fn quietly(self) -> Result<Outcome, Failure> {
        let start = Instant::now();
        self.command().read()?;
        self.outcome(start)
    }

    fn outcome(self, start: Instant) -> Result<Outcome, Failure> {
        let wall_seconds = start.elapsed().as_secs_f64();
        let text = std::fs::read_to_string(&self.summary);
        let text = text.map_err(|err| format!("read {}: {err}", self.summary.display()))?;
        std::fs::remove_file(&self.summary)?;
        Ok(Outcome {
            words: self.words,
            wall_seconds,
            figures: serde_json::from_str(&text)?,
        })
    }
}

impl Outcome {
    fn number(&self, pointer: &str) -> Result<f64, Failure> {
        let number = self.figures.pointer(pointer).and_then(Value::as_f64);
        number.ok_or_else(|| format!("no number {pointer} in {}", self.figures).into())
    }
}

/// The end, for a person.
fn conclude(
    framework: Framework,
    together: &Outcome,
    alone: Option<&Outcome>,
) -> Result<(), Failure> {
    let ranks = together.number("/ranks")?;
    let [accuracy, correct, held_out] = [
        together.number("/accuracy")?,
        together.number("/correct")?,
        together.number("/held_out")?,
    ];
    let sha256 = together.figures["sha256"].as_str().unwrap_or_default();
    println!();
    let percent = 100.0 * accuracy;
    println!("held-out accuracy {percent:.1} % ({correct} of {held_out} digits)");
    println!("ranks {ranks}, identical parameters sha256 {sha256}");
    let times = |outcome: &Outcome| -> Result<String, Failure> {
        let training = outcome.number("/training_seconds")?;
        let wall = outcome.wall_seconds;
        Ok(format!("{wall:.1} s, {training:.1} s of it training"))
    };
    match alone {
        None => println!("wall time {}", times(together)?),
        Some(alone) => {
            println!(
                "wall time {ranks} ranks {}; one process {}; one computing thread per rank in both",
                times(together)?,
                times(alone)?
            );
            println!("{}", why(ranks, together, alone)?);
        }
    }
    println!("\nthe same by hand:");
    println!("  cargo {}", build_args(framework).join(" "));
    for outcome in [Some(together), alone].into_iter().flatten() {
        let words: Vec<String> = outcome.words.iter().map(|word| quoted(word)).collect();
        println!("  {}", words.join(" "));
    }
    if framework == Framework::Builtin {
        println!("\nnext, the same with a convolutional network in burn, {BURN_COST}:");
        println!("  cargo xtask train --framework burn");
    }
    Ok(())
}

/// Why more ranks do not make a tiny model as much faster, in the run's own figures.
fn why(ranks: f64, together: &Outcome, alone: &Outcome) -> Result<String, Failure> {
    let speedup = alone.number("/training_seconds")? / together.number("/training_seconds")?;
    let whole = alone.number("/step/compute_us")?;
    let [compute, communication] = [
        together.number("/step/compute_us")?,
        together.number("/step/communication_us")?,
    ];
    let hidden = 100.0 * together.number("/step/hidden")?;
    if speedup > ranks {
        return Ok(format!(
            "training at {speedup:.1} times the speed of one process, more than {ranks} ranks can gain: the \
             machine had\nother work at least during one of the two, so the times say little"
        ));
    }
    Ok(format!(
        "training at {speedup:.1} times the speed of one process; a model this small does not scale \
         far: a step computes for\n{whole:.0} us in one process and for {compute:.0} us in each of \
         {ranks} ranks, but communication ({communication:.0} us, {hidden:.0} % of\nit hidden) and \
         every rank's whole step of the optimizer do not shrink with the number of ranks"
    ))
}
