//! Tests of the declarations of parameters.

use super::*;

#[test]
fn nothing_is_padded() {
    for layout in CUDA {
        assert_eq!(layout.size, layout.packed_size(), "{}", layout.name);
        let mut offset = 0;
        for field in layout.fields {
            assert_eq!(field.offset, offset, "{}.{}", layout.name, field.name);
            offset += field.size;
        }
    }
}

parameters! {
    /// A choice.
    enum Choice {
        /// The default.
        First,
        /// The other.
        Second,
    }
    /// A part.
    Part {
        /// Steps.
        step: i64,
    }
    /// A whole.
    Whole {
        /// Its part.
        part: Part,
        /// Its choice.
        choice: Choice,
        /// A count with a comment so long that it does not fit behind the declaration within
        /// the width of a kernel, and takes two lines.
        count: u32,
    }
}

#[test]
fn every_language_has_the_same_names() {
    assert_eq!(Whole::default().choice, Choice::First);
    assert_eq!(Choice::Second as i32, 1);
    let choice = "\
// A choice.
enum class Choice : int {
    First = 0, // The default.
    Second = 1, // The other.
};
";
    assert_eq!(Choice::ENUMERATION.declaration(), choice);
    for (language, long, unsigned) in
        [(Language::Cuda, "long long", "unsigned int"), (Language::Metal, "long", "uint")]
    {
        let part = format!(
            "\
// A part.
struct Part {{
    {long} step; // Steps.
}};
static_assert(sizeof(Part) == 8, \"as the host has it\");
"
        );
        let whole = format!(
            "\
// A whole.
struct Whole {{
    Part part; // Its part.
    Choice choice; // Its choice.
    // A count with a comment so long that it does not fit behind the declaration within the \
width of a kernel, and
    // takes two lines.
    {unsigned} count;
}};
static_assert(sizeof(Whole) == 16, \"as the host has it\");
"
        );
        assert_eq!(Part::LAYOUT.declaration(language), part);
        assert_eq!(Whole::LAYOUT.declaration(language), whole);
    }
}

#[test]
fn tensor_maps_are_as_large_as_kernels_have_them() {
    assert_eq!((size_of::<TensorMap>(), align_of::<TensorMap>()), (128, 64));
    assert_eq!(size_of::<TensorMaps>(), 512);
}

#[test]
fn the_header_beside_the_kernels_is_this_one() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/kernels/common/parameters.cuh");
    if std::env::var_os("REGARD_WRITE_PARAMETERS").is_some() {
        std::fs::write(path, cuda_header()).unwrap();
    }
    let found = std::fs::read_to_string(path).unwrap();
    assert!(
        found == cuda_header(),
        "REGARD_WRITE_PARAMETERS=1 cargo test -p regard params writes it"
    );
}
