//! Results as a picture: throughput against length, and the roofline.
//!
//! Colours are the palette of Okabe and Ito, which readers with any colour vision tell apart. Each
//! type has a marker of its own too. Lines carry their names at their ends instead of in a legend.

use super::ceiling::Ceilings;
use super::record::Bound;
use super::record::Record;
use crate::output::printable;
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::ops::RangeInclusive;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'b, SVGBackend<'a>, Cartesian2d<LogCoord<f64>, LogCoord<f64>>>;
type Plane<'a, 'b> = ChartContext<'b, SVGBackend<'a>, Cartesian2d<LogCoord<f64>, RangedCoordf64>>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

const SIZE: (u32, u32) = (1200, 1040);
const FONT: &str = "Helvetica, Arial, DejaVu Sans, sans-serif";
const INK: RGBColor = RGBColor(34, 34, 34);
const GREY: RGBColor = RGBColor(110, 110, 110);
const GRID: RGBColor = RGBColor(228, 228, 228);

/// The types, in the order in which they are drawn.
const DTYPES: [(&str, RGBColor); 3] = [
    ("f32", RGBColor(0, 114, 178)),
    ("bf16", RGBColor(213, 94, 0)),
    ("f16", RGBColor(0, 158, 115)),
];

/// Draws results as SVG.
///
/// # Errors
/// The reason, in words.
pub fn draw(records: &[Record]) -> Result<String, String> {
    if records.is_empty() {
        return Err("there is nothing to draw".into());
    }
    records.iter().try_for_each(expect_drawable)?;
    let mut svg = String::new();
    picture(records, &mut svg).map_err(|error| error.to_string())?;
    // XML has no control characters, and names can have any.
    Ok(printable(&svg).into_owned())
}

/// An error if a number is so far from the others of its kind that axes for both have no end.
fn expect_drawable(record: &Record) -> Result<(), String> {
    const SPEEDS: RangeInclusive<f64> = 1e-6..=1e12;
    let ceilings = record.ceilings.iter().flat_map(|ceilings| {
        let Ceilings { f32, bf16, tiles, read, read_huge, .. } = ceilings;
        let products = f32.iter().map(|ceiling| ceiling.gflops).chain(*bf16).chain(*tiles);
        products.chain([*read]).chain(*read_huge)
    });
    let numbers = [record.gflops, record.gbytes_per_second].into_iter().chain(ceilings);
    let bound = record.bound.as_ref().map(Bound::value);
    let mut numbers = numbers.chain(bound).chain(record.flops_per_byte);
    if let Some(number) = numbers.find(|number| !SPEEDS.contains(number)) {
        return Err(format!("{}: {number} cannot be drawn: {SPEEDS:?} can", record.name));
    }
    match record.length.filter(|length| !(1..=regard::MAX_LEN).contains(length)) {
        Some(length) => Err(format!("{}: a length of {length} cannot be drawn", record.name)),
        None => Ok(()),
    }
}

fn picture(records: &[Record], svg: &mut String) -> Drawn {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (head, rest) = root.split_vertically(84);
    title(&head, records)?;
    let (series, roofline) = rest.split_vertically(410);
    let (left, right) = series.split_horizontally(SIZE.0 / 2);
    lengths(&left, records, false)?;
    lengths(&right, records, true)?;
    roof(&roofline, records)?;
    root.present()?;
    Ok(())
}

fn text(size: i32, color: RGBColor, horizontal: HPos) -> TextStyle<'static> {
    (FONT, size).into_font().color(&color).pos(Pos::new(horizontal, VPos::Center))
}

fn bold(size: i32) -> TextStyle<'static> {
    TextStyle::from((FONT, size, FontStyle::Bold).into_font())
        .color(&INK)
        .pos(Pos::new(HPos::Left, VPos::Center))
}

fn title(area: &Area, records: &[Record]) -> Drawn {
    let first = &records[0];
    let machine = first.machine.as_deref().unwrap_or("this machine");
    let threads =
        if first.threads == 1 { "1 thread".into() } else { format!("{} threads", first.threads) };
    area.draw_text(&format!("Attention on {machine}, {threads}"), &bold(24), (28, 34))?;
    let mut kernels: Vec<&str> =
        records.iter().filter_map(|record| record.kernel.as_deref()).collect();
    kernels.sort_unstable();
    kernels.dedup();
    let kernel = kernels.join(" and ");
    let line = format!(
        "regard, {kernel}; medians; dashed lines are what this machine can do, measured in the \
         same run"
    );
    area.draw_text(&line, &text(15, GREY, HPos::Left), (28, 64))?;
    let mut x = SIZE.0 as i32 - 190;
    for (dtype, color) in DTYPES {
        if records.iter().any(|record| record.dtype == dtype) {
            area.draw(&marker(dtype, (x, 34), color))?;
            area.draw_text(dtype, &text(15, color, HPos::Left), (x + 10, 34))?;
            x += if dtype == "bf16" { 62 } else { 56 };
        }
    }
    Ok(())
}

/// A point: a disc, a square or a triangle.
fn marker<'a>(
    dtype: &str,
    at: (i32, i32),
    color: RGBColor,
) -> DynElement<'a, SVGBackend<'a>, (i32, i32)> {
    match dtype {
        "bf16" => {
            Rectangle::new([(at.0 - 4, at.1 - 4), (at.0 + 4, at.1 + 4)], color.filled()).into_dyn()
        }
        "f16" => TriangleMarker::new(at, 6, color.filled()).into_dyn(),
        _ => Circle::new(at, 5, color.filled()).into_dyn(),
    }
}

fn color(dtype: &str) -> RGBColor {
    DTYPES.iter().find(|(name, _)| *name == dtype).map_or(INK, |(_, color)| *color)
}

/// One series of lengths: points in the order of their lengths.
struct Series<'a> {
    name: &'a str,
    dtype: &'a str,
    points: Vec<(f64, f64)>,
}

fn all_series(records: &[Record], decode: bool) -> Vec<Series<'_>> {
    let mut all: Vec<Series> = Vec::new();
    for record in records.iter().filter(|record| (record.query_tokens == Some(1)) == decode) {
        let Some(length) = record.length else { continue };
        let name = record.name.rsplit_once(" at ").map_or(record.name.as_str(), |(name, _)| name);
        let point = (length as f64, record.speed(decode));
        match all
            .iter_mut()
            .find(|series| (series.name, series.dtype) == (name, record.dtype.as_str()))
        {
            Some(series) => series.points.push(point),
            None => all.push(Series { name, dtype: &record.dtype, points: vec![point] }),
        }
    }
    for series in &mut all {
        series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    all
}

/// The ceilings of one panel: their names and heights, from the highest down.
fn ceiling_lines(records: &[Record], reads: bool) -> Vec<(String, f64)> {
    let mut lines = unsorted_ceilings(records, reads);
    lines.sort_by(|a, b| b.1.total_cmp(&a.1));
    lines
}

fn unsorted_ceilings(records: &[Record], reads: bool) -> Vec<(String, f64)> {
    let Some(Ceilings { f32, bf16, tiles, read, read_huge, .. }) =
        records.iter().find_map(|record| record.ceilings.as_ref())
    else {
        return Vec::new();
    };
    if reads {
        let ordinary = (format!("memory reads {read:.1}"), *read);
        return read_huge
            .iter()
            .map(|read| (format!("in huge pages {read:.1}"), *read))
            .chain([ordinary])
            .collect();
    }
    let reached = |unit: &str| {
        records.iter().any(|record| match &record.bound {
            Some(Bound::Products { unit: named, .. }) => named == unit,
            _ => false,
        })
    };
    let products =
        [(bf16, "bf16 VDPBF16PS"), (tiles, "bf16 AMX")].into_iter().filter_map(|(gflops, unit)| {
            gflops.filter(|_| reached(unit)).map(|gflops| (format!("{unit} {gflops:.0}"), gflops))
        });
    products
        .chain(f32.iter().map(|c| (format!("f32 FMA, {} {:.0}", c.level, c.gflops), c.gflops)))
        .collect()
}

/// The lengths of all series, from the shortest up.
fn measured_lengths(series: &[Series]) -> Vec<f64> {
    let mut lengths: Vec<f64> =
        series.iter().flat_map(|series| series.points.iter().map(|point| point.0)).collect();
    lengths.sort_by(f64::total_cmp);
    lengths.dedup();
    lengths
}

/// Speed against length.
fn lengths(area: &Area, records: &[Record], decode: bool) -> Drawn {
    let series = all_series(records, decode);
    let (name, axis, unit) = match decode {
        true => ("Decode", "keys", "GB/s of keys and values"),
        false => ("Prefill", "tokens", "GFLOP/s"),
    };
    if series.is_empty() {
        let note =
            format!("No series of lengths for {} (--lengths measures one)", name.to_lowercase());
        area.draw_text(&note, &text(14, GREY, HPos::Left), (28, 40))?;
        return Ok(());
    }
    let ceilings = ceiling_lines(records, decode);
    let measured = measured_lengths(&series);
    let (low, high) = (measured[0], measured[measured.len() - 1]);
    let highest = series
        .iter()
        .flat_map(|series| series.points.iter().map(|point| point.1))
        .chain(ceilings.iter().map(|ceiling| ceiling.1))
        .fold(0.0, f64::max);
    let mut names: Vec<_> = series.iter().map(|series| series.name).collect();
    names.dedup();
    let heading = match names[..] {
        [one] => format!("{name}: {}", described(one)),
        _ => name.to_string(),
    };
    area.draw_text(&heading, &bold(16), (28, 16))?;
    area.draw_text(unit, &text(13, GREY, HPos::Left), (28, 38))?;
    let mut chart = ChartBuilder::on(area)
        .margin_left(16)
        .margin_right(52)
        .margin_top(52)
        .x_label_area_size(46)
        .y_label_area_size(48)
        .build_cartesian_2d((low / 1.15..high * 1.15).log_scale().base(2.0), 0.0..highest * 1.08)?;
    frame(&mut chart, highest * 1.08)?;
    let plane = chart.plotting_area();
    let pixel = |point: &(f64, f64)| chart.backend_coord(point);
    let base = area.get_base_pixel();
    let local = |(x, y): (i32, i32)| (x - base.0, y - base.1);
    for &length in &measured {
        let (x, y) = local(pixel(&(length, 0.0)));
        area.draw(&PathElement::new([(x, y), (x, y + 5)], GREY))?;
        area.draw_text(&count(length), &text(12, GREY, HPos::Center), (x, y + 15))?;
    }
    let (x, y) = local(pixel(&(high * 1.15, 0.0)));
    area.draw_text(axis, &text(13, GREY, HPos::Right), (x, y + 34))?;
    let (edge_left, edge_right) = (low / 1.15, high * 1.15);
    // From the highest down. Its name stands on a line, or below it if the line above is too near.
    let mut above = i32::MIN / 2;
    for (name, height) in &ceilings {
        let ends = [(edge_left, *height), (edge_right, *height)];
        plane.draw(&DashedPathElement::new(ends, 5, 4, GREY.stroke_width(1)))?;
        let (x, y) = local(pixel(&(edge_left, *height)));
        let at = if y - above < 18 { y + 9 } else { y - 9 };
        area.draw_text(name, &text(12, GREY, HPos::Left), (x + 6, at))?;
        above = y;
    }
    let mut labels = Vec::new();
    for series in &series {
        let color = color(series.dtype);
        plane.draw(&PathElement::new(series.points.clone(), color.stroke_width(2)))?;
        for point in &series.points {
            area.draw(&marker(series.dtype, local(pixel(point)), color))?;
        }
        if let Some(last) = series.points.last() {
            let (x, y) = local(pixel(last));
            let name = if names.len() > 1 {
                format!("{} {}", series.name, series.dtype)
            } else {
                series.dtype.into()
            };
            labels.push(Label { at: (x, y), y, text: name, color });
        }
    }
    name_ends(area, labels)
}

/// Names behind the ends of lines.
fn name_ends(area: &Area, mut labels: Vec<Label>) -> Drawn {
    place(&mut labels, 15);
    for label in &labels {
        area.draw_text(
            &label.text,
            &text(13, label.color, HPos::Left),
            (label.at.0 + 10, label.y),
        )?;
    }
    Ok(())
}

/// Horizontal grid lines with their numbers, and nothing else: the lengths are marked where they
/// were measured.
fn frame(chart: &mut Plane, highest: f64) -> Drawn {
    let labels = if highest < 20.0 { 5 } else { 8 };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(TRANSPARENT)
        .y_labels(labels)
        .y_label_formatter(&|y| format!("{y:.0}"))
        .label_style(text(12, GREY, HPos::Right))
        .draw()?;
    Ok(())
}

/// A shape's words for a reader, if it is a named one.
fn described(name: &str) -> String {
    let (base, variant) =
        name.split_once(' ').map_or((name, ""), |(base, variant)| (base, variant));
    let Some(named) = super::shapes::NAMED.iter().find(|named| named.name == base) else {
        return name.into();
    };
    let value = |key: &str| {
        named.words.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
    };
    let heads = value("hq").unwrap_or("1");
    let kv_heads = value("hkv").unwrap_or(heads);
    let causal = if named.words.ends_with(" causal") { ", causal" } else { "" };
    let variant = if variant.is_empty() { String::new() } else { format!(", {variant}") };
    format!("{heads}/{kv_heads} heads, head dim {}{causal}{variant}", value("d").unwrap_or("?"))
}

/// A number of tokens in three characters or so.
fn count(number: f64) -> String {
    if number >= 1024.0 && number % 1024.0 == 0.0 {
        format!("{}k", number / 1024.0)
    } else {
        format!("{number}")
    }
}

/// Text beside a point.
struct Label {
    /// The point.
    at: (i32, i32),
    /// The height of the text.
    y: i32,
    text: String,
    color: RGBColor,
}

/// Moves labels down until none is on another or on a point that is not its own.
fn place(labels: &mut [Label], line: i32) {
    labels.sort_by_key(|label| label.at.1);
    let points: Vec<_> = labels.iter().map(|label| label.at).collect();
    let end = |label: &Label| label.at.0 + 13 + 7 * label.text.len() as i32;
    for i in 1..labels.len() {
        let (placed, rest) = labels.split_at_mut(i);
        let label = &mut rest[0];
        let (from, to) = (label.at.0, end(label));
        let blocked = |y: i32| {
            let other = placed
                .iter()
                .find(|other| (y - other.y).abs() < line && from <= end(other) && other.at.0 <= to);
            let point = points.iter().find(|point| {
                (y - point.1).abs() < line - 2 && from + 8 < point.0 && point.0 - 6 < to
            });
            other.map(|other| other.y + line).or(point.map(|point| point.1 + line - 2))
        };
        while let Some(below) = blocked(label.y) {
            label.y = below;
        }
    }
}

/// Results that a ceiling bounds, each with its operations for each byte.
fn with_bounds(records: &[Record]) -> Vec<(&Record, f64)> {
    records
        .iter()
        .filter(|record| record.length.is_none() && record.bound.is_some())
        .filter_map(|record| Some((record, record.flops_per_byte?)))
        .collect()
}

/// The roofline: speed against operations for each byte of keys and values, under the ceilings.
fn roof(area: &Area, records: &[Record]) -> Drawn {
    let measured = with_bounds(records);
    area.draw_text("Roofline", &bold(16), (28, 16))?;
    area.draw_text("GFLOP/s", &text(13, GREY, HPos::Left), (28, 38))?;
    let Some(ceilings) = records.iter().find_map(|record| record.ceilings.as_ref()) else {
        area.draw_text("No ceilings were measured", &text(14, GREY, HPos::Left), (28, 70))?;
        return Ok(());
    };
    let flat = ceiling_lines(records, false);
    let highest = flat.iter().map(|line| line.1).fold(0.0, f64::max);
    let top = measured.iter().map(|(record, _)| record.gflops).fold(highest, f64::max) * 1.5;
    let max_intensity = measured.iter().map(|point| point.1).fold(1024.0, f64::max) * 2.2;
    let lowest =
        measured.iter().map(|(record, _)| record.gflops).fold(ceilings.read, f64::min) / 1.6;
    let mut chart: Chart = ChartBuilder::on(area)
        .margin_left(16)
        .margin_right(28)
        .margin_top(52)
        .x_label_area_size(50)
        .y_label_area_size(48)
        .build_cartesian_2d(
            (1.0..max_intensity).log_scale().base(2.0),
            (lowest..top).log_scale(),
        )?;
    chart
        .configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(TRANSPARENT)
        .disable_y_mesh()
        .disable_y_axis()
        .x_labels(14)
        .x_label_formatter(&|x| count(*x))
        .label_style(text(12, GREY, HPos::Center))
        .draw()?;
    let base = area.get_base_pixel();
    let pixel = |point: (f64, f64)| {
        let (x, y) = chart.backend_coord(&point);
        (x - base.0, y - base.1)
    };
    let (right, bottom) = pixel((max_intensity, lowest));
    area.draw_text(
        "FLOP for each byte of keys and values",
        &text(13, GREY, HPos::Right),
        (right, bottom + 38),
    )?;
    let plane = chart.plotting_area();
    for mark in (-3..7).flat_map(|decade| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(decade))) {
        if (lowest..top).contains(&mark) {
            plane.draw(&PathElement::new([(1.0, mark), (max_intensity, mark)], GRID))?;
            let (x, y) = pixel((1.0, mark));
            area.draw_text(&format!("{mark}"), &text(12, GREY, HPos::Right), (x - 10, y))?;
        }
    }
    // Memory: a straight line up to where the highest of the flat ceilings takes over.
    let corner = highest / ceilings.read;
    let start = (lowest / ceilings.read).max(1.0);
    let slope = [(start, start * ceilings.read), (corner, highest)];
    plane.draw(&PathElement::new(slope, GREY.stroke_width(2)))?;
    let upper = start * (corner / start).powf(0.8);
    let at = pixel((upper, upper * ceilings.read));
    let name = format!("memory reads {:.1} GB/s", ceilings.read);
    area.draw_text(&name, &text(12, GREY, HPos::Right), (at.0 - 8, at.1 - 8))?;
    for (name, height) in &flat {
        plane.draw(&DashedPathElement::new(
            [(height / ceilings.read, *height), (max_intensity, *height)],
            5,
            4,
            GREY.stroke_width(1),
        ))?;
        let (x, y) = pixel((max_intensity, *height));
        area.draw_text(name, &text(12, GREY, HPos::Right), (x - 4, y - 9))?;
    }
    let mut labels = Vec::new();
    for (record, flops_per_byte) in &measured {
        let color = color(&record.dtype);
        let at = pixel((*flops_per_byte, record.gflops));
        area.draw(&marker(&record.dtype, at, color))?;
        labels.push(Label { at, y: at.1, text: record.name.clone(), color });
    }
    name_points(area, labels)
}

/// Names beside points, with a line to a name that had to make room.
fn name_points(area: &Area, mut labels: Vec<Label>) -> Drawn {
    place(&mut labels, 13);
    for label in &labels {
        let (x, y) = label.at;
        if (label.y - y).abs() > 3 {
            area.draw(&PathElement::new([(x + 5, y), (x + 11, label.y)], label.color.mix(0.5)))?;
        }
        area.draw_text(&label.text, &text(12, label.color, HPos::Left), (x + 13, label.y))?;
    }
    Ok(())
}
