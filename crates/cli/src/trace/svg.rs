//! Recordings as a picture: one row per rank, one bar per operation.

use std::fmt::Write;

use phalanx_pg::{Trace, TraceEntry, TraceState};

use super::{last_moment, operation};

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 80.0;
const ROW: f64 = 30.0;
const TOP: f64 = 30.0;
const TICKS: u32 = 8;

pub(super) fn draw(traces: &[Trace]) -> String {
    let entries = traces.iter().flat_map(|trace| &trace.entries);
    let start = entries
        .map(|entry| entry.time_created_ns)
        .min()
        .unwrap_or(0);
    let end = last_moment(traces).max(start + 1);
    let height = TOP + ROW * traces.len() as f64 + 30.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        LEFT + WIDTH + 20.0
    );
    let x = |ns: u64| LEFT + WIDTH * ns.saturating_sub(start) as f64 / (end - start) as f64;
    // Writing to a string does not fail.
    let _ = axis(&mut out, (end - start) as f64 / 1e6, height);
    for (row, trace) in traces.iter().enumerate() {
        let y = TOP + ROW * row as f64;
        let _ = writeln!(
            out,
            "<text x=\"8\" y=\"{}\">rank {}</text>",
            y + 18.0,
            trace.rank
        );
        for entry in &trace.entries {
            let from = entry
                .time_discovered_started_ns
                .unwrap_or(entry.time_created_ns);
            let to = entry.time_discovered_completed_ns.unwrap_or(end);
            let (from, to) = (x(from), x(to));
            let _ = bar(&mut out, entry, from, (to - from).max(1.0), y + 4.0);
        }
    }
    out.push_str("</svg>\n");
    out
}

fn axis(out: &mut String, total_ms: f64, height: f64) -> std::fmt::Result {
    for tick in 0..=TICKS {
        let part = f64::from(tick) / f64::from(TICKS);
        let x = LEFT + WIDTH * part;
        writeln!(
            out,
            "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{:.1} ms</text>",
            height - 24.0,
            height - 8.0,
            total_ms * part
        )?;
    }
    Ok(())
}

fn bar(out: &mut String, entry: &TraceEntry, x: f64, width: f64, y: f64) -> std::fmt::Result {
    let colour = match (entry.state, operation(entry)) {
        (TraceState::Failed, _) => "#d62728",
        (TraceState::Scheduled | TraceState::Started, _) => "#ff7f0e",
        (_, "all_reduce" | "allreduce_coalesced") => "#1f77b4",
        (_, "broadcast" | "broadcast_coalesced") => "#2ca02c",
        (_, "barrier") => "#7f7f7f",
        _ => "#9467bd",
    };
    let title = format!(
        "{} #{} {:?} {:?} in group {}{}",
        operation(entry),
        entry.collective_seq_id,
        entry.state,
        entry.input_sizes,
        entry.process_group.0,
        entry
            .error
            .as_ref()
            .map(|e| format!(": {e}"))
            .unwrap_or_default()
    );
    writeln!(
        out,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"{colour}\">\
         <title>{}</title></rect>",
        ROW - 8.0,
        escape(&title)
    )
}

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::samples::*;
    use super::*;

    #[test]
    fn every_operation_is_a_bar_and_text_cannot_break_the_picture() {
        let mut failed = stuck(1, "send 0->1", 8);
        failed["state"] = "failed".into();
        failed["error"] = "<b>&".into();
        let traces = [
            trace(0, 2, &[done(0, "all_reduce", 8), failed]),
            trace(1, 2, &[done(0, "barrier", 0)]),
        ];
        let svg = draw(&traces);
        assert_eq!(svg.matches("<title>").count(), 3, "{svg}");
        assert!(svg.contains("send 0-&gt;1 #1 Failed"), "{svg}");
        assert!(svg.contains(": &lt;b&gt;&amp;"), "{svg}");
        assert!(svg.contains("#d62728"), "{svg}");
        assert!(svg.trim_end().ends_with("</svg>"));
    }

    #[test]
    fn nothing_recorded_is_an_empty_picture() {
        assert!(draw(&[trace(0, 1, &[])]).contains("rank 0"));
    }
}
