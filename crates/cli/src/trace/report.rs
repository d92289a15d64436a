//! The analysis in words.

use std::fmt::Write;

use super::analysis::{Analysis, Behind, Front, Group, Waiting};

pub(super) fn text(analysis: &Analysis) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write(analysis, &mut out);
    out
}

fn write(analysis: &Analysis, out: &mut String) -> std::fmt::Result {
    let Analysis {
        world_size,
        recorded,
        not_recorded,
        ..
    } = analysis;
    write!(
        out,
        "recordings of {} of {world_size} ranks",
        recorded.len()
    )?;
    match not_recorded.is_empty() {
        true => writeln!(out)?,
        false => writeln!(out, "; none of {}", ranks(not_recorded))?,
    }
    for group in &analysis.groups {
        write_group(group, out)?;
    }
    if !analysis.point_to_point.is_empty() {
        writeln!(out, "\nmessages that are not finished:")?;
    }
    for pending in &analysis.point_to_point {
        let (rank, operation, group) = (pending.rank, &pending.operation, &pending.group);
        let since = clock(pending.since_ns);
        writeln!(
            out,
            "  rank {rank} is in {operation} of group {group} since {since}"
        )?;
    }
    for disagreement in &analysis.disagreements {
        let (group, seq) = (&disagreement.group, disagreement.seq);
        writeln!(
            out,
            "\nranks disagree about operation {seq} of group {group}:"
        )?;
        for side in &disagreement.sides {
            writeln!(out, "  {} called {}", ranks(&side.ranks), side.call)?;
        }
    }
    if !analysis.errors.is_empty() {
        writeln!(out, "\nwhat broke the groups:")?;
    }
    for (rank, errors) in &analysis.errors {
        for error in errors {
            writeln!(out, "  rank {rank}: {error}")?;
        }
    }
    Ok(())
}

fn write_group(group: &Group, out: &mut String) -> std::fmt::Result {
    let Group {
        name,
        backend,
        front,
        ..
    } = group;
    writeln!(out, "\ngroup {name} ({backend}, {})", ranks(&group.ranks))?;
    let Some(front) = front else {
        return writeln!(
            out,
            "  nobody waits: all collectives are finished on all ranks"
        );
    };
    let Front { seq, operation, .. } = front;
    for Behind { rank, last } in &front.behind {
        write!(
            out,
            "  rank {rank} is behind: it has not called operation {seq}, {operation}"
        )?;
        match last {
            None => writeln!(out, "; nothing of this group is recorded there")?,
            Some(last) => {
                let when = match last.finished_ns {
                    Some(at) => format!("finished at {}", clock(at)),
                    None => format!("called at {} and not finished", clock(last.called_ns)),
                };
                writeln!(
                    out,
                    "; its last was {}, {}, {when}",
                    last.seq, last.operation
                )?;
            }
        }
    }
    if !front.unseen.is_empty() {
        let unseen = ranks(&front.unseen);
        writeln!(
            out,
            "  {unseen} left no recording, and no rank saw it arrive at operation {seq}, \
             {operation}: look there first"
        )?;
    }
    for waiting in &front.waiting {
        let Waiting {
            rank,
            since_ns,
            waited_ms,
            error,
            ..
        } = waiting;
        let end = if error.is_some() {
            "failed after"
        } else {
            "waits for"
        };
        writeln!(
            out,
            "  rank {rank} is in operation {seq}, {operation}, since {}, {end} {:.3} s",
            clock(*since_ns),
            *waited_ms as f64 / 1e3
        )?;
    }
    if !front.through.is_empty() {
        writeln!(out, "  {} finished it", ranks(&front.through))?;
    }
    Ok(())
}

/// `rank 3`, `ranks 0, 2`.
fn ranks(ranks: &[usize]) -> String {
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("{noun} {}", list.join(", "))
}

/// The time of day, UTC.
fn clock(ns: u64) -> String {
    let (s, ms) = (ns / 1_000_000_000, ns / 1_000_000 % 1000);
    let (h, m, s) = (s / 3600 % 24, s / 60 % 60, s % 60);
    format!("{h:02}:{m:02}:{s:02}.{ms:03} UTC")
}

#[cfg(test)]
mod tests {
    use super::super::analysis::analyse;
    use super::super::samples::*;
    use super::*;

    #[test]
    fn the_reader_learns_who_is_behind_and_who_waits() {
        let traces = [
            trace(0, 3, &[done(0, "all_reduce", 8), stuck(1, "all_reduce", 8)]),
            trace(1, 3, &[done(0, "all_reduce", 8)]),
        ];
        let text = text(&analyse(&traces));
        let expected = "\
recordings of 2 of 3 ranks; none of rank 2

group world (fake, ranks 0, 1, 2)
  rank 1 is behind: it has not called operation 1, all_reduce Float x 8; its last was 0, all_reduce Float x 8, finished at 00:00:01.500 UTC
  rank 2 left no recording, and no rank saw it arrive at operation 1, all_reduce Float x 8: look there first
  rank 0 is in operation 1, all_reduce Float x 8, since 00:00:02.000 UTC, waits for 0.000 s
";
        assert_eq!(text, expected);
    }

    #[test]
    fn disagreements_show_both_sides() {
        let traces = [
            trace(0, 2, &[stuck(7, "all_reduce", 8)]),
            trace(1, 2, &[stuck(7, "barrier", 0)]),
        ];
        let text = text(&analyse(&traces));
        assert!(
            text.contains("ranks disagree about operation 7 of group world:"),
            "{text}"
        );
        assert!(
            text.contains("  rank 0 called all_reduce Float x 8\n"),
            "{text}"
        );
        assert!(text.contains("  rank 1 called barrier\n"), "{text}");
    }
}
