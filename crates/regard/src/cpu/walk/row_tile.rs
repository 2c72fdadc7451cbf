//! Values that are a prefix of the keys: the rows of a tile are converted once, to where both
//! products read them.

use super::address::KeyAddresses;
use super::call::ItemContext;
use super::item::{KeyWalk, TileSpan};
use super::operand::Operand;
use crate::cpu::vector::Storage;

/// The rows of the tile that an item walks, as products read them: `[key in tile][dim]`.
pub struct RowTile {
    data: *mut u8,
    row_bytes: usize,
}

impl RowTile {
    /// The item's row tile, if it has one. Items of several heads have none: they are walked in
    /// memory order, a few keys of each head at a time. Few rows read f16 and bf16 in place, and
    /// many rows amortise the packing of keys and values.
    pub fn new<E: Storage, const PAIRED: bool>(
        ctx: ItemContext,
        keys: &Operand,
    ) -> Option<RowTile> {
        let ItemContext { item, scratch, .. } = ctx;
        let widens = !PAIRED && E::INDEX != <f32 as Storage>::INDEX && item.walk == KeyWalk::Verify;
        let used =
            ctx.sizes().has_row_tile && item.heads.len() == 1 && (keys.reader.converts() || widens);
        used.then(|| RowTile {
            data: scratch.row_tile,
            row_bytes: ctx.sizes().padded_head_dim * size_of::<f32>(),
        })
    }

    /// Converts the valid keys of a tile. Keys and values of that tile are then these rows; what is
    /// prefetched of the next tile is given by `keys`.
    ///
    /// # Safety
    /// As [`run_item`](super::attend::run_item), for a tile of the item.
    pub unsafe fn load<'a, const PAIRED: bool>(
        &self,
        ctx: ItemContext<'a>,
        keys: &Operand<'a>,
        span: &TileSpan,
    ) -> Operand<'a> {
        let ItemContext { call, scratch, .. } = ctx;
        let convert = keys.reader.function_for::<PAIRED>(call);
        // SAFETY: the scratch has room for the addresses of a tile and for its rows; each address
        // is that of a visible key.
        unsafe {
            let [addresses, _] = scratch.addresses(ctx.sizes()).map(|all| &mut *all);
            let addresses = &mut addresses[..span.valid.len()];
            keys.addresses(span, addresses);
            for (i, &address) in addresses.iter().enumerate() {
                let to = self.data.add((span.valid.start + i) * self.row_bytes);
                convert(address, to, ctx.sizes().head_dim);
            }
        }
        let rows = KeyAddresses::for_tile(self.data, self.row_bytes, span.tile_start);
        keys.converted::<PAIRED>(rows)
    }
}
