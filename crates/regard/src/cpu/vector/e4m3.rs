//! The values of e4m3 codes, for vectors that look them up.

/// The value of each nonnegative e4m3 code as bf16.
pub static E4M3_AS_BF16: [u16; 128] = {
    let mut values = [0; 128];
    let mut code = 0;
    while code < 128 {
        let (exponent, mantissa) = (code >> 3, code & 7);
        values[code as usize] = match (exponent, mantissa) {
            (15, 7) => 0x7fc0,
            (0, 0) => 0,
            // Subnormal: mantissa * 2^-9, normal as bf16.
            (0, 1) => 118 << 7,
            (0, 2..4) => 119 << 7 | (mantissa - 2) << 6,
            (0, _) => 120 << 7 | (mantissa - 4) << 5,
            _ => (exponent + 120) << 7 | mantissa << 4,
        };
        code += 1;
    }
    values
};
