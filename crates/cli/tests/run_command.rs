//! `phalanx run` on one node: what ranks are told, how they end, what is left of them.

mod launch;

use std::path::Path;

use launch::{WATCHDOG, assert_gone, eventually, phalanx_run, pids, run, runs, shell_ranks, start};
use phalanx_testkit::Signal;
use rustix::process::{Pid, kill_process};

#[test]
fn every_rank_knows_who_it_is() {
    let script = "echo $RANK $LOCAL_RANK $GROUP_RANK $ROLE_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE \
                  $GROUP_WORLD_SIZE $ROLE_WORLD_SIZE $ROLE_NAME $MASTER_ADDR \
                  $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $TORCHELASTIC_RUN_ID \
                  $TORCHELASTIC_USE_AGENT_STORE $OMP_NUM_THREADS ${#PHALANX_TOKEN}";
    let end = run(shell_ranks(&["--nproc", "3", "--rdzv-id", "job7"], script));
    assert_eq!(end.code, Some(0), "{end:?}");
    for rank in 0..3 {
        end.assert_contains(&format!(
            "[{rank}] {rank} {rank} 0 {rank} 3 3 1 3 default 127.0.0.1 0 0 job7 True 1 64\n"
        ));
    }
    let mut chosen = shell_ranks(
        &["--nproc", "2", "--no-token"],
        "echo \"omp $OMP_NUM_THREADS token <$PHALANX_TOKEN>\"",
    );
    chosen.env("OMP_NUM_THREADS", "5").env("PHALANX_TOKEN", "x");
    run(chosen).assert_contains("[1] omp 5 token <>\n");
}

#[test]
fn the_rank_that_failed_first_is_named_with_its_last_words() {
    let script = "if [ $RANK = 2 ]; then echo first >&2; echo 'it broke' >&2; exit 7; fi; \
                  trap 'exit 3' TERM; while :; do sleep 0.05; done";
    let end = run(shell_ranks(&["--nproc", "4"], script));
    assert_eq!(end.code, Some(7), "{end:?}");
    end.assert_contains("phalanx: rank 2 failed first: exit code 7 (attempt 0, pid ");
    end.assert_contains("last lines on stderr:\n  [2] first\n  [2] it broke\n");
    assert_eq!(end.text.matches("failed first").count(), 1, "{end:?}");

    let killed = run(shell_ranks(
        &["--nproc", "2"],
        "[ $RANK = 1 ] && kill -SEGV $$; sleep 100",
    ));
    assert_eq!(killed.code, Some(128 + 11), "{killed:?}");
    killed.assert_contains("rank 1 failed first: killed by SIGSEGV");
    killed.assert_contains("it wrote nothing to stderr");
}

#[test]
fn ranks_that_do_not_listen_are_killed_after_the_grace_period() {
    let dir = tempfile::tempdir().unwrap();
    // A rank that ignores the request, and one whose child does.
    let script = format!(
        "trap '' TERM; sleep 1000 & echo $$ $! | tr ' ' '\\n' > {}/$RANK.part; \
         mv {0}/$RANK.part {0}/$RANK; \
         [ $RANK = 0 ] && {{ while [ $(ls {0} | grep -vc part) -lt 3 ]; do sleep 0.02; done; exit 5; }}; \
         wait; sleep 1000",
        dir.path().display()
    );
    let end = run(shell_ranks(&["--nproc", "3", "--grace", "0.3"], &script));
    assert_eq!(end.code, Some(5), "{end:?}");
    let pids = pids(dir.path());
    assert_eq!(pids.len(), 6);
    assert_gone(&pids);
}

#[test]
fn a_failed_group_is_started_again_as_often_as_allowed() {
    let script = "echo attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; \
                  [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT -lt 2 ] && exit 4; exit 0";
    let end = run(shell_ranks(
        &["--nproc", "2", "--max-restarts", "2"],
        script,
    ));
    assert_eq!(end.code, Some(0), "{end:?}");
    end.assert_contains("rank 1 failed first: exit code 4 (attempt 1,");
    end.assert_contains("stopping all ranks, then restart 2 of at most 2");
    end.assert_contains("[1] attempt 2 of 2\n");

    let end = run(shell_ranks(
        &["--nproc", "2", "--max-restarts", "1"],
        script,
    ));
    assert_eq!(end.code, Some(4), "{end:?}");
    assert_eq!(end.text.matches("failed first").count(), 2, "{end:?}");
    assert!(!end.text.contains("attempt 2 of"), "{end:?}");
}

#[test]
fn signals_reach_the_ranks() {
    for (signal, name, number) in [
        (Signal::INT, "INT", 2),
        (Signal::TERM, "TERM", 15),
        (Signal::HUP, "HUP", 1),
    ] {
        let script = format!(
            "trap 'echo got {name}; exit 0' {name}; echo ready; while :; do sleep 0.05; done"
        );
        let proc = start(shell_ranks(&["--nproc", "2"], &script));
        let ready = || proc.log().text().matches("ready").count() == 2;
        eventually("both ranks are ready", ready);
        proc.signal(signal).unwrap();
        let end = launch::end(proc);
        assert_eq!(end.code, Some(128 + number), "{end:?}");
        end.assert_contains(&format!("[0] got {name}\n"));
        end.assert_contains(&format!("[1] got {name}\n"));
        end.assert_contains(&format!("phalanx: ended by SIG{name}"));
    }
}

#[test]
fn an_interrupt_between_two_attempts_ends_the_job() {
    // One rank fails, the other takes its time to end.
    let script = "[ $RANK = 1 ] && exit 1; trap 'echo ending; sleep 1000' TERM; \
                  echo ready; while :; do sleep 0.05; done";
    let proc = start(shell_ranks(
        &["--nproc", "2", "--max-restarts", "9"],
        script,
    ));
    launch::wait_for_line(&proc, "ending");
    proc.signal(Signal::INT).unwrap();
    let end = launch::end(proc);
    assert_eq!(end.code, Some(130), "{end:?}");
    assert_eq!(end.text.matches("failed first").count(), 1, "{end:?}");
}

#[test]
fn user_signals_are_passed_on_and_end_nothing() {
    let script = "trap 'echo got USR1; exit 0' USR1; echo ready; while :; do sleep 0.05; done";
    let proc = start(shell_ranks(&["--nproc", "2"], script));
    let ready = || proc.log().text().matches("ready").count() == 2;
    eventually("both ranks are ready", ready);
    proc.signal(Signal::USR1).unwrap();
    let end = launch::end(proc);
    assert_eq!(end.code, Some(0), "{end:?}");
    end.assert_contains("[0] got USR1\n");
    end.assert_contains("[1] got USR1\n");
}

/// Ranks with a child each, one of which ignores all signals that can be ignored.
fn families(dir: &Path) -> String {
    format!(
        "trap '' TERM INT HUP; sleep 1000 & echo $$ > {0}/$RANK.part; echo $! >> {0}/$RANK.part; \
         mv {0}/$RANK.part {0}/$RANK; wait",
        dir.display()
    )
}

#[test]
fn a_killed_launcher_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut proc = start(shell_ranks(&["--nproc", "3"], &families(dir.path())));
    eventually("all ranks run", || {
        let files = dir.path().read_dir().unwrap();
        let names = files.map(|file| file.unwrap().file_name());
        names
            .filter(|name| !name.to_string_lossy().ends_with("part"))
            .count()
            == 3
    });
    let family = pids(dir.path());
    assert_eq!(family.len(), 6);
    assert!(family.iter().all(|&pid| runs(pid)));
    // The launcher alone: neither its ranks nor its warden are in its process group.
    proc.signal(Signal::KILL).unwrap();
    proc.wait_for(WATCHDOG).unwrap().expect("it was killed");
    assert_gone(&family);
}

#[test]
fn ranks_do_not_even_outlive_a_launcher_that_is_killed_with_its_warden() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!("echo $$ > {}/$RANK; exec sleep 1000", dir.path().display());
    let mut proc = start(shell_ranks(&["--nproc", "2"], &script));
    eventually("both ranks run", || pids(dir.path()).len() == 2);
    let ranks = pids(dir.path());
    let children = format!("/proc/{0}/task/{0}/children", proc.id());
    let children = std::fs::read_to_string(children).unwrap();
    let children = children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok());
    let is_rank = |pid: &Pid| ranks.contains(pid);
    let warden: Vec<Pid> = children
        .filter_map(Pid::from_raw)
        .filter(|pid| !is_rank(pid))
        .collect();
    assert_eq!(warden.len(), 1);
    // Stopped first, so that the warden cannot do its duty in between.
    kill_process(warden[0], Signal::STOP).unwrap();
    proc.signal(Signal::KILL).unwrap();
    kill_process(warden[0], Signal::KILL).unwrap();
    proc.wait_for(WATCHDOG).unwrap().expect("it was killed");
    assert_gone(&ranks);
}

#[test]
fn output_lines_stay_whole() {
    const RANKS: usize = 8;
    const LINES: usize = 10_000;
    let script = "i=0; while [ $i -lt 10000 ]; do \
                  echo \"line $i of rank $RANK ----------------------------------------\"; \
                  i=$((i+1)); done; printf 'no line end'; printf 'on stderr' >&2";
    let output = shell_ranks(&["--nproc", "8"], script).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let mut next = [0; RANKS];
    let mut ended = 0;
    for line in text.lines() {
        let (rank, rest) = line.strip_prefix('[').unwrap().split_once("] ").unwrap();
        let rank: usize = rank.parse().unwrap();
        if rest == "no line end" {
            ended += 1;
            continue;
        }
        let dashes = "----------------------------------------";
        assert_eq!(rest, format!("line {} of rank {rank} {dashes}", next[rank]));
        next[rank] += 1;
    }
    assert_eq!((next, ended), ([LINES; RANKS], RANKS));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(errors.matches("] on stderr\n").count(), RANKS, "{errors}");
}

#[test]
fn bytes_that_are_not_text_pass_unchanged() {
    let output = shell_ranks(&["--nproc", "1"], "printf 'a\\000\\377\\200b\\n'")
        .output()
        .unwrap();
    assert_eq!(output.stdout, b"[0] a\0\xff\x80b\n");
}

#[test]
fn a_reader_that_leaves_does_not_stop_the_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let done = dir.path().join("done");
    let script = format!(
        "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; touch {}",
        done.display()
    );
    let mut command = shell_ranks(&["--nproc", "1"], &script);
    command.stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
    assert!(done.exists());
}

#[test]
fn logs_go_to_files_and_with_tee_to_both() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    // The other rank has to have printed before it is stopped.
    let script = format!(
        "echo out $RANK; echo err $RANK >&2; touch {path}/$RANK; \
         [ $RANK = 1 ] || while [ ! -e {path}/1 ]; do sleep 0.01; done; \
         [ $TORCHELASTIC_RESTART_COUNT = 1 ] || [ $RANK = 1 ] && exit 0; exit 1"
    );
    let args = ["--nproc", "2", "--max-restarts", "1", "--log-dir", path];
    let end = run(shell_ranks(&args, &script));
    assert_eq!(end.code, Some(0), "{end:?}");
    assert!(!end.text.contains("[0] out 0"), "{end:?}");
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
    for attempt in 0..2 {
        for rank in 0..2 {
            let file = format!("attempt_{attempt}/rank_{rank}");
            assert_eq!(read(&format!("{file}.out")), format!("out {rank}\n"));
            assert_eq!(read(&format!("{file}.err")), format!("err {rank}\n"));
        }
    }
    end.assert_contains("last lines on stderr:\n");
    let both = run(shell_ranks(&[&args[..], &["--tee"]].concat(), &script));
    both.assert_contains("[1] out 1\n");
}

#[test]
fn ranks_get_cores_of_their_own_if_there_are_enough() {
    // Prints the processors that the shell may use, for example `Cpus_allowed_list: 0-1`.
    let script = "grep Cpus_allowed_list /proc/self/status";
    let cores = |args: &[&str]| {
        let text = run(shell_ranks(args, script)).text;
        let mut lines: Vec<String> = text
            .lines()
            .filter_map(|line| Some(line.split_once("list:")?.1.trim().to_owned()))
            .collect();
        lines.sort();
        lines
    };
    let all = cores(&["--nproc", "1"]);
    assert_eq!(
        cores(&["--nproc", "2", "--no-bind"]),
        [&all[..], &all[..]].concat()
    );
    let many = cores(&["--nproc", "200"]);
    assert!(many.iter().all(|list| *list == all[0]), "{many:?}");
    if std::thread::available_parallelism().unwrap().get() < 2 {
        println!("one processor: not tested that two ranks get one each");
        return;
    }
    let bound = cores(&["--nproc", "2"]);
    assert_eq!(bound.len(), 2);
    // On a machine with one core of two siblings two ranks do not fit.
    assert!(bound[0] != bound[1] || bound[0] == all[0], "{bound:?}");
}

#[test]
fn mistakes_are_explained() {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("train.py");
    std::fs::write(&script, "print(1)\n").unwrap();
    let script = script.to_str().unwrap();
    let cases: &[(&[&str], i32, &str)] = &[
        (&["--nproc", "0", "--", "true"], 2, "at least one rank"),
        (&["--nproc", "x", "--", "true"], 2, "nor \"auto\""),
        (&["--nproc", "99999", "--", "true"], 2, "from 1 to 4096"),
        (&["--nproc", "2"], 2, "<PROGRAM>"),
        (&["--", "true"], 2, "--nproc <N>"),
        (
            &["--nproc", "2", "--", "nosuchprogram"],
            127,
            "no program nosuchprogram",
        ),
        (&["--nproc", "2", "--", script], 126, "-- python3 "),
        (&["--nproc", "2", "--tee", "--", "true"], 2, "--log-dir"),
        (
            &[
                "--nproc",
                "2",
                "--log-dir",
                script,
                "--max-restarts",
                "9",
                "--",
                "true",
            ],
            1,
            "rank 0 failed first: it cannot be started: --log-dir: ",
        ),
        (
            &["--nproc", "1", "--nnodes", "2", "--", "true"],
            1,
            "PHALANX_TOKEN",
        ),
        (
            &["--nproc", "1", "--nnodes", "2", "--no-token", "--", "true"],
            1,
            "need --rdzv-endpoint",
        ),
        (
            &["--nproc", "1", "--node-rank", "1", "--", "true"],
            1,
            "--node-rank 1 is not below --nnodes 1",
        ),
        (
            &["--nproc", "1", "--rdzv-endpoint", "host", "--", "true"],
            1,
            "give HOST:PORT",
        ),
        (
            &[
                "--nproc",
                "1",
                "--rdzv-endpoint",
                "192.0.2.1:0",
                "--",
                "true",
            ],
            1,
            "is not an address of this host",
        ),
        (
            &[
                "--nproc",
                "1",
                "--launcher",
                "mpirun",
                "--max-restarts",
                "1",
                "--",
                "true",
            ],
            1,
            "mpirun has no --max-restarts",
        ),
    ];
    for (args, code, text) in cases {
        let end = run(phalanx_run(args));
        assert_eq!(end.code, Some(*code), "{args:?}: {end:?}");
        end.assert_contains(text);
    }
}

#[test]
fn a_program_needs_no_separator_and_keeps_its_own_flags() {
    let end = run(phalanx_run(&["--nproc", "1", "echo", "--nproc", "7", "-n"]));
    assert_eq!(end.text, "[0] --nproc 7 -n\n");
}

#[test]
fn a_token_for_several_nodes_is_fresh_each_time() {
    let token = || {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_phalanx"));
        String::from_utf8(command.arg("token").output().unwrap().stdout).unwrap()
    };
    let first = token();
    assert_eq!(first.trim().len(), 64);
    assert_ne!(first, token());
}
