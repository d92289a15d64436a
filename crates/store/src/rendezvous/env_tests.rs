use super::*;
use proptest::prelude::*;

/// Variables from a capture (`NAME=value` lines), changed by `changes`; an empty value unsets.
fn read(capture: &str, changes: &[(&str, &str)]) -> Result<LauncherEnv> {
    let mut table: Vec<(&str, &str)> = capture
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once('='))
        .collect();
    table.extend(changes);
    LauncherEnv::from_lookup(&|name| {
        let found = table.iter().rev().find(|(key, _)| *key == name);
        found.map(|(_, value)| (*value).to_owned())
    })
}

fn message(capture: &str, changes: &[(&str, &str)]) -> String {
    read(capture, changes).unwrap_err().to_string()
}

const TORCHRUN: &str = include_str!("fixtures/torchrun-2.13.env");
const OPEN_MPI: &str = include_str!("fixtures/openmpi-4.1.env");
const MPICH: &str = include_str!("fixtures/mpich-4.0.env");
const SRUN_TWO_NODES: &str = include_str!("fixtures/slurm-srun-two-nodes.env");
const SRUN_ONE_NODE: &str = include_str!("fixtures/slurm-srun-one-node.env");
const SRUN_PMI2: &str = include_str!("fixtures/slurm-srun-pmi2.env");
const BATCH_SCRIPT: &str = include_str!("fixtures/slurm-batch-script.env");
const SALLOC: &str = include_str!("fixtures/slurm-salloc.env");
const SALLOC_INTERACTIVE: &str = include_str!("fixtures/slurm-salloc-interactive.env");
const BY_HAND: &str = "RANK=2\nWORLD_SIZE=4\nMASTER_ADDR=node1\nMASTER_PORT=29500";

fn tcp(host: &str, port: u16, agent_hosted: bool) -> MeetingPoint {
    MeetingPoint::Tcp {
        host: host.to_owned(),
        port,
        agent_hosted,
    }
}

fn named(job: &str) -> MeetingPoint {
    let job = JobKey::Named(job.to_owned());
    MeetingPoint::LocalFile { job }
}

fn started_by(variable: &'static str, name: &str) -> MeetingPoint {
    let name = name.to_owned();
    MeetingPoint::LocalFile {
        job: JobKey::StartedBy { variable, name },
    }
}

#[test]
fn every_launcher_is_understood() {
    let alone = LauncherEnv::alone();
    let two_on_one_node = LauncherEnv {
        rank: 1,
        world_size: 2,
        local_rank: Some(1),
        local_world_size: Some(2),
        ..LauncherEnv::alone()
    };
    let run_id = |id: &str| Some(id.to_owned());
    let ompi_job = "ompi-2049769473-7fba1e276dbf6a9c-7a1de2e92aed9490";
    for (what, found, expected) in [
        ("nothing", read("", &[]), alone.clone()),
        (
            "torchrun",
            read(TORCHRUN, &[]),
            LauncherEnv {
                restart_count: 1,
                run_id: run_id("5c1e6f0a-2f7e-4a53-b4a0-4b1a1d5a8f39"),
                launcher: Launcher::Torchrun,
                meeting: tcp("localhost", 33791, true),
                ..two_on_one_node.clone()
            },
        ),
        (
            "by hand",
            read(BY_HAND, &[]),
            LauncherEnv {
                rank: 2,
                world_size: 4,
                local_rank: None,
                local_world_size: None,
                node_rank: None,
                num_nodes: None,
                launcher: Launcher::Variables,
                meeting: tcp("node1", 29500, false),
                ..alone.clone()
            },
        ),
        (
            "open mpi",
            read(OPEN_MPI, &[]),
            LauncherEnv {
                run_id: run_id("2049769473"),
                launcher: Launcher::OpenMpi,
                meeting: named(ompi_job),
                ..two_on_one_node.clone()
            },
        ),
        (
            "mpich",
            read(MPICH, &[]),
            LauncherEnv {
                launcher: Launcher::Mpich,
                meeting: started_by("PMI_RANK", "hydra"),
                ..two_on_one_node.clone()
            },
        ),
        (
            "srun on two nodes",
            read(SRUN_TWO_NODES, &[]),
            LauncherEnv {
                rank: 2,
                world_size: 3,
                local_rank: Some(0),
                local_world_size: Some(1),
                node_rank: Some(1),
                num_nodes: Some(2),
                run_id: run_id("1.0"),
                launcher: Launcher::Slurm,
                meeting: tcp("gpu-a01", 12001, false),
                ..alone.clone()
            },
        ),
        (
            "srun on one node",
            read(SRUN_ONE_NODE, &[("SLURM_JOB_ID", "77")]),
            LauncherEnv {
                run_id: run_id("77.0"),
                launcher: Launcher::Slurm,
                meeting: named("slurm-77.0-0"),
                ..two_on_one_node.clone()
            },
        ),
        (
            "srun --mpi=pmi2",
            read(SRUN_PMI2, &[]),
            LauncherEnv {
                run_id: run_id("9.0"),
                launcher: Launcher::Slurm,
                meeting: named("slurm-9.0-0"),
                ..two_on_one_node.clone()
            },
        ),
        ("salloc shell", read(SALLOC, &[]), alone.clone()),
        (
            "interactive salloc shell",
            read(SALLOC_INTERACTIVE, &[]),
            alone.clone(),
        ),
        (
            "batch script of one task",
            read(BATCH_SCRIPT, &[("SLURM_NTASKS", "1"), ("SLURM_NPROCS", "")]),
            alone.clone(),
        ),
    ] {
        assert_eq!(found.unwrap(), expected, "{what}");
    }
}

#[test]
fn the_first_launcher_in_the_order_is_believed() {
    let all = [TORCHRUN, OPEN_MPI, MPICH, SRUN_TWO_NODES].join("\n");
    let launcher = |changes: &[(&str, &str)]| read(&all, changes).unwrap().launcher;
    let no_torchrun = [
        ("RANK", ""),
        ("WORLD_SIZE", ""),
        ("MASTER_ADDR", ""),
        ("MASTER_PORT", ""),
    ];
    let no_open_mpi = [("OMPI_COMM_WORLD_RANK", ""), ("OMPI_COMM_WORLD_SIZE", "")];
    let no_mpich = [("PMI_RANK", ""), ("PMI_SIZE", "")];
    assert_eq!(launcher(&[]), Launcher::Torchrun);
    assert_eq!(launcher(&no_torchrun), Launcher::OpenMpi);
    let unset = [&no_torchrun[..], &no_open_mpi[..]].concat();
    assert_eq!(launcher(&unset), Launcher::Mpich);
    let unset = [&unset[..], &no_mpich[..]].concat();
    assert_eq!(launcher(&unset), Launcher::Slurm);
    // A Hydra rank whose proxy happens to be the SLURM task of the same number.
    let hydra_in_slurm = [MPICH, SRUN_ONE_NODE].join("\n");
    assert_eq!(
        read(&hydra_in_slurm, &[]).unwrap().launcher,
        Launcher::Mpich
    );
}

#[test]
fn each_missing_or_bad_variable_is_named() {
    for (capture, name, bad) in [
        (BY_HAND, "RANK", &["x", "-1", "4", "1.5"][..]),
        (BY_HAND, "WORLD_SIZE", &["0", "two", "99999999999"]),
        (BY_HAND, "MASTER_PORT", &["0", "65536", "http", "-1"]),
        (
            BY_HAND,
            "MASTER_ADDR",
            &["tcp://node1", "node1:29500", "a b"],
        ),
        (TORCHRUN, "RANK", &["2"]),
        (TORCHRUN, "WORLD_SIZE", &["1"]),
        (TORCHRUN, "MASTER_ADDR", &[]),
        (TORCHRUN, "MASTER_PORT", &[]),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", &["2", "?"]),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", &["0", "1"]),
        (MPICH, "PMI_RANK", &["2", "?"]),
        (MPICH, "PMI_SIZE", &["0", "1"]),
        (SRUN_TWO_NODES, "SLURM_PROCID", &["3", "?"]),
        (SRUN_TWO_NODES, "SLURM_STEP_NUM_TASKS", &["0"]),
        (SRUN_TWO_NODES, "SLURM_STEP_NUM_NODES", &["0"]),
        (SRUN_TWO_NODES, "SLURM_JOB_ID", &["x"]),
        (SRUN_TWO_NODES, "SLURM_STEP_ID", &["x"]),
        (SRUN_TWO_NODES, "SLURM_STEP_NODELIST", &["n[2-1]", "a,,b"]),
    ] {
        for value in bad {
            let text = message(capture, &[(name, value)]);
            assert!(text.contains(name), "{name}={value}: {text}");
            assert!(text.contains(value), "{name}={value}: {text}");
            assert!(
                text.contains("; "),
                "what to do about {name}={value}: {text}"
            );
        }
        // SLURM says many things twice, and without its rank there is no task.
        if !name.starts_with("SLURM") && name != "RANK" {
            let text = message(capture, &[(name, "")]);
            assert!(text.contains(&format!("{name} is not set; ")), "{text}");
        }
    }
    let text = message(TORCHRUN, &[("RANK", "")]);
    assert!(text.contains("RANK is not set; set it to"), "{text}");
}

#[test]
fn optional_variables_are_checked_when_set() {
    for (capture, name, value) in [
        (TORCHRUN, "LOCAL_RANK", "2"),
        (TORCHRUN, "LOCAL_RANK", "x"),
        (TORCHRUN, "LOCAL_WORLD_SIZE", "3"),
        (TORCHRUN, "GROUP_RANK", "1"),
        (TORCHRUN, "GROUP_WORLD_SIZE", "0"),
        (TORCHRUN, "TORCHELASTIC_RESTART_COUNT", "-1"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "2"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "3"),
        (MPICH, "MPI_LOCALRANKID", "2"),
        (MPICH, "MPI_LOCALNRANKS", "x"),
        (SRUN_TWO_NODES, "SLURM_LOCALID", "x"),
        (SRUN_TWO_NODES, "SLURM_NODEID", "x"),
        (SRUN_TWO_NODES, "SLURM_STEP_TASKS_PER_NODE", "2(y3)"),
        (SRUN_TWO_NODES, "SLURM_RESTART_COUNT", "x"),
    ] {
        let text = message(capture, &[(name, value)]);
        assert!(
            text.contains(name) && text.contains(value),
            "{name}: {text}"
        );
    }
}

#[test]
fn all_problems_are_told_at_once() {
    let text = message("RANK=x\nMASTER_PORT=0", &[]);
    for name in [
        "RANK=\"x\"",
        "WORLD_SIZE is",
        "MASTER_ADDR is",
        "MASTER_PORT=\"0\"",
    ] {
        assert!(text.contains(name), "{name}: {text}");
    }
    assert!(text.starts_with("4 problems"), "{text}");
}

#[test]
fn any_torch_variable_makes_it_strict() {
    for name in ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"] {
        let text = message("", &[(name, "1")]);
        assert!(text.contains("RANK is not set"), "{name}: {text}");
        assert_eq!(read("", &[(name, " ")]).unwrap(), LauncherEnv::alone());
    }
    let text = message(SALLOC, &[("MASTER_ADDR", "node1")]);
    assert!(text.contains("RANK is not set"), "{text}");
}

#[test]
fn the_agent_serves_only_on_exactly_true() {
    for (value, agent) in [
        ("True", true),
        ("true", false),
        ("1", false),
        ("False", false),
    ] {
        let env = read(TORCHRUN, &[("TORCHELASTIC_USE_AGENT_STORE", value)]).unwrap();
        assert_eq!(env.meeting, tcp("localhost", 33791, agent), "{value}");
    }
}

#[test]
fn mpi_ranks_may_meet_at_a_given_address() {
    let at = [("MASTER_ADDR", "node1"), ("MASTER_PORT", "7")];
    for capture in [OPEN_MPI, MPICH, SRUN_ONE_NODE, SRUN_TWO_NODES] {
        let env = read(capture, &at).unwrap();
        assert_eq!(env.meeting, tcp("node1", 7, false));
    }
    for capture in [OPEN_MPI, MPICH] {
        let text = message(capture, &at[..1]);
        assert!(text.contains("MASTER_PORT is not set"), "{text}");
        let text = message(capture, &at[1..]);
        assert!(text.contains("MASTER_ADDR is not set"), "{text}");
    }
    // SLURM knows the host and the port.
    let env = read(SRUN_TWO_NODES, &at[1..]).unwrap();
    assert_eq!(env.meeting, tcp("gpu-a01", 7, false));
    let env = read(SRUN_TWO_NODES, &at[..1]).unwrap();
    assert_eq!(env.meeting, tcp("node1", 12001, false));
}

#[test]
fn mpi_on_several_hosts_needs_an_address() {
    for (capture, local_size) in [
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (MPICH, "MPI_LOCALNRANKS"),
    ] {
        for value in ["1", ""] {
            let local_rank = ("OMPI_COMM_WORLD_LOCAL_RANK", "0");
            let changes = [(local_size, value), local_rank, ("MPI_LOCALRANKID", "0")];
            let text = message(capture, &changes);
            assert!(text.contains("MASTER_ADDR is not set"), "{text}");
            assert!(text.contains("MASTER_PORT"), "{text}");
        }
    }
}

#[test]
fn an_mpi_world_of_one_meets_nobody() {
    let env = read(
        OPEN_MPI,
        &[
            ("OMPI_COMM_WORLD_SIZE", "1"),
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ],
    );
    assert_eq!(env.unwrap().meeting, MeetingPoint::Alone);
}

#[test]
fn without_a_random_number_the_launcher_itself_tells_the_job() {
    let no_random = ("OMPI_MCA_orte_precondition_transports", "");
    let changes = [no_random, ("PMIX_NAMESPACE", "prterun-node1-77@1")];
    let env = read(OPEN_MPI, &changes).unwrap();
    let point = started_by("OMPI_COMM_WORLD_RANK", "ompi-prterun-node1-77@1");
    assert_eq!(env.meeting, point);
    let changes = [
        no_random,
        ("PMIX_NAMESPACE", ""),
        ("OMPI_MCA_ess_base_jobid", ""),
    ];
    let env = read(OPEN_MPI, &changes).unwrap();
    assert_eq!(env.meeting, started_by("OMPI_COMM_WORLD_RANK", "ompi"));
}

#[test]
fn a_batch_script_with_tasks_is_told_to_use_srun() {
    let text = message(BATCH_SCRIPT, &[]);
    assert!(
        text.contains("SLURM_NTASKS=4") && text.contains("start with srun"),
        "{text}"
    );
}

#[test]
fn a_step_is_not_the_whole_job() {
    // srun -n2 inside an allocation of four tasks, with --preserve-env.
    let changes = [
        ("SLURM_NTASKS", "4"),
        ("SLURM_NPROCS", "4"),
        ("SLURM_NNODES", "2"),
    ];
    let env = read(SRUN_ONE_NODE, &changes).unwrap();
    assert_eq!((env.world_size, env.num_nodes), (2, Some(1)));
}

#[test]
fn a_requeued_slurm_job_is_another_attempt() {
    let env = read(
        SRUN_ONE_NODE,
        &[("SLURM_RESTART_COUNT", "2"), ("SLURM_JOB_ID", "5")],
    )
    .unwrap();
    assert_eq!((env.restart_count, env.meeting), (2, named("slurm-5.0-2")));
}

#[test]
fn slurm_ports_differ_between_jobs_and_steps() {
    let port = |job: &str, step: &str| {
        let changes = [("SLURM_JOB_ID", job), ("SLURM_STEP_ID", step)];
        match read(SRUN_TWO_NODES, &changes).unwrap().meeting {
            MeetingPoint::Tcp { port, .. } => port,
            other => panic!("{other:?}"),
        }
    };
    let mut ports: Vec<u16> = ["100", "101", "102", "4294967295"]
        .iter()
        .flat_map(|job| ["0", "1", "2"].map(|step| port(job, step)))
        .collect();
    assert!(ports.iter().all(|port| (12_000..32_000).contains(port)));
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), 12);
}

#[test]
fn a_world_size_that_contradicts_the_launcher_is_an_error() {
    for capture in [OPEN_MPI, MPICH, SRUN_ONE_NODE] {
        assert_eq!(read(capture, &[("WORLD_SIZE", "2")]).unwrap().world_size, 2);
        let text = message(capture, &[("WORLD_SIZE", "8")]);
        assert!(
            text.contains("WORLD_SIZE=8") && text.contains("started 2"),
            "{text}"
        );
    }
}

#[test]
fn addresses_of_every_form_are_taken() {
    for (value, host) in [
        ("node1.example.org", "node1.example.org"),
        ("10.0.0.1", "10.0.0.1"),
        ("::1", "::1"),
        ("[2001:db8::7]", "2001:db8::7"),
        ("fe80::1%eth0", "fe80::1%eth0"),
    ] {
        let env = read(BY_HAND, &[("MASTER_ADDR", value)]).unwrap();
        assert_eq!(env.meeting, tcp(host, 29500, false));
    }
}

proptest! {
    #[test]
    fn any_values_are_read_or_refused(
        values in prop::collection::vec((0usize..24, "[ -~]{0,12}|[0-9]{1,3}"), 0..16),
    ) {
        let names = [
            "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
            "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
            "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMIX_NAMESPACE",
            "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_NNODES",
            "SLURM_STEP_NODELIST", "SLURM_NODEID", "SLURM_TASKS_PER_NODE", "SLURM_LOCALID",
            "TORCHELASTIC_RUN_ID",
        ];
        let table: Vec<(&str, &str)> =
            values.iter().map(|(i, value)| (names[*i], value.as_str())).collect();
        if let Ok(env) = read("", &table) {
            prop_assert!(env.rank < env.world_size);
            let local = env.local_rank.zip(env.local_world_size);
            prop_assert!(local.is_none_or(|(rank, size)| rank < size || env.launcher == Launcher::Slurm));
        }
    }
}
