//! The results as a picture: the share of attention in a decode step, and tokens per second against
//! requests.

use super::{Results, Served, Step};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

const SIZE: (u32, u32) = (1100, 420);
const FONT: &str = "Helvetica, Arial, DejaVu Sans, sans-serif";
const INK: RGBColor = RGBColor(34, 34, 34);
const GREY: RGBColor = RGBColor(110, 110, 110);
/// Colours of Okabe and Ito, which readers with any colour vision tell apart.
const BLUE: RGBColor = RGBColor(0, 114, 178);
const VERMILION: RGBColor = RGBColor(213, 94, 0);
const PALE: RGBColor = RGBColor(205, 212, 218);

/// Draws results into an SVG file: those of `shapes`, or of the other measurements.
pub fn draw(results: &Results, path: &Path) -> Drawn {
    if !results.served.is_empty() {
        return draw_served(&results.served, path);
    }
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (left, right) = root.split_horizontally(640);
    bars(&left, &results.steps)?;
    rates(&right, results)?;
    root.present()?;
    Ok(())
}

/// Distance of bars, and the gap above those of each number of requests and tokens.
const BAR_STEP: i32 = 18;
const POINT_GAP: i32 = 14;

/// A panel per model.
fn draw_served(served: &[Served], path: &Path) -> Drawn {
    const WIDTH: u32 = 620;
    let mut models: Vec<&str> = served.iter().map(|served| served.model.as_str()).collect();
    models.dedup();
    let of_model = |model: &str| -> Vec<&Served> {
        served.iter().filter(|served| served.model == model).collect()
    };
    let height = |model: &&str| {
        let steps = of_model(model);
        let mut points: Vec<_> = steps.iter().map(|one| (one.requests, one.context)).collect();
        points.dedup();
        BAR_STEP * steps.len() as i32 + POINT_GAP * points.len() as i32
    };
    let height = 90 + models.iter().map(height).max().unwrap_or(0);
    let size = (WIDTH * models.len() as u32, height as u32);
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, model) in root.split_evenly((1, models.len())).iter().zip(&models) {
        served_steps(area, model, &of_model(model))?;
    }
    root.present()?;
    Ok(())
}

/// Draws a bar per step of a model. Steps of the same requests follow one another.
fn served_steps(area: &Area, model: &str, served: &[&Served]) -> Drawn {
    let title = format!("A decode step of {model}, in milliseconds");
    head(area, &title)?;
    let longest = served.iter().map(|served| served.step_ms).fold(0.0, f64::max);
    let (start, width, height) = (110, 190.0, BAR_STEP - 2);
    let x = |ms: f64| start + (ms / longest * width) as i32;
    let (mut top, mut point) = (66, None);
    for one in served {
        let Served { attention, requests, context, step_ms, attention_ms, graph, .. } = one;
        let attention_ms = attention_ms.unwrap_or(0.0);
        if point != Some((requests, context)) {
            point = Some((requests, context));
            top += POINT_GAP;
            let label = format!("{requests} x {context}");
            area.draw_text(&label, &text(14, INK, HPos::Right), (start - 10, top + height))?;
        }
        let end = x(*step_ms);
        bar(area, [start, x(attention_ms), end], [top, top + height])?;
        let (rate, graph) = (*requests as f64 / step_ms * 1e3, if *graph { ", graph" } else { "" });
        let numbers = format!("{step_ms:.1} {attention}{graph}, {rate:.0} tokens/s");
        area.draw_text(&numbers, &text(13, INK, HPos::Left), (end + 8, top + height / 2))?;
        top += BAR_STEP;
    }
    Ok(())
}

fn text(size: i32, color: RGBColor, horizontal: HPos) -> TextStyle<'static> {
    (FONT, size).into_font().color(&color).pos(Pos::new(horizontal, VPos::Center))
}

fn short(step: &Step) -> String {
    let attention = match step.attention.as_str() {
        "regard" => "regard",
        name if name.contains("flash") => "candle's flash_attn",
        _ => "candle's Llama",
    };
    format!("{}, {attention}", step.products)
}

/// The title of the bars, and what their colours mean.
fn head(area: &Area, title: &str) -> Drawn {
    area.draw_text(title, &text(18, INK, HPos::Left), (24, 28))?;
    area.draw_text("attention", &text(14, VERMILION, HPos::Left), (24, 54))?;
    area.draw_text("everything else", &text(14, GREY, HPos::Left), (100, 54))?;
    Ok(())
}

/// The bar of a step: attention from `start` to `split`, everything else from there to `end`.
fn bar(area: &Area, [start, split, end]: [i32; 3], [top, bottom]: [i32; 2]) -> Drawn {
    area.draw(&Rectangle::new([(start, top), (split, bottom)], VERMILION.filled()))?;
    area.draw(&Rectangle::new([(split, top), (end, bottom)], PALE.filled()))?;
    Ok(())
}

fn bars(area: &Area, steps: &[Step]) -> Drawn {
    let Some(first) = steps.first() else { return Ok(()) };
    let title = format!("A decode step after {} tokens, in milliseconds", first.context);
    head(area, &title)?;
    let longest = steps.iter().map(|step| step.step_ms).fold(0.0, f64::max);
    let (start, width, height) = (190, 360.0, 46);
    for (i, step) in steps.iter().enumerate() {
        let top = 82 + i as i32 * (height + 6);
        let x = |ms: f64| start + (ms / longest * width) as i32;
        let bottom = top + height - 12;
        bar(area, [start, x(step.attention_ms), x(step.step_ms)], [top, bottom])?;
        let middle = (top + bottom) / 2;
        area.draw_text(&short(step), &text(14, INK, HPos::Right), (start - 10, middle))?;
        let share = 100.0 * step.attention_ms / step.step_ms;
        let numbers = format!("{:.1} ({share:.0}%)", step.step_ms);
        area.draw_text(&numbers, &text(14, INK, HPos::Left), (x(step.step_ms) + 8, middle))?;
    }
    Ok(())
}

fn rates(area: &Area, results: &Results) -> Drawn {
    if results.rates.is_empty() {
        return Ok(());
    }
    area.draw_text(
        "Tokens per second, all requests together",
        &text(18, INK, HPos::Left),
        (24, 28),
    )?;
    let most = results.rates.iter().map(|rate| rate.tokens_per_second).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .margin_top(60)
        .margin_right(90)
        .margin_bottom(20)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(0f64..17.0, 0f64..most * 1.1)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .x_desc("requests")
        .x_labels(9)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .label_style(text(14, GREY, HPos::Center))
        .draw()?;
    for (products, color) in [("f32", BLUE), ("quantized", VERMILION)] {
        let points = || {
            let of = results.rates.iter().filter(|rate| rate.products == products);
            of.map(|rate| (rate.requests as f64, rate.tokens_per_second))
        };
        chart.draw_series(LineSeries::new(points(), color.stroke_width(2)))?;
        chart.draw_series(points().map(|point| Circle::new(point, 4, color.filled())))?;
        if let Some(last) = points().next_back() {
            let style = text(14, color, HPos::Left);
            chart.draw_series([Text::new(products, (last.0 + 0.4, last.1), style)])?;
        }
    }
    Ok(())
}
