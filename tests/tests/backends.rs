//! The table in `docs/backends.md` says what the backends say of themselves.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx::pg::{CallKind, Capabilities, DType, PeerDeath, ReduceOp, Set};
use phalanx_tests::world_for;

/// A backend's column: what stands in which row.
type Column = BTreeMap<String, String>;

fn listed(known: Vec<String>, all: usize) -> String {
    match known.len() {
        0 => "none".into(),
        len if len == all => "all".into(),
        _ => known.join(" "),
    }
}

fn column_of(known: &Capabilities) -> Column {
    let types = |dtypes: Set<DType>| {
        let known = DType::ALL
            .into_iter()
            .filter(|&dtype| dtypes.contains(dtype));
        listed(
            known.map(|dtype| dtype.to_string()).collect(),
            DType::ALL.len(),
        )
    };
    let yes = |is_so: bool| if is_so { "yes" } else { "no" }.to_owned();
    let calls = CallKind::ALL.into_iter().map(|call| {
        let cell = match known.calls.contains(call) {
            true => types(known.dtypes),
            false => "no".into(),
        };
        (call.to_string(), cell)
    });
    let ops = ReduceOp::ALL
        .into_iter()
        .filter(|&op| known.ops.contains(op));
    let ops = ops.map(|op| op.name().to_owned()).collect();
    let death = match known.on_peer_death {
        PeerDeath::Error => "an error that names it",
        PeerDeath::Timeout => "an error at the timeout",
        PeerDeath::JobEnds => "the launcher ends the job",
        _ => "unknown",
    };
    let others = [
        ("operators", listed(ops, ReduceOp::ALL.len())),
        ("host memory", yes(known.cpu)),
        ("CUDA memory", yes(known.cuda)),
        ("receives from anybody", yes(known.recv_any)),
        ("an abort ends what is in progress", yes(known.abort)),
        ("a rank dies", death.into()),
    ];
    let others = others.map(|(row, cell)| (row.to_owned(), cell));
    calls.chain(others).collect()
}

/// The columns of the table below this line, by the names at their heads.
fn columns_below(text: &str, line: &str) -> BTreeMap<String, Column> {
    let (_, below) = text.split_once(line).expect("the table is there");
    let rows: Vec<Vec<String>> = below
        .lines()
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'))
        .filter(|line| !line.starts_with("|--"))
        .map(|line| {
            let cells = line.trim_matches('|').split('|');
            cells.map(|cell| cell.trim().to_owned()).collect()
        })
        .collect();
    let (heads, rows) = rows.split_first().expect("a row with names");
    let column = |at: usize| {
        rows.iter()
            .map(move |row| (row[0].clone(), row[at].clone()))
    };
    let columns = heads.iter().enumerate().skip(1);
    columns
        .map(|(at, head)| (head.clone(), column(at).collect()))
        .collect()
}

fn documented() -> BTreeMap<String, Column> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/backends.md");
    let text = std::fs::read_to_string(file).expect("docs/backends.md");
    columns_below(&text, "## What each can do")
}

#[test]
fn the_documented_table_is_what_the_backends_say() {
    for backend in phalanx::backends() {
        world_for(&backend, 1).run(|_| {
            let group = phalanx::init().unwrap();
            let own = column_of(&group.capabilities());
            let written = documented().remove(group.backend());
            let written = written.unwrap_or_else(|| panic!("no column {}", group.backend()));
            for (row, cell) in &own {
                let text = written.get(row).map(String::as_str);
                assert_eq!(
                    text,
                    Some(cell.as_str()),
                    "{} in row {row:?}",
                    group.backend()
                );
            }
            assert_eq!(own.len(), written.len(), "rows that mean nothing");
            group.shutdown().unwrap();
        });
    }
}

#[cfg(feature = "mpi")]
#[test]
fn ranks_under_mpirun_need_no_store_and_no_address() {
    use phalanx::prelude::*;

    let world = world_for("mpi", 3);
    let without = ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"];
    let world = without
        .into_iter()
        .fold(world, |world, name| world.env_remove(name));
    world.run(|ctx| {
        let group = phalanx::init().unwrap();
        assert_eq!((group.rank(), group.size()), (ctx.rank(), 3));
        let mut values = [1.0f32];
        group
            .allreduce_in_place(&mut values, ReduceOp::Sum)
            .unwrap();
        assert_eq!(values, [3.0]);
        group.shutdown().unwrap();
    });
}

#[test]
fn every_backend_of_the_facade_has_a_column() {
    let columns = documented();
    let columns: Vec<&str> = columns.keys().map(String::as_str).collect();
    assert_eq!(columns, ["gloo", "mpi", "native", "reference"]);
}

#[test]
fn a_wrong_cell_is_found() {
    let text = "## T\n\n| call | a | b |\n|--|--|--|\n| send | all | no |\n\n| x |\n";
    let columns = columns_below(text, "## T");
    assert_eq!(columns["a"]["send"], "all");
    assert_eq!(columns["b"]["send"], "no");
    let mut known = Capabilities::all_on_host();
    known.calls = known.calls.without(CallKind::Send);
    assert_eq!(column_of(&known)["send"], "no");
    assert_eq!(column_of(&known)["recv"], "all");
}
