//! A row of a latent cache as serving engines store it for DeepSeek's models.

use super::E4m3;
use half::bf16;

/// A row of a latent cache, 576 values in 656 bytes: 512 compressed dims as `e4m3` codes with one
/// scale per 128, and 64 rotary dims in `bf16`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Mla656 {
    /// The compressed dims, without their scales.
    pub codes: [E4m3; Mla656::LATENT_VALUES],
    /// Scale `i` multiplies codes `128 i` to `128 i + 127`.
    pub scales: [f32; Mla656::LATENT_VALUES / Mla656::SCALED_VALUES],
    /// The rotary dims.
    pub rotary: [bf16; Mla656::VALUES - Mla656::LATENT_VALUES],
}

const _: () = assert!(size_of::<Mla656>() == 656 && align_of::<Mla656>() == 4);

impl Default for Mla656 {
    /// A row of zeros.
    fn default() -> Mla656 {
        Mla656 { codes: [E4m3::default(); 512], scales: [0.0; 4], rotary: [bf16::ZERO; 64] }
    }
}

impl Mla656 {
    /// Values of a row.
    pub const VALUES: usize = 576;
    /// Values that are codes: the first of a row.
    pub const LATENT_VALUES: usize = 512;
    /// Codes that share a scale.
    pub const SCALED_VALUES: usize = 128;

    /// Each scale maps the largest magnitude of its values to the code 448
    /// ([`dynamic_scale`](crate::quantize::dynamic_scale)). A code is the nearest to a value over
    /// its scale, ties to even; it is 0 under a scale of 0. Rotary dims are rounded to `bf16`. A
    /// NaN stays where it is.
    pub fn from_f32(values: &[f32; Mla656::VALUES]) -> Mla656 {
        let mut row = Mla656::default();
        let groups = values.chunks_exact(Mla656::SCALED_VALUES).zip(&mut row.scales);
        for ((values, scale), codes) in
            groups.zip(row.codes.chunks_exact_mut(Mla656::SCALED_VALUES))
        {
            // `f32::max` passes over NaN.
            let largest = values.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            *scale = largest.min(f32::MAX) / E4m3::MAX;
            for (&x, code) in values.iter().zip(codes) {
                let quotient = if *scale == 0.0 { 0.0 } else { x / *scale };
                // One NaN only: CPUs and GPUs differ in the signs of theirs.
                *code = E4m3::from_f32(if x.is_nan() { f32::NAN } else { quotient });
            }
        }
        for (&x, rotary) in values[Mla656::LATENT_VALUES..].iter().zip(&mut row.rotary) {
            *rotary = if x.is_nan() { bf16::NAN } else { bf16::from_f32(x) };
        }
        row
    }

    /// The row as it is stored.
    pub fn to_bytes(&self) -> [u8; size_of::<Mla656>()] {
        let scales = self.scales.iter().flat_map(|scale| scale.to_le_bytes());
        let rotary = self.rotary.iter().flat_map(|value| value.to_le_bytes());
        let bytes = self.codes.iter().map(|code| code.to_bits()).chain(scales).chain(rotary);
        let mut row = [0; size_of::<Mla656>()];
        row.iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte);
        row
    }

    /// The row that these bytes store.
    pub fn from_bytes(bytes: &[u8; size_of::<Mla656>()]) -> Mla656 {
        let (codes, rest) = bytes.split_at(Mla656::LATENT_VALUES);
        let (scales, rotary) = rest.split_at(size_of::<[f32; 4]>());
        let (scales, rotary) = (scales.as_chunks().0, rotary.as_chunks().0);
        Mla656 {
            codes: std::array::from_fn(|i| E4m3::from_bits(codes[i])),
            scales: std::array::from_fn(|i| f32::from_le_bytes(scales[i])),
            rotary: std::array::from_fn(|i| bf16::from_le_bytes(rotary[i])),
        }
    }

    /// Value `i`, exactly: code times scale, or a rotary dim.
    fn value(&self, i: usize) -> f64 {
        match i.checked_sub(Mla656::LATENT_VALUES) {
            None => {
                let scale = f64::from(self.scales[i / Mla656::SCALED_VALUES]);
                f64::from(self.codes[i].to_f32()) * scale
            }
            Some(rotary) => self.rotary[rotary].to_f64(),
        }
    }

    /// The values, exactly.
    pub fn to_f64(&self) -> [f64; Mla656::VALUES] {
        std::array::from_fn(|i| self.value(i))
    }

    /// The values but for the rotary dims, exactly.
    pub fn latent_to_f64(&self) -> [f64; Mla656::LATENT_VALUES] {
        std::array::from_fn(|i| self.value(i))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_hold_their_values_within_half_a_step() {
        let mut values: [f32; 576] =
            std::array::from_fn(|i| ((i * 37 + 11) % 64) as f32 / 8.0 - 3.9);
        values[128..256].fill(0.0);
        values[256..384].iter_mut().for_each(|x| *x *= 1e30);
        let row = Mla656::from_f32(&values);
        assert_eq!((row.scales[1], row.codes[130]), (0.0, E4m3::from_bits(0)));
        for (i, (&x, y)) in values.iter().zip(row.to_f64()).enumerate() {
            // Codes have 3 bits of mantissa; below 2^-6 of the scale they are subnormal.
            let step = if i < 512 { f64::from(row.scales[i / 128]) * 2f64.powi(-10) } else { 0.0 };
            let near = (f64::from(x) - y).abs() <= f64::from(x).abs() / 16.0 + step;
            assert!(near, "{i}: {x} {y}");
        }
        assert_eq!(row.latent_to_f64(), row.to_f64()[..512]);
        assert_eq!(Mla656::from_bytes(&row.to_bytes()), row);
        assert_eq!(Mla656::from_f32(&[0.0; 576]), Mla656::default());
    }

    #[test]
    fn bytes_are_codes_then_scales_then_rotary_dims() {
        let mut values = [0.0; 576];
        (values[127], values[128], values[575]) = (448.0, -896.0, 1.0);
        let bytes = Mla656::from_f32(&values).to_bytes();
        assert_eq!((bytes[126], bytes[127], bytes[128]), (0, 0x7e, 0xfe));
        assert_eq!(bytes[512..520], [1f32.to_le_bytes(), 2f32.to_le_bytes()].concat());
        assert_eq!(bytes[654..], [0x80, 0x3f]);
    }

    #[test]
    fn a_nan_stays_where_it_is() {
        let mut values = [1.0; 576];
        (values[3], values[200], values[570]) = (f32::NAN, -f32::NAN, f32::NAN);
        values[300] = f32::INFINITY;
        let row = Mla656::from_f32(&values);
        for (i, x) in row.to_f64().into_iter().enumerate() {
            assert_eq!(x.is_nan(), [3, 200, 570].contains(&i), "{i}: {x}");
        }
        assert_eq!(row.scales[2], f32::MAX / 448.0);
    }
}
