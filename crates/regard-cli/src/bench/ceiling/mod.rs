//! The roofline of this machine: multiply-adds and memory reads per second, with the threads that
//! the kernels use.

mod loops;
mod memory;

use super::load::Load;
use loops::ProductLoop;
use memory::Buffer;
use regard::Error;
use regard::cpu::Level;
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::rc::Rc;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// The measured ceilings, all with the same number of threads.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub struct Ceilings {
    /// Threads that worked at the same time.
    pub threads: usize,
    /// f32 GFLOP/s at the widest level of this CPU, and at the level in use if that is another.
    pub f32: Vec<LevelCeiling>,
    /// bf16 GFLOP/s of VDPBF16PS, if this CPU has it.
    pub bf16: Option<f64>,
    /// bf16 GFLOP/s of the matrix unit (AMX), if this CPU has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tiles: Option<f64>,
    /// GB/s of reading memory in ordinary pages. Kernels are measured against this: their operands
    /// are in such pages.
    pub read: f64,
    /// GB/s of reading memory in huge pages, if they are available.
    #[serde(default)]
    pub read_huge: Option<f64>,
    /// GB/s of copying memory, read and written bytes together; of GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<f64>,
    /// Cores that other processes kept busy meanwhile.
    pub busy_elsewhere: Option<f64>,
}

/// The ceiling of f32 multiply-adds at a SIMD level.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub struct LevelCeiling {
    /// The level's name.
    pub level: String,
    /// GFLOP/s.
    pub gflops: f64,
}

/// One sample of a product loop takes about this long; the median of [`SAMPLES`] counts.
const SAMPLE: Duration = Duration::from_millis(25);
const SAMPLES: usize = 9;

/// Passes over a buffer; a rate is their median. There are fewer, but [`MIN_READ_SAMPLES`], if they
/// take longer than [`READ_TIME`] together.
const READ_SAMPLES: usize = 5;
const MIN_READ_SAMPLES: usize = 3;
const READ_TIME: Duration = Duration::from_millis(300);

impl Ceilings {
    /// Measures them for each of these numbers of threads: some seconds. The readers read ordinary
    /// pages. Huge pages are left out if there are several numbers of threads.
    ///
    /// # Errors
    /// If there is no room for the buffers that are read.
    pub fn measure(
        level: Level,
        threads: &[usize],
        last_level_cache: Option<usize>,
    ) -> Result<Vec<(Ceilings, Reader)>, Error> {
        let widest = Level::ALL
            .into_iter()
            .rev()
            .find(|level| level.is_available())
            .unwrap_or(Level::Scalar);
        // Far larger than the last-level cache, so that hardly anything of one pass is left there
        // for the next.
        let bytes = (last_level_cache.unwrap_or(32 << 20) * 12).clamp(384 << 20, 4 << 30);
        crate::memory::expect_room(
            "measuring ceilings (not with --no-ceilings)",
            2 * bytes as u64,
        )?;
        let most = threads.iter().copied().max().unwrap_or(1);
        let buffer = Rc::new(Buffer::new(bytes, most));
        let huge = match threads {
            &[threads] => Buffer::huge(bytes, threads).map(Rc::new),
            _ => None,
        };
        let ceilings = threads.iter().map(|&threads| {
            let load = Load::now();
            let f32 = [Some(widest), (level != widest).then_some(level)].into_iter().flatten();
            let f32 = f32.map(|level| LevelCeiling {
                level: level.name().into(),
                gflops: products(loops::f32_products(level), threads),
            });
            let reader = Reader::new(&buffer, widest, threads);
            let ceilings = Ceilings {
                threads,
                f32: f32.collect(),
                bf16: loops::bf16_products().map(|products_loop| products(products_loop, threads)),
                tiles: loops::tile_products().map(|products_loop| products(products_loop, threads)),
                read: reader.rate(),
                read_huge: huge.as_ref().map(|huge| Reader::new(huge, widest, threads).rate()),
                copy: None,
                busy_elsewhere: load.others(),
            };
            (ceilings, reader)
        });
        Ok(ceilings.collect())
    }

    /// The higher of two measurements of each ceiling: disturbances only lower a measurement.
    pub fn or_higher(self, other: Ceilings) -> Ceilings {
        let higher = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).max_by(f64::total_cmp);
        let levels = self.f32.into_iter().zip(other.f32);
        Ceilings {
            threads: self.threads,
            f32: levels.map(|(a, b)| if a.gflops < b.gflops { b } else { a }).collect(),
            bf16: higher(self.bf16, other.bf16),
            tiles: higher(self.tiles, other.tiles),
            read: self.read.max(other.read),
            read_huge: higher(self.read_huge, other.read_huge),
            copy: higher(self.copy, other.copy),
            busy_elsewhere: self
                .busy_elsewhere
                .into_iter()
                .chain(other.busy_elsewhere)
                .min_by(f64::total_cmp),
        }
    }

    /// f32 GFLOP/s at that level, if it was measured.
    pub fn f32_at(&self, level: Level) -> Option<f64> {
        self.f32.iter().find(|ceiling| ceiling.level == level.name()).map(|ceiling| ceiling.gflops)
    }
}

/// GFLOP/s of all threads together.
fn products(products_loop: ProductLoop, threads: usize) -> f64 {
    let ProductLoop { run, flops_per_round } = products_loop;
    let sample = |rounds: u64| {
        together(threads, |_| {
            // SAFETY: the loop was found for a level that this CPU has.
            black_box(unsafe { run(black_box(rounds)) });
        })
    };
    let mut rounds = 1 << 16;
    // Also brings the cores to their working frequency.
    let mut seconds = sample(rounds);
    while seconds < SAMPLE.as_secs_f64() {
        rounds *= 2;
        seconds = sample(rounds);
    }
    let seconds = median((0..SAMPLES).map(|_| sample(rounds)).collect());
    (flops_per_round * rounds) as f64 * threads as f64 / seconds / 1e9
}

/// Reads memory as fast as this machine can.
pub struct Reader {
    buffer: Rc<Buffer>,
    level: Level,
    threads: usize,
    /// The fastest way to read, by medians.
    pattern: usize,
}

impl Reader {
    fn new(buffer: &Rc<Buffer>, level: Level, threads: usize) -> Reader {
        let mut reader = Reader { buffer: Rc::clone(buffer), level, threads, pattern: 0 };
        let rates: Vec<_> =
            (0..loops::READ_PATTERNS).map(|pattern| reader.pattern_rate(pattern)).collect();
        let best = (0..rates.len()).max_by(|&a, &b| rates[a].total_cmp(&rates[b]));
        reader.pattern = best.unwrap_or(0);
        reader
    }

    /// GB/s of all threads together, each reading its own part.
    pub fn rate(&self) -> f64 {
        self.pattern_rate(self.pattern)
    }

    fn pattern_rate(&self, pattern: usize) -> f64 {
        let Reader { level, threads, .. } = *self;
        let lines = self.buffer.lines();
        let part = lines.len() / threads;
        let sample = || {
            together(threads, |thread| {
                let lines = &lines[thread * part..(thread + 1) * part];
                // SAFETY: the widest level of this CPU.
                black_box(unsafe { loops::read(level, pattern, black_box(lines)) });
            })
        };
        let mut samples = Vec::new();
        while samples.len() < MIN_READ_SAMPLES
            || samples.len() < READ_SAMPLES && samples.iter().sum::<f64>() < READ_TIME.as_secs_f64()
        {
            samples.push(sample());
        }
        let seconds = median(samples);
        (part * threads * 64) as f64 / seconds / 1e9
    }
}

/// Runs something on that many threads at once; seconds from the first start to the last end.
fn together(threads: usize, work: impl Fn(usize) + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let run = &|thread| {
        barrier.wait();
        let start = Instant::now();
        work(thread);
        (start, Instant::now())
    };
    let spans: Vec<(Instant, Instant)> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || run(thread))).collect();
        let own = run(0);
        others.into_iter().filter_map(|thread| thread.join().ok()).chain([own]).collect()
    });
    let start = spans.iter().map(|span| span.0).min();
    let end = spans.iter().map(|span| span.1).max();
    start.zip(end).map_or(0.0, |(start, end)| (end - start).as_secs_f64())
}

/// The middle of some numbers; of an even number of them the lower of the two.
pub fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.0);
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn of_two_measurements_the_higher_counts() {
        let ceilings = |f32, bf16, read| Ceilings {
            threads: 2,
            f32: vec![LevelCeiling { level: "avx512".into(), gflops: f32 }],
            bf16,
            tiles: None,
            read,
            copy: None,
            read_huge: None,
            busy_elsewhere: Some(read),
        };
        let higher = ceilings(1.0, Some(5.0), 3.0).or_higher(ceilings(2.0, Some(4.0), 2.0));
        assert_eq!(higher, Ceilings { busy_elsewhere: Some(2.0), ..ceilings(2.0, Some(5.0), 3.0) });
    }

    #[test]
    fn every_loop_that_this_machine_can_run_computes_something() {
        for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
            let ProductLoop { run, flops_per_round } = loops::f32_products(level);
            // SAFETY: the level is available.
            let (some, more) = unsafe { (run(10), run(1_000_000)) };
            assert!(flops_per_round > 0 && some > 0.0 && more > some, "{level}: {some} {more}");
            let lines: Vec<[u64; 8]> = (0..64).map(|i| [i; 8]).collect();
            for pattern in 0..loops::READ_PATTERNS {
                // SAFETY: the level is available.
                let sum = unsafe { loops::read(level, pattern, &lines) };
                assert_eq!(sum, 8 * 63 * 32, "{level} {pattern}");
            }
        }
    }
}
