//! Apple's chips: GPU family, cores, and the names that Metal gives their architectures.

/// A generation of chips and the GPU cores of its largest base, Pro, Max and Ultra variants; 0 if
/// there is none.
struct Generation {
    name: &'static str,
    /// The number in `MTLArchitecture.name`: 14 in `applegpu_g14s`.
    architecture: u32,
    family: u32,
    cores: [usize; 4],
}

/// Source: Apple's technical specifications of each chip.
const GENERATIONS: [Generation; 5] = [
    Generation { name: "m1", architecture: 13, family: 7, cores: [8, 16, 32, 64] },
    Generation { name: "m2", architecture: 14, family: 8, cores: [10, 19, 38, 76] },
    Generation { name: "m3", architecture: 15, family: 9, cores: [10, 18, 40, 80] },
    Generation { name: "m4", architecture: 16, family: 9, cores: [10, 20, 40, 0] },
    Generation { name: "m5", architecture: 17, family: 10, cores: [10, 20, 40, 0] },
];

/// The suffixes of [`chip`]'s names, as [`Generation::cores`] orders them.
const VARIANTS: [&str; 4] = ["", "-pro", "-max", "-ultra"];

/// A chip's GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chip {
    pub family: u32,
    pub cores: usize,
}

/// The GPU of a chip by name, with the maximum number of cores that it is sold with.
pub(crate) fn chip(name: &str) -> Option<Chip> {
    GENERATIONS.iter().find_map(|generation| {
        let variant = name.strip_prefix(generation.name)?;
        let index = VARIANTS.iter().position(|&suffix| suffix == variant)?;
        let cores = generation.cores[index];
        (cores > 0).then_some(Chip { family: generation.family, cores })
    })
}

/// GPU cores by `MTLArchitecture.name`, such as `applegpu_g14s`: the generation's number and a
/// letter, g for base, s for Pro, c for Max and d for Ultra. It is the number of the largest GPU of
/// that name; a smaller one splits keys a little too finely.
///
/// ```
/// assert_eq!(regard::metal::cores_of_architecture("applegpu_g14s"), Some(19));
/// assert_eq!(regard::metal::cores_of_architecture("something else"), None);
/// ```
pub fn cores_of_architecture(name: &str) -> Option<usize> {
    let name = name.strip_prefix("applegpu_g")?;
    let letter = name.chars().last()?;
    let number: u32 = name.strip_suffix(letter)?.parse().ok()?;
    let variant = ['g', 's', 'c', 'd'].iter().position(|&known| known == letter)?;
    let generation = GENERATIONS.iter().find(|generation| generation.architecture == number)?;
    let cores = generation.cores[variant];
    (cores > 0).then_some(cores)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::metal::MIN_FAMILY;

    /// `m1`, `m1-pro` and so on.
    fn chip_names() -> impl Iterator<Item = String> {
        GENERATIONS.iter().flat_map(|generation| {
            VARIANTS
                .iter()
                .zip(generation.cores)
                .filter(|&(_, cores)| cores > 0)
                .map(|(variant, _)| format!("{}{variant}", generation.name))
        })
    }

    #[test]
    fn every_name_is_a_chip_that_the_kernels_run_on() {
        assert_eq!(chip_names().count(), 18);
        for name in chip_names() {
            let facts = chip(&name).expect("it is listed");
            assert!(facts.family >= MIN_FAMILY && facts.cores >= 8, "{name}");
            assert!(Machine::NAMES.contains(&&*name), "{name}");
        }
        for unknown in ["m", "m6", "m4-ultra", "m1-mini", ""] {
            assert!(chip(unknown).is_none(), "{unknown}");
        }
    }

    #[test]
    fn architectures_have_the_cores_of_their_chips() {
        for (architecture, name) in
            [("applegpu_g13g", "m1"), ("applegpu_g15c", "m3-max"), ("applegpu_g14d", "m2-ultra")]
        {
            let cores = chip(name).map(|facts| facts.cores);
            assert_eq!(cores_of_architecture(architecture), cores);
        }
        for unknown in ["applegpu_g13p", "applegpu_g99g", "applegpu_g", "g13g", "applegpu_gg"] {
            assert_eq!(cores_of_architecture(unknown), None, "{unknown}");
        }
    }
}
