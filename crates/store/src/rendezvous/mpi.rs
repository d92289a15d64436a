//! The variables of MPI launchers: Open MPI's `mpirun`, and Hydra (MPICH, Intel MPI).

use super::env::{
    JobKey, Launcher, LauncherEnv, MeetingPoint, Names, need_master_addr, need_master_port,
};
use super::vars::Vars;

pub(super) const OPEN_MPI: Names = Names {
    rank: "OMPI_COMM_WORLD_RANK",
    rank_hint: "mpirun sets it; start with mpirun, or unset all OMPI_ variables",
    world_size: "OMPI_COMM_WORLD_SIZE",
    world_size_hint: "mpirun sets it; start with mpirun, or unset all OMPI_ variables",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
    // OMPI_COMM_WORLD_NODE_RANK looks like the host's number and is not: it counts the processes
    // of all jobs on the host.
};

pub(super) const MPICH: Names = Names {
    rank: "PMI_RANK",
    rank_hint: "mpiexec sets it; start with mpiexec, or unset all PMI_ variables",
    world_size: "PMI_SIZE",
    world_size_hint: "mpiexec sets it; start with mpiexec, or unset all PMI_ variables",
    local_rank: "MPI_LOCALRANKID",
    local_world_size: Some("MPI_LOCALNRANKS"),
};

pub(super) fn open_mpi(vars: &Vars<'_>) -> Option<LauncherEnv> {
    let id = vars.first_set(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"]);
    let id = vars.text(id);
    let job = id.as_deref().map(|id| {
        // The id is a 16-bit hash of mpirun's host and pid in version 4 and holds the pid in
        // version 5: both come again. Version 4 has a random number per job as well.
        match vars.text("OMPI_MCA_orte_precondition_transports") {
            Some(random) => JobKey::Named(format!("ompi-{id}-{random}")),
            None => JobKey::StartedBy {
                variable: OPEN_MPI.rank,
                name: format!("ompi-{id}"),
            },
        }
    });
    let job = job.unwrap_or(JobKey::StartedBy {
        variable: OPEN_MPI.rank,
        name: "ompi".to_owned(),
    });
    let hint = "the ranks are on several hosts; set it to the host of rank 0, for example \
                mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500";
    let env = from_names(vars, &OPEN_MPI, job, hint)?;
    Some(LauncherEnv {
        launcher: Launcher::OpenMpi,
        run_id: id,
        ..env
    })
}

pub(super) fn mpich(vars: &Vars<'_>) -> Option<LauncherEnv> {
    // Hydra gives its ranks nothing that names the job.
    let job = JobKey::StartedBy {
        variable: MPICH.rank,
        name: "hydra".to_owned(),
    };
    let hint = "the ranks are on several hosts; set it to the host of rank 0, for example \
                mpiexec -genv MASTER_ADDR node1 -genv MASTER_PORT 29500";
    let env = from_names(vars, &MPICH, job, hint)?;
    Some(LauncherEnv {
        launcher: Launcher::Mpich,
        ..env
    })
}

fn from_names(
    vars: &Vars<'_>,
    names: &Names,
    job: JobKey,
    several_hosts_hint: &str,
) -> Option<LauncherEnv> {
    let sizes = names.read(vars);
    if vars.is_set("MASTER_ADDR") || vars.is_set("MASTER_PORT") {
        let hint = "MASTER_PORT is; set both or none";
        let (host, port) = (need_master_addr(vars, hint), need_master_port(vars));
        let meeting = MeetingPoint::Tcp {
            host: host?,
            port: port?,
            agent_hosted: false,
        };
        return Some(one_node(LauncherEnv { meeting, ..sizes? }));
    }
    let sizes = one_node(sizes?);
    let meeting = match (sizes.world_size, sizes.num_nodes) {
        (1, _) => MeetingPoint::Alone,
        (_, Some(1)) => MeetingPoint::LocalFile { job },
        _ => {
            // Complains, as it is not set.
            need_master_addr(vars, several_hosts_hint);
            return None;
        }
    };
    Some(LauncherEnv { meeting, ..sizes })
}

/// MPI launchers say nothing about hosts, but the local size tells when there is only one.
fn one_node(mut env: LauncherEnv) -> LauncherEnv {
    if env.local_world_size == Some(env.world_size) {
        (env.node_rank, env.num_nodes) = (Some(0), Some(1));
    }
    env
}
