//! Apple GPUs.
//!
//! Plans for Apple GPUs can be made on any system. The kernels ship as source ([`source`]). With
//! the feature `metal`, on Apple's systems, the module `device` compiles the source and runs plans.
//!
//! No Mac has run the kernels yet: tests run the shipped source on the host, with the dispatches
//! that this module computes. `docs/metal.md` lists what that shows and what it does not.

mod append;
#[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
pub mod device;
mod launch;
mod library_source;
mod mask_map;
mod merge;
mod params;
pub(crate) mod plan;
pub(crate) mod select;
#[cfg(metal_stand_in)]
#[path = "../../../metal-host/stand_in/mod.rs"]
pub mod stand_in;
mod tensor;

pub use crate::apple_chips::cores_of_architecture;
pub use crate::tile_map::TileMap;
pub use append::{Append, AppendLatent, Rotary};
#[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
pub use device::{Gpu, Workspace};
pub use launch::tile_map;
pub use library_source::source;
pub use merge::Merge;
pub use tensor::{BufferView, MetalMemory};

// Hidden items, here and below, are for the tools and tests of this repository: they are not part
// of the interface.
#[doc(hidden)]
pub use append::{append, append_latent};
#[doc(hidden)]
pub use launch::{Binding, Dispatch, Dispatches, Params, dispatches, pipelines};
#[doc(hidden)]
pub use library_source::LibrarySource;
#[doc(hidden)]
pub use merge::merge;
#[doc(hidden)]
pub use params::{AppendParameters, AttentionParameters, MapParameters, MergeParameters};
#[doc(hidden)]
pub use select::{Launch, functions};

/// Function constants of a pipeline, by index: as `common.metal` declares them.
#[doc(hidden)]
pub const CONSTANTS: [(&str, ConstantType); 21] = [
    ("HEAD_DIM", ConstantType::Int),
    ("VALUE_DIM", ConstantType::Int),
    ("TILE_ROWS", ConstantType::Int),
    ("TILE_KEYS", ConstantType::Int),
    ("SIMD_GROUPS", ConstantType::Int),
    ("PARTIAL", ConstantType::Bool),
    ("WALKS_SPLITS", ConstantType::Bool),
    ("BOUNDED", ConstantType::Bool),
    ("SOFTCAP", ConstantType::Bool),
    ("ALIBI", ConstantType::Bool),
    ("SINKS", ConstantType::Bool),
    ("MASK_KIND", ConstantType::Int),
    ("TREE", ConstantType::Bool),
    ("BLOCK_SIZE", ConstantType::Int),
    ("LSE", ConstantType::Bool),
    ("OUT_FLOAT", ConstantType::Bool),
    ("ALIGNED", ConstantType::Bool),
    ("KEY_FORMAT", ConstantType::Int),
    ("VALUE_FORMAT", ConstantType::Int),
    ("LISTS", ConstantType::Int),
    ("TWO_PARTS", ConstantType::Bool),
];

/// The type of a function constant.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConstantType {
    /// `int`.
    Int,
    /// `bool`.
    Bool,
}

/// The key of a pipeline: equal keys share a pipeline.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pipeline {
    /// The kernel's name in the source.
    pub function: &'static str,
    /// The values of [`CONSTANTS`].
    pub constants: [i32; CONSTANTS.len()],
}

/// SIMD lanes of every Apple GPU.
pub(crate) const SIMD_WIDTH: usize = 32;

/// Minimum GPU family: the first with SIMD-group matrices and 32 KiB of threadgroup memory.
pub const MIN_FAMILY: u32 = 7;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_the_ones_that_the_kernels_declare() {
        let source = source();
        for (index, (name, ty)) in CONSTANTS.into_iter().enumerate() {
            let ty = if ty == ConstantType::Int { "int" } else { "bool" };
            let declaration = format!("constant {ty} {name} [[function_constant({index})]];");
            assert!(source.contains(&declaration), "{declaration}");
        }
        assert_eq!(source.matches("[[function_constant(").count(), CONSTANTS.len());
    }
}
