//! Results as a table, for a terminal or for a markdown file.

use super::ceiling::Ceilings;
use super::record::{Record, disturbed};

/// Columns of names, which are aligned to the left.
const LEFT_COLUMNS: usize = 3;

/// The style of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Columns aligned with spaces.
    Text,
    /// GitHub's markdown.
    Markdown,
}

/// The machine of the measurements, and its ceilings, for each number of threads.
pub fn heading(records: &[Record]) -> String {
    let Some(first) = records.first() else { return String::new() };
    let machine = first.machine.as_deref().unwrap_or("this machine");
    let all = thread_counts(records);
    let mut text = match (first.device.as_str(), &all[..]) {
        ("cpu", [1]) => format!("{machine}, 1 thread"),
        ("cpu", [threads]) => format!("{machine}, {threads} threads"),
        ("cpu", _) => {
            let all: Vec<_> = all.iter().map(usize::to_string).collect();
            format!("{machine}, {} threads", all.join(", "))
        }
        _ => machine.to_string(),
    };
    for threads in &all {
        let of_threads = records.iter().find(|record| record.threads == *threads);
        if let Some(ceilings) = of_threads.and_then(|record| record.ceilings.as_ref()) {
            let of = if all.len() > 1 { format!(" of {threads}") } else { String::new() };
            text += &format!("\nceilings{of}: {}", ceilings_in_words(ceilings));
        }
    }
    text + "\n"
}

/// The numbers of threads, from few to many.
fn thread_counts(records: &[Record]) -> Vec<usize> {
    let mut all: Vec<_> = records.iter().map(|record| record.threads).collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn ceilings_in_words(ceilings: &Ceilings) -> String {
    let Ceilings { f32, bf16, tiles, read, read_huge, copy, busy_elsewhere, .. } = ceilings;
    let mut parts: Vec<_> = f32
        .iter()
        .map(|ceiling| format!("f32 {} {:.0} GFLOP/s", ceiling.level, ceiling.gflops))
        .collect();
    parts.extend(bf16.map(|gflops| format!("bf16 VDPBF16PS {gflops:.0} GFLOP/s")));
    parts.extend(tiles.map(|gflops| format!("bf16 AMX {gflops:.0} GFLOP/s")));
    parts.push(format!("memory reads {read:.1} GB/s"));
    parts.extend(read_huge.map(|read| format!("in huge pages {read:.1} GB/s")));
    parts.extend(copy.map(|copy| format!("copies {copy:.1} GB/s")));
    let mut text = parts.join(", ");
    if let Some(cores) = busy_elsewhere.filter(|_| disturbed(*busy_elsewhere)) {
        text += &format!(
            "\nOther processes kept {cores:.1} cores busy while ceilings were measured: fractions \
             of them say little."
        );
    }
    text
}

/// Speed relative to the same work with the fewest threads.
fn speed_up(record: &Record, records: &[Record]) -> Option<f64> {
    let same = |other: &&Record| {
        (&other.name, &other.dtype, &other.peer) == (&record.name, &record.dtype, &record.peer)
    };
    let fewest = records.iter().filter(same).min_by_key(|other| other.threads)?;
    Some(fewest.seconds / record.seconds)
}

/// The columns that some tables have.
struct Columns<'a> {
    layers: bool,
    threads: bool,
    model: bool,
    exact_plan: bool,
    busy: bool,
    peers: Vec<&'a str>,
}

impl<'a> Columns<'a> {
    fn new(records: &'a [Record]) -> Columns<'a> {
        let mut peers: Vec<&str> = Vec::new();
        for against in records.iter().flat_map(|record| &record.against) {
            if !peers.contains(&against.peer.as_str()) {
                peers.push(&against.peer);
            }
        }
        let any = |has: fn(&Record) -> bool| records.iter().any(has);
        Columns {
            layers: any(|record| record.layers.is_some()),
            threads: thread_counts(records).len() > 1,
            model: any(|record| record.pipeline.is_some()),
            exact_plan: any(|record| record.exact_seconds.is_some()),
            busy: any(Record::is_disturbed),
            peers,
        }
    }

    fn head(&self) -> Vec<String> {
        let own = [
            (true, "shape"),
            (true, "dtype"),
            (true, "kernel"),
            (self.threads, "threads"),
            (self.layers, "layers"),
            (true, "time"),
            (true, "+-"),
            (true, "speed"),
            (true, "of ceiling"),
            (true, "max error"),
            (self.threads, "speed-up"),
            (self.model, "of model"),
            (self.exact_plan, "exact plan"),
            (self.busy, "others busy"),
        ];
        let own = own.iter().filter_map(|(shown, name)| shown.then_some(*name));
        let best = (self.peers.len() > 1).then_some("best of them");
        own.chain(self.peers.iter().copied()).chain(best).map(String::from).collect()
    }

    fn row(&self, record: &Record, records: &[Record]) -> Vec<String> {
        let in_gbytes = record.in_gbytes();
        let mut row = vec![
            record.name.clone(),
            record.dtype.clone(),
            record.kernel.clone().unwrap_or_else(|| record.peer.clone()),
        ];
        row.extend(self.threads.then(|| record.threads.to_string()));
        row.extend(self.layers.then(|| or_dash(record.layers, |layers| layers.to_string())));
        row.extend([
            duration(record.seconds),
            or_dash(record.spread(), percent),
            format!(
                "{:.1} {}",
                record.speed(in_gbytes),
                if in_gbytes { "GB/s" } else { "GFLOP/s" }
            ),
            or_dash(record.fraction_of_ceiling, percent),
            or_dash(record.max_error, |error| format!("{error:.1e}")),
        ]);
        let times = |times| format!("{times:.2}x");
        row.extend(self.threads.then(|| or_dash(speed_up(record, records), times)));
        row.extend(self.model.then(|| or_dash(record.of_pipeline(), percent)));
        row.extend(self.exact_plan.then(|| {
            or_dash(record.exact_seconds.zip(record.of_exact()), |(exact, of_exact)| {
                format!("{} ({})", duration(exact), times(of_exact))
            })
        }));
        let cores = |cores| format!("{cores:.1} cores");
        row.extend(self.busy.then(|| or_dash(record.busy_elsewhere, cores)));
        for peer in &self.peers {
            let against = record.against.iter().find(|against| against.peer == *peer);
            row.push(or_dash(against, |against| {
                let mark = if disturbed(against.busy_elsewhere) { " *" } else { "" };
                format!(
                    "{:.1} ({}){mark}",
                    record.speed(in_gbytes) / against.ratio,
                    times(against.ratio)
                )
            }));
        }
        if self.peers.len() > 1 {
            let best = record.against.iter().map(|against| against.ratio).min_by(f64::total_cmp);
            row.push(or_dash(best, times));
        }
        row
    }
}

/// The results, one per line, with a column for each peer that they were compared with.
pub fn table(records: &[Record], style: Style) -> String {
    let columns = Columns::new(records);
    let rows: Vec<_> = std::iter::once(columns.head())
        .chain(records.iter().map(|record| columns.row(record, records)))
        .collect();
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

fn percent(fraction: f64) -> String {
    format!("{:.0}%", fraction * 100.0)
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
    fn tables_show_threads_and_exact_plans() {
        let threads =
            |threads, seconds| Record { threads, ..record("p512", "regard", "f32", seconds) };
        let bounded =
            Record { exact_seconds: Some(0.002), pipeline: Some(500.0), ..threads(4, 0.0021) };
        let records = [threads(1, 0.008), threads(4, 0.0025), bounded];
        let shown = table(&records, Style::Markdown);
        let expected = "\
            | shape | dtype | kernel | threads | time | +- | speed | of ceiling | max error \
            | speed-up | of model | exact plan |\n\
            | --- | --- | --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |\n\
            | p512 | f32 | regard | 1 | 8.00 ms | - | 125.0 GFLOP/s | - | - | 1.00x | - | - |\n\
            | p512 | f32 | regard | 4 | 2.50 ms | - | 400.0 GFLOP/s | - | - | 3.20x | - | - |\n\
            | p512 | f32 | regard | 4 | 2.10 ms | - | 476.2 GFLOP/s | - | - | 3.81x \
            | 95% | 2.00 ms (1.05x) |\n";
        assert_eq!(shown, expected);
        assert_eq!(heading(&records), "this machine, 1, 4 threads\n");
        assert_eq!(heading(&records[1..]), "this machine, 4 threads\n");
    }

    #[test]
    fn times_have_three_digits() {
        let times = [1.234e-6, 12.34e-6, 123.4e-6, 1.234e-3, 1.234];
        assert_eq!(times.map(duration), ["1.23 us", "12.3 us", "123 us", "1.23 ms", "1.23 s"]);
    }
}
