//! The curves: time over size, both logarithmic, one chart below the other.

use std::path::Path;

use plotters::prelude::*;

use super::report::Comparison;
use crate::Failure;

const WIDTH: u32 = 800;
const HEIGHT: u32 = 480;

/// Whether the file can be made, before anything is measured for it.
pub(crate) fn check(file: &Path) -> Result<(), Failure> {
    let made = std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(file);
    made.map_err(|err| format!("{}: {err}", file.display()))?;
    Ok(())
}

pub(crate) fn draw(file: &Path, comparisons: &[Comparison]) -> Result<(), Failure> {
    let size = (WIDTH, HEIGHT * comparisons.len() as u32);
    let root = SVGBackend::new(file, size).into_drawing_area();
    root.fill(&WHITE)?;
    let areas = root.split_evenly((comparisons.len(), 1));
    for (area, comparison) in areas.iter().zip(comparisons) {
        draw_one(area, comparison).map_err(|err| format!("{}: {err}", file.display()))?;
    }
    root.present()
        .map_err(|err| format!("{}: {err}", file.display()))?;
    Ok(())
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn draw_one(area: &Area<'_>, comparison: &Comparison) -> Result<(), Failure> {
    let curves: Vec<(String, Vec<(f64, f64)>)> = comparison
        .series
        .iter()
        .map(|series| {
            let point = |&bytes: &usize| Some((bytes as f64, series.p50_us(bytes)?.max(1e-3)));
            (
                series.label(),
                comparison.sizes.iter().filter_map(point).collect(),
            )
        })
        .filter(|(_, points): &(String, Vec<_>)| !points.is_empty())
        .collect();
    let Some(((left, right), (low, high))) = bounds(curves.iter().flat_map(|(_, points)| points))
    else {
        return Ok(());
    };
    let title = format!(
        "all-reduce of {} ranks, {}",
        comparison.ranks,
        comparison.dtypes()
    );
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (left..right * 1.5).log_scale(),
            (low / 1.5..high * 1.5).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_desc("bytes")
        .y_desc("microseconds, median")
        .max_light_lines(1)
        .draw()?;
    for (number, (label, points)) in curves.into_iter().enumerate() {
        let color = Palette99::pick(number).to_rgba();
        let marks = points
            .iter()
            .map(|&point| Circle::new(point, 3, color.filled()));
        chart.draw_series(marks.collect::<Vec<_>>())?;
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)))?
            .label(label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}

type Range = (f64, f64);

fn bounds<'a>(points: impl Iterator<Item = &'a (f64, f64)>) -> Option<(Range, Range)> {
    points.fold(None, |bounds, &(x, y)| {
        let ((left, right), (low, high)) = bounds.unwrap_or(((x, x), (y, y)));
        Some(((left.min(x), right.max(x)), (low.min(y), high.max(y))))
    })
}
