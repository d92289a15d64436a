//! `phalanx bench allreduce` and `overlap` run real ranks, check sums, and say what is missing.

use std::process::Command;

use serde_json::Value;

fn bench(args: &[&str]) -> (Vec<Value>, String, bool) {
    let output = Command::new(env!("CARGO_BIN_EXE_phalanx"))
        .arg("bench")
        .args(args)
        .args(["--rounds", "1", "--json"])
        .output()
        .expect("phalanx starts");
    let parse = |line: &str| serde_json::from_str(line).expect("each line is a JSON object");
    let stdout = String::from_utf8(output.stdout).expect("stdout is text");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    (
        stdout.lines().map(parse).collect(),
        stderr,
        output.status.success(),
    )
}

#[test]
fn every_line_is_json_and_verified() {
    let svg = std::env::temp_dir().join(format!("phalanx-allreduce-{}.svg", std::process::id()));
    let args = "allreduce --ranks 1,3 --backends reference --sizes 4,65536,4 --memory both";
    let mut args: Vec<_> = args.split(' ').collect();
    args.extend(["--dtype", "f32,bf16", "--svg", svg.to_str().unwrap()]);
    let (lines, stderr, success) = bench(&args);
    assert!(success, "{stderr}");
    assert_eq!(lines.len(), 2 * 2 * 2 * 2, "{stderr}");
    for line in &lines {
        assert_eq!(line["bench"], "allreduce", "{line}");
        assert_eq!(line["backend"], "reference", "{line}");
        assert_eq!(line["verified"], true, "{line}");
        let wide = line["dtype"] == "f32";
        assert!(wide || line["dtype"] == "bf16", "{line}");
        assert_eq!(line["time_over_f32"].is_null(), wide, "{line}");
        for figure in ["p50_us", "min_us", "roof_us"] {
            assert!(line[figure].as_f64() > Some(0.0), "{figure} in {line}");
        }
        for count in ["ranks", "bytes", "iters"] {
            assert!(line[count].as_u64() > Some(0), "{count} in {line}");
        }
        assert!(line["registered"].is_boolean(), "{line}");
    }
    let drawing = std::fs::read_to_string(&svg).unwrap();
    std::fs::remove_file(&svg).unwrap();
    assert!(drawing.contains("3 ranks") && drawing.contains("reference (plain)"));
}

#[test]
fn a_competitor_that_is_not_there_is_reported() {
    let args = "allreduce --ranks 2 --sizes 1024 --dtype bf16 --backends";
    let mut args: Vec<_> = args.split(' ').collect();
    args.push("reference,torch-gloo,libgloo,openmpi,intelmpi");
    args.extend(["--torch", "/nowhere/python"]);
    let (lines, stderr, success) = bench(&args);
    assert!(success, "{stderr}");
    let of = |backend: &str| {
        let line = lines.iter().find(|line| line["backend"] == backend);
        line.unwrap_or_else(|| panic!("no line for {backend}: {stderr}"))
    };
    assert_eq!(of("reference")["verified"], true);
    let missing = |backend| {
        of(backend)["missing"]
            .as_str()
            .expect("a reason")
            .to_owned()
    };
    assert!(
        missing("torch-gloo").contains("/nowhere/python"),
        "{}",
        missing("torch-gloo")
    );
    assert_eq!(missing("openmpi"), "MPI has no bf16");
    assert_eq!(missing("intelmpi"), "MPI has no bf16");
}

#[cfg(any(feature = "gloo", feature = "mpi"))]
#[test]
fn ours_on_c_libraries_take_part_beside_the_libraries_alone() {
    let mut backends = vec!["native"];
    if cfg!(feature = "gloo") {
        backends.extend(["gloo", "libgloo"]);
    }
    if cfg!(feature = "mpi") {
        backends.extend(["mpi", "openmpi"]);
    }
    let names = backends.join(",");
    let args = [
        "allreduce",
        "--ranks",
        "2",
        "--sizes",
        "4,1048576",
        "--backends",
        &names,
    ];
    let (lines, stderr, success) = bench(&args);
    assert!(success, "{stderr}");
    for name in backends {
        let of = lines.iter().filter(|line| line["backend"] == name);
        let of: Vec<_> = of.collect();
        assert_eq!(of.len(), 2, "{name}: {stderr}");
        for line in of {
            assert_eq!(line["verified"], true, "{line}");
            let compared = line["time_over_bare"].as_f64();
            assert_eq!(
                compared.is_some(),
                ["gloo", "mpi"].contains(&name),
                "{line}"
            );
        }
    }
}

#[test]
fn a_drawing_that_cannot_be_made_is_refused_before_anything_runs() {
    let args = "allreduce --ranks 2 --sizes 4 --backends reference --svg /nowhere/at/all.svg";
    let (lines, stderr, success) = bench(&args.split(' ').collect::<Vec<_>>());
    assert!(!success && lines.is_empty());
    assert!(stderr.contains("/nowhere/at/all.svg"), "{stderr}");
    assert!(!stderr.contains("starting"), "{stderr}");
}

#[test]
fn an_unknown_backend_is_named_with_the_known_ones() {
    let (lines, stderr, success) = bench(&["allreduce", "--backends", "nativ"]);
    assert!(!success && lines.is_empty());
    assert!(
        stderr.contains("nativ") && stderr.contains("reference"),
        "{stderr}"
    );
}

#[test]
fn waiting_for_what_ran_meanwhile_is_measured() {
    let args = "overlap --ranks 2 --backends reference --bytes 262144";
    let (lines, stderr, success) = bench(&args.split(' ').collect::<Vec<_>>());
    assert!(success, "{stderr}");
    let [line] = &lines[..] else {
        panic!("{lines:?}")
    };
    assert_eq!(line["bench"], "overlap");
    assert_eq!(line["verified"], true);
    assert!(line["wait_us"].as_f64() > Some(0.0) && line["p50_us"].as_f64() > Some(0.0));
}

#[test]
fn ranks_on_pretended_hosts_sum_too() {
    let may = Command::new("unshare").args(["--net", "true"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no network namespaces here");
        return;
    }
    let args = "allreduce --ranks 2,3 --sizes 1024 --hosts namespaces --backends";
    let mut args: Vec<_> = args.split(' ').collect();
    args.push("reference,openmpi,intelmpi");
    let (lines, stderr, success) = bench(&args);
    assert!(success, "{stderr}");
    let ours: Vec<_> = lines
        .iter()
        .filter(|line| line["backend"] == "reference")
        .collect();
    assert_eq!(ours.len(), 2, "{stderr}");
    for line in ours {
        assert_eq!(
            (&line["verified"], &line["between_hosts"]),
            (&true.into(), &true.into())
        );
    }
    let missing = lines.iter().filter(|line| line["missing"].is_string());
    assert_eq!(
        missing.count(),
        2 * 2,
        "both MPIs say why they are not there"
    );
}

#[test]
fn pretended_hosts_may_have_several_ranks() {
    let uneven = "allreduce --ranks 3 --sizes 1024 --hosts namespaces --ranks-per-host 2";
    let (_, stderr, success) = bench(&uneven.split(' ').collect::<Vec<_>>());
    assert!(
        !success && stderr.contains("cannot be shared out"),
        "{stderr}"
    );
    let may = Command::new("unshare").args(["--net", "true"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no network namespaces here");
        return;
    }
    let args = "allreduce --ranks 4 --sizes 1024,1048576 --hosts namespaces --ranks-per-host 2";
    let (lines, stderr, success) = bench(&args.split(' ').collect::<Vec<_>>());
    assert!(success, "{stderr}");
    let mut ours = lines.iter().filter(|line| line["backend"] == "native");
    assert!(ours.clone().count() == 2, "{stderr}");
    assert!(ours.all(|line| line["verified"] == true && line["hosts"] == 2));
}
