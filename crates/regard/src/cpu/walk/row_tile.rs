//! Values that are a prefix of the keys: the rows of a tile are converted once, for both products.
//! Keys in two parts are put together in these rows.

use super::address::KeyAddresses;
use super::call::ItemContext;
use super::item::{KeyWalk, TileSpan};
use super::operand::Operand;
use crate::dtype::DType;
use half::bf16;

/// The rows of the tile that an item walks, as products read them: `[key in tile][dim]`.
pub struct RowTile<'a> {
    data: *mut u8,
    row_bytes: usize,
    /// Addresses of the last dims of keys, if keys are in two parts.
    rotary: Option<KeyAddresses<'a>>,
}

impl<'a> RowTile<'a> {
    /// The item's row tile, if it has one. Items of several heads have none: they are walked in
    /// memory order, a few keys of each head at a time. Few rows read f16 and bf16 in place, and
    /// many rows amortise the packing of keys and values. Keys in two parts always have one.
    pub fn new<const PAIRED: bool>(ctx: ItemContext<'a>, keys: &Operand) -> Option<RowTile<'a>> {
        let ItemContext { call, item, scratch } = ctx;
        let wide = PAIRED || call.problem.dtype == DType::F32;
        let widens = !wide && item.walk == KeyWalk::Verify;
        let rotary = call.inputs.attention.rotary_k.as_ref().map(|rotary| {
            debug_assert!(ctx.sizes().has_row_tile && item.heads.len() == 1, "planned so");
            let (sequence, head) = (&item.sequence, item.heads.start);
            KeyAddresses::new(call.inputs, rotary, sequence, head).listed(ctx.list())
        });
        let copies = keys.reader.converts() || widens || rotary.is_some();
        let used = ctx.sizes().has_row_tile && item.heads.len() == 1 && copies;
        used.then(|| RowTile {
            data: scratch.row_tile,
            row_bytes: ctx.sizes().padded_head_dim * size_of::<f32>(),
            rotary,
        })
    }

    /// Converts the valid keys of a tile. Afterwards these rows are the keys and values of that
    /// tile. `keys` gives the rows of the next tile to prefetch.
    ///
    /// # Safety
    /// As [`run_item`](super::attend::run_item), for a tile of the item.
    pub unsafe fn load<const PAIRED: bool>(
        &self,
        ctx: ItemContext<'a>,
        keys: &Operand<'a>,
        span: &TileSpan,
    ) -> Operand<'a> {
        let ItemContext { call, scratch, .. } = ctx;
        let convert = keys.reader.function_for(call);
        let rotary_dim = call.problem.rotary_dim;
        let latent_dim = ctx.sizes().head_dim - rotary_dim;
        let element_bytes = if PAIRED { size_of::<bf16>() } else { size_of::<f32>() };
        // SAFETY: the scratch has room for the addresses of a tile and for its rows; each address
        // is the address of a visible key.
        unsafe {
            let [addresses, _] = scratch.addresses(ctx.sizes()).map(|all| &mut *all);
            let addresses = &mut addresses[..span.valid.len()];
            keys.addresses(span, addresses);
            for (i, &address) in addresses.iter().enumerate() {
                let to = self.data.add((span.valid.start + i) * self.row_bytes);
                convert(address, to, latent_dim);
            }
            if let Some(rotary) = &self.rotary {
                rotary.addresses(span.first_key(), addresses);
                for (i, &address) in addresses.iter().enumerate() {
                    let row = self.data.add((span.valid.start + i) * self.row_bytes);
                    convert(address, row.add(latent_dim * element_bytes), rotary_dim);
                }
            }
        }
        let rows = KeyAddresses::for_tile(self.data, self.row_bytes, span.tile_start);
        keys.converted::<PAIRED>(rows)
    }
}
