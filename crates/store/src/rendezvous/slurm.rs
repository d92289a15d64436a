//! The variables of SLURM.
//!
//! | where the process runs | `SLURM_PROCID` | step id | number of tasks |
//! |---|---|---|---|
//! | task started by `srun` | its rank | the step's | `SLURM_STEP_NUM_TASKS` |
//! | batch script | 0 | unset | `SLURM_NTASKS`, although there is one process |
//! | `salloc` shell | unset | unset | `SLURM_NTASKS`, the same |
//! | `salloc` shell on a node (`use_interactive_step`) | 0 | 4294967290 | `SLURM_NTASKS`, the same |

use super::env::{
    JobKey, Launcher, LauncherEnv, MAX_WORLD_SIZE, MeetingPoint, Names, master_addr, master_port,
};
use super::nodelist::{NodeList, tasks_on_node};
use super::vars::{Vars, shown};

/// Step ids from here on are SLURM's own: batch script, interactive shell, external launcher.
const FIRST_SPECIAL_STEP: usize = 0xffff_fff0;

/// Set where processes run, not in the shell of an allocation.
pub(super) const RANK: &str = "SLURM_PROCID";

const BY_SRUN: &str = "srun sets it; start with srun, or unset the SLURM_ variables";

/// Ports that jobs get by number: below the range from which systems hand out client ports.
const PORTS: std::ops::Range<usize> = 12_000..32_000;

/// Whether the PMI variables come from `srun --mpi=pmi2`, which says less than SLURM's own.
///
/// A Hydra rank inside a job has SLURM variables too, but those of the process that started it;
/// it is known by its local rank.
pub(super) fn gave_pmi(vars: &Vars<'_>) -> bool {
    let (rank, task) = (vars.text("PMI_RANK"), vars.text(RANK));
    rank.is_some() && rank == task && !vars.is_set("MPI_LOCALRANKID") && has_step(vars)
}

fn step_variable(vars: &Vars<'_>) -> &'static str {
    vars.first_set(&["SLURM_STEP_ID", "SLURM_STEPID"])
}

fn has_step(vars: &Vars<'_>) -> bool {
    vars.is_set(step_variable(vars))
}

/// What a process is that has a [`RANK`]: a task of `srun`, or alone.
pub(super) fn task(vars: &Vars<'_>) -> Option<LauncherEnv> {
    if has_step(vars) {
        let step = vars.number(step_variable(vars), 0..=u32::MAX as usize, BY_SRUN)?;
        return match step {
            FIRST_SPECIAL_STEP.. => Some(LauncherEnv::alone()),
            step => started_by_srun(vars, step),
        };
    }
    let tasks = vars.first_set(&["SLURM_NTASKS", "SLURM_NPROCS"]);
    match vars.number(tasks, 1..=MAX_WORLD_SIZE, BY_SRUN) {
        Some(count @ 2..) => {
            vars.problem(format!(
                "{tasks}={count}, but this process was not started by srun (SLURM_STEP_ID is not \
                 set), so that it would be alone; start with srun"
            ));
            None
        }
        _ => Some(LauncherEnv::alone()),
    }
}

fn started_by_srun(vars: &Vars<'_>, step: usize) -> Option<LauncherEnv> {
    // SLURM_NTASKS is the job's if srun ran with --preserve-env.
    let names = Names {
        rank: RANK,
        rank_hint: BY_SRUN,
        world_size: vars.first_set(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"]),
        world_size_hint: BY_SRUN,
        local_rank: "SLURM_LOCALID",
        // A list, read below.
        local_world_size: None,
    };
    let sizes = names.read(vars);
    let job = vars.first_set(&["SLURM_JOB_ID", "SLURM_JOBID"]);
    let job = vars.need_number(job, 0..=u32::MAX as usize, BY_SRUN);
    let counts = 0..=MAX_WORLD_SIZE;
    let node_rank = vars.number("SLURM_NODEID", counts.clone(), BY_SRUN);
    let nodes = vars.first_set(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES"]);
    let num_nodes = vars.need_number(nodes, 1..=MAX_WORLD_SIZE, BY_SRUN);
    let restarts = vars.number("SLURM_RESTART_COUNT", counts, "unset it");
    let restarts = restarts.unwrap_or(0);
    let (host, port) = (master_addr(vars), master_port(vars));
    let (sizes, job, num_nodes) = (sizes?, job?, num_nodes?);
    let meeting = if host.is_some() || port.is_some() || num_nodes > 1 {
        MeetingPoint::Tcp {
            host: host.or_else(|| first_host(vars))?,
            port: port.unwrap_or_else(|| port_of(job, step)),
            agent_hosted: false,
        }
    } else if sizes.world_size == 1 {
        MeetingPoint::Alone
    } else {
        // A job that SLURM queues again keeps its number.
        let name = format!("slurm-{job}.{step}-{restarts}");
        let job = JobKey::Named(name);
        MeetingPoint::LocalFile { job }
    };
    Some(LauncherEnv {
        local_world_size: local_size(vars, node_rank),
        node_rank,
        num_nodes: Some(num_nodes),
        restart_count: restarts,
        run_id: Some(format!("{job}.{step}")),
        launcher: Launcher::Slurm,
        meeting,
        ..sizes
    })
}

fn first_host(vars: &Vars<'_>) -> Option<String> {
    let name = vars.first_set(&["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"]);
    let hint = "set MASTER_ADDR to the host of rank 0 instead";
    let Some(list) = vars.text(name) else {
        vars.missing(name, hint);
        return None;
    };
    match NodeList::parse(&list) {
        Ok(list) => Some(list.first()),
        Err(bad) => {
            vars.problem(format!("{name}={} has {}; {hint}", shown(&list), bad.0));
            None
        }
    }
}

fn local_size(vars: &Vars<'_>, node_rank: Option<usize>) -> Option<usize> {
    let name = vars.first_set(&["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"]);
    let list = vars.text(name)?;
    match tasks_on_node(&list, node_rank?) {
        Ok(tasks) => tasks,
        Err(bad) => {
            let list = shown(&list);
            vars.problem(format!("{name}={list} has {}; {BY_SRUN}", bad.0));
            None
        }
    }
}

/// A port that all ranks of a step find and its neighbours do not: job numbers are consecutive.
fn port_of(job: usize, step: usize) -> u16 {
    let spread = job.wrapping_add(step.wrapping_mul(7919)) % PORTS.len();
    u16::try_from(PORTS.start + spread).unwrap_or(u16::MAX)
}
