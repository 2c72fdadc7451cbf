//! A step's schedule: computed once, it changes no bits of the layers that read it.

use super::{Broken, expect};
use crate::Spec;
use crate::cuda::Runner;
use crate::list::{list, prefixes};
use crate::rows::bits;

/// Runs that read one schedule, as the layers of a step do.
const LAYERS: usize = 3;

/// Bits with a schedule are the same as without.
pub fn scheduled_equals_plain(runner: &mut Runner) -> Result<String, Broken> {
    let words = ["lengths/", "splits/", "ragged/", "paged/", "models/", "step/", "latent/"];
    let named = |spec: &Spec| words.iter().any(|word| spec.name.starts_with(word));
    let (mut cases, mut schedules) = (0, 0);
    for spec in list().filter(named).chain(prefixes()) {
        let case = spec.generate();
        let plain = bits(&runner.output(&case)?);
        let plan = runner.plan().and_then(|plan| plan.cuda());
        let decodes = plan.is_some_and(|launches| launches.decode.is_some());
        runner.set_layers(Some(LAYERS));
        let scheduled = runner.output(&case);
        runner.set_layers(None);
        let scheduled = bits(&scheduled?);
        expect(plain == scheduled, || format!("{}: other bits with a schedule", case.name))?;
        cases += 1;
        schedules += usize::from(decodes);
    }
    Ok(format!("{cases} cases, {schedules} with decode, {LAYERS} layers each, to the bit"))
}
