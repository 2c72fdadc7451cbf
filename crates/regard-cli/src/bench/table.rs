//! Results as a table, for a terminal or for a markdown file.

use super::ceiling::Ceilings;
use super::record::{Record, disturbed};

/// Columns of names, which are aligned to the left.
const LEFT_COLUMNS: usize = 3;

/// How a table looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Columns aligned with spaces.
    Text,
    /// GitHub's markdown.
    Markdown,
}

/// The machine of the measurements, and its ceilings.
pub fn heading(record: &Record) -> String {
    let machine = record.machine.as_deref().unwrap_or("this machine");
    let threads = if record.threads == 1 { "thread" } else { "threads" };
    let mut text = match record.device.as_str() {
        "cpu" => format!("{machine}, {} {threads}", record.threads),
        _ => machine.to_string(),
    };
    if let Some(Ceilings { f32, bf16, tiles, read, read_huge, copy, busy_elsewhere, .. }) =
        &record.ceilings
    {
        let mut parts: Vec<_> = f32
            .iter()
            .map(|ceiling| format!("f32 {} {:.0} GFLOP/s", ceiling.level, ceiling.gflops))
            .collect();
        parts.extend(bf16.map(|gflops| format!("bf16 VDPBF16PS {gflops:.0} GFLOP/s")));
        parts.extend(tiles.map(|gflops| format!("bf16 AMX {gflops:.0} GFLOP/s")));
        parts.push(format!("memory reads {read:.1} GB/s"));
        parts.extend(read_huge.map(|read| format!("in huge pages {read:.1} GB/s")));
        parts.extend(copy.map(|copy| format!("copies {copy:.1} GB/s")));
        text += &format!("\nceilings: {}", parts.join(", "));
        if let Some(cores) = busy_elsewhere.filter(|_| disturbed(*busy_elsewhere)) {
            text += &format!(
                "\nOther processes kept {cores:.1} cores busy while ceilings were measured: \
                 fractions of them mean little."
            );
        }
    }
    text + "\n"
}

/// The results, one a line, with a column for each peer that they were compared with.
pub fn table(records: &[Record], style: Style) -> String {
    let mut peers: Vec<&str> = Vec::new();
    for against in records.iter().flat_map(|record| &record.against) {
        if !peers.contains(&against.peer.as_str()) {
            peers.push(&against.peer);
        }
    }
    let busy = records.iter().any(Record::is_disturbed);
    let modelled = records.iter().any(|record| record.layers.is_some());
    let mut head: Vec<String> =
        ["shape", "dtype", "kernel", "time", "+-", "speed", "of ceiling", "max error"]
            .map(String::from)
            .into();
    if modelled {
        head.insert(LEFT_COLUMNS, "layers".into());
    }
    if busy {
        head.push("others busy".into());
    }
    head.extend(peers.iter().map(|peer| peer.to_string()));
    if peers.len() > 1 {
        head.push("best of them".into());
    }
    let mut rows = vec![head];
    for record in records {
        let in_gbytes = record.in_gbytes();
        let mut row = vec![
            record.name.clone(),
            record.dtype.clone(),
            record.kernel.clone().unwrap_or_else(|| record.peer.clone()),
            duration(record.seconds),
            or_dash(record.spread(), |spread| format!("{:.0}%", spread * 100.0)),
            format!(
                "{:.1} {}",
                record.speed(in_gbytes),
                if in_gbytes { "GB/s" } else { "GFLOP/s" }
            ),
            or_dash(record.fraction_of_ceiling, |fraction| format!("{:.0}%", fraction * 100.0)),
            or_dash(record.max_error, |error| format!("{error:.1e}")),
        ];
        if modelled {
            row.insert(LEFT_COLUMNS, or_dash(record.layers, |layers| layers.to_string()));
        }
        if busy {
            row.push(or_dash(record.busy_elsewhere, |cores| format!("{cores:.1} cores")));
        }
        let against = |peer: &str| record.against.iter().find(|against| against.peer == peer);
        for peer in &peers {
            row.push(or_dash(against(peer), |against| {
                let mark = if disturbed(against.busy_elsewhere) { " *" } else { "" };
                format!(
                    "{:.1} ({:.2}x){mark}",
                    record.speed(in_gbytes) / against.ratio,
                    against.ratio
                )
            }));
        }
        if peers.len() > 1 {
            let best = record.against.iter().min_by(|a, b| a.ratio.total_cmp(&b.ratio));
            row.push(or_dash(best, |best| format!("{:.2}x", best.ratio)));
        }
        rows.push(row);
    }
    let mut shown = match style {
        Style::Text => text(&rows),
        Style::Markdown => markdown(&rows),
    };
    if records
        .iter()
        .flat_map(|record| &record.against)
        .any(|against| disturbed(against.busy_elsewhere))
    {
        // A bare asterisk would start a list in markdown.
        let mark = if style == Style::Markdown { "\\*" } else { "*" };
        shown += &format!("\n{mark} measured while other processes were busy\n");
    }
    shown
}

fn or_dash<T>(value: Option<T>, show: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "-".into(), show)
}

fn text(rows: &[Vec<String>]) -> String {
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..rows[0].len()).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            // Names to the left, numbers to the right.
            line += &if column < LEFT_COLUMNS {
                format!("{cell:<width$}  ")
            } else {
                format!("{cell:>width$}  ")
            };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

fn markdown(rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = line(&rows[0]);
    let rule: Vec<_> = (0..rows[0].len())
        .map(|column| if column < LEFT_COLUMNS { "---" } else { "--:" }.into())
        .collect();
    text += &line(&rule);
    for row in &rows[1..] {
        text += &line(row);
    }
    text
}

/// A time in three digits.
fn duration(seconds: f64) -> String {
    let (number, unit) = match seconds {
        s if s < 1e-3 => (s * 1e6, "us"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    let digits = if number < 10.0 { 2 } else { usize::from(number < 100.0) };
    format!("{number:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::super::record::{Against, tests::record};
    use super::*;

    #[test]
    fn tables_show_each_peer_and_the_best() {
        let mut ours = record("d4k", "regard", "f32", 0.002);
        ours.query_tokens = Some(1);
        ours.against = vec![
            Against { peer: "one".into(), seconds: 0.004, ratio: 2.0, busy_elsewhere: Some(0.0) },
            Against { peer: "two".into(), seconds: 0.003, ratio: 1.5, busy_elsewhere: Some(0.5) },
        ];
        let shown = table(&[ours, record("p512", "regard", "f16", 1.5)], Style::Markdown);
        let expected = "\
            | shape | dtype | kernel | time | +- | speed | of ceiling | max error \
            | one | two | best of them |\n\
            | --- | --- | --- | --: | --: | --: | --: | --: | --: | --: | --: |\n\
            | d4k | f32 | regard | 2.00 ms | - | 250.0 GB/s | - | - \
            | 125.0 (2.00x) | 166.7 (1.50x) * | 1.50x |\n\
            | p512 | f16 | regard | 1.50 s | - | 0.7 GFLOP/s | - | - | - | - | - |\n\
            \n\\* measured while other processes were busy\n";
        assert_eq!(shown, expected);
    }

    #[test]
    fn times_have_three_digits() {
        let times = [1.234e-6, 12.34e-6, 123.4e-6, 1.234e-3, 1.234];
        assert_eq!(times.map(duration), ["1.23 us", "12.3 us", "123 us", "1.23 ms", "1.23 s"]);
    }
}
