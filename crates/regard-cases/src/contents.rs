//! The kinds of numbers that operands hold.

use crate::noise::Noise;
use half::{bf16, f16};
use regard::DType;

/// The numbers of one operand.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Numbers {
    /// Roughly normal, mean 0. Standard deviation 1.5 for queries, 1 for keys and values.
    #[default]
    Normal,
    /// The same number everywhere.
    Constant(f32),
    /// Absolute values of normal numbers, as after an activation such as ReLU: products do not
    /// cancel.
    Positive,
    /// Normal numbers times this factor: huge or tiny. Bounded by what the type can hold.
    Scaled(f32),
    /// Normal numbers, but one row in 20 is 30 times as large: one key dominates the softmax.
    Peaked,
    /// Normal numbers, but one dim in 32, the same in all rows, is 30 times as large, as channels
    /// of models are.
    Outliers,
    /// Normal numbers, each row times a power of two from 2^-n to 1.
    Spread(usize),
}

/// The numbers of queries, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[allow(missing_docs, reason = "fields are named as the operands")]
pub struct Contents {
    pub q: Numbers,
    pub k: Numbers,
    pub v: Numbers,
}

/// ALiBi slopes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Slopes {
    /// 2^(-8 (h + 1) / Hq), as models have them.
    #[default]
    Geometric,
    /// Geometric slopes with alternating signs, every third one zero.
    Signed,
    /// All zero: no bias.
    Zero,
    /// As large as they may be, 2^60, of both signs.
    Extreme,
    /// Between -10 and 10: a few keys away every probability is 0, or only the farthest keys count.
    Steep,
}

/// Sink logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sinks {
    /// Normal numbers times 2.
    #[default]
    Normal,
    /// Every second one minus infinity: no sink for that head.
    Infinite,
    /// Between -1000 and 1000: the sink takes everything or nothing.
    Large,
    /// Finite numbers from one end of f32 to the other.
    Extreme,
}

/// Tree masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Trees {
    /// Each token's parent is an earlier token, or the prefix; it sees its ancestors and itself.
    #[default]
    Ancestors,
    /// Any bits, three in four of them set: tokens see later ones too, and maybe not themselves.
    Arbitrary,
}

impl Contents {
    /// Queries, keys and values of the same kind.
    pub fn from_numbers(numbers: Numbers) -> Contents {
        Contents { q: numbers, k: numbers, v: numbers }
    }
}

impl Numbers {
    /// Fills one row. `deviation` is the standard deviation of normal numbers; no constant or
    /// scaled number is larger than `max`.
    pub(crate) fn fill(self, row: &mut [f32], noise: &mut Noise, deviation: f32, max: f32) {
        let factor = match self {
            Numbers::Normal | Numbers::Constant(_) | Numbers::Positive => 1.0,
            Numbers::Scaled(factor) => factor,
            Numbers::Peaked if noise.one_in(20) => 30.0,
            Numbers::Peaked | Numbers::Outliers => 1.0,
            Numbers::Spread(n) => (-(noise.below(n + 1) as f32)).exp2(),
        };
        row.fill_with(|| match self {
            Numbers::Constant(number) => number.clamp(-max, max),
            Numbers::Positive => (noise.normal() * deviation).abs(),
            Numbers::Normal => noise.normal() * deviation,
            _ => (noise.normal() * deviation * factor).clamp(-max, max),
        });
        if self == Numbers::Outliers {
            row.iter_mut().skip(5).step_by(32).for_each(|x| *x = (*x * 30.0).clamp(-max, max));
        }
    }
}

impl Slopes {
    /// The slope of one of `heads` query heads.
    pub(crate) fn slope(self, head: usize, heads: usize, noise: &mut Noise) -> f32 {
        let geometric = (-8.0 * (head + 1) as f32 / heads as f32).exp2();
        match self {
            Slopes::Geometric => geometric,
            Slopes::Signed if head % 3 == 2 => 0.0,
            Slopes::Signed => [geometric, -geometric][head % 3],
            Slopes::Zero => 0.0,
            Slopes::Extreme => [1.0, -1.0][head % 2] * regard::MAX_FACTOR,
            Slopes::Steep => noise.normal() * 3.0,
        }
    }
}

impl Sinks {
    /// The logit of one query head.
    pub(crate) fn logit(self, head: usize, noise: &mut Noise) -> f32 {
        let normal = noise.normal();
        match self {
            Sinks::Infinite if head.is_multiple_of(2) => f32::NEG_INFINITY,
            Sinks::Normal | Sinks::Infinite => normal * 2.0,
            Sinks::Large => normal * 300.0,
            Sinks::Extreme => {
                noise.pick(&[-1.0, -0.9, -0.7, -0.5, 0.0, 0.5, 0.7, 0.9, 1.0]) * f32::MAX
            }
        }
    }
}

/// The largest finite number of a type, as f32.
pub(crate) fn largest(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::MAX.to_f32(),
        DType::BF16 => bf16::MAX.to_f32(),
        DType::E4M3 | DType::E5M2 | DType::I8 => dtype.largest_code(),
        _ => f32::MAX,
    }
}
