//! The load of other processes, as the operating system reports it (Linux): timings on a busy
//! machine mean little.

use std::time::{Duration, Instant};

/// A machine counts as quiet while others use less than this, in cores.
const QUIET: f64 = 0.04;

/// Time to watch the load before judging it. `/proc` counts in hundredths of a second.
const LOOK: Duration = Duration::from_millis(700);

/// Processor time used up to now.
pub struct Load {
    at: Instant,
    /// CPU seconds of all processes; of this process.
    used: Option<(f64, f64)>,
}

impl Load {
    /// Up to now.
    pub fn now() -> Load {
        Load { at: Instant::now(), used: used() }
    }

    /// Cores that other processes have kept busy since then, on average.
    pub fn others(&self) -> Option<f64> {
        let (all, own) = self.used?;
        let (all_now, own_now) = used()?;
        let seconds = self.at.elapsed().as_secs_f64();
        // Shorter intervals are below the resolution of `/proc`.
        (seconds > 0.1).then(|| (((all_now - all) - (own_now - own)) / seconds).max(0.0))
    }

    /// Waits until others leave the machine alone, but no longer than `patience`.
    pub fn wait_for_quiet(patience: Duration) {
        let started = Instant::now();
        while started.elapsed() < patience {
            let load = Load::now();
            std::thread::sleep(LOOK.min(patience));
            if load.others().is_none_or(|others| others < QUIET) {
                break;
            }
        }
    }
}

/// `USER_HZ`, which is part of Linux's interface and the same everywhere.
const TICKS_A_SECOND: f64 = 100.0;

fn used() -> Option<(f64, f64)> {
    let all = std::fs::read_to_string("/proc/stat").ok()?;
    let own = std::fs::read_to_string("/proc/self/stat").ok()?;
    Some((all_ticks(&all)? / TICKS_A_SECOND, own_ticks(&own)? / TICKS_A_SECOND))
}

/// User, nice, system, irq, softirq and stolen time of the first line; not idle and not waiting.
fn all_ticks(stat: &str) -> Option<f64> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let fields: Vec<f64> = line.split_whitespace().filter_map(|field| field.parse().ok()).collect();
    [0, 1, 2, 5, 6, 7].into_iter().map(|i| fields.get(i).copied()).sum()
}

/// User and system time; the fields before them start after the command's name, which may hold
/// anything.
fn own_ticks(stat: &str) -> Option<f64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<f64>().ok();
    Some(next()? + next()?)
}

/// The CPU's model name.
pub fn cpu_model() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_read_from_the_right_fields() {
        assert_eq!(all_ticks("cpu  1 2 4 100 100 8 16 32 64 64\ncpu0 1\n"), Some(63.0));
        assert_eq!(all_ticks("intr 1"), None);
        assert_eq!(own_ticks("7 (a ) b) R 1 2 3 4 5 6 7 8 9 10 300 40 5 5"), Some(340.0));
    }
}
