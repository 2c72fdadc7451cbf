//! placeholder
use super::record::Record;
use std::path::Path;
pub fn draw(_: &[Record], _: &Path) -> Result<(), String> {
    Ok(())
}
