//! Keys and values as an item reads them: addresses of rows, their conversion to the products'
//! type, and the scales of codes.

use super::address::KeyAddresses;
use super::call::{Call, ItemContext};
use super::item::{Item, KeyWalk, TileSpan};
use super::scratch::MAX_CONVERTED_ROWS;
use crate::cpu::product::convert::{self, ConvertFn};
use crate::cpu::product::rows;
use crate::cpu::vector::Storage;
use crate::dtype::DType;
use crate::tensor::Tensor;
use crate::variant::Values;
use half::bf16;

/// The keys, or the values, of an item.
pub struct Operand<'a> {
    pub rows: KeyAddresses<'a>,
    pub reader: RowReader,
    /// The addresses of the rows of later tiles, if `rows` are a converted tile.
    later_rows: Option<KeyAddresses<'a>>,
    scales: Option<Scales<'a>>,
}

/// The scales of codes: one float per key of a tile and head of the item, in the scratch.
struct Scales<'a> {
    addresses: KeyAddresses<'a>,
    tile: *mut f32,
    /// Loaded once, because all keys of a head share one.
    constant: bool,
}

/// Reads rows as products need them, converted or in place.
#[derive(Clone, Copy)]
pub struct RowReader {
    /// The type that products read, by its [`Storage::INDEX`] or [`rows::index`].
    pub index: usize,
    /// Rows that are stored in another type are converted.
    conversion: Option<Conversion>,
    /// Rows are converted already, and read in place: f32, or bf16 to be multiplied in pairs.
    converted: bool,
}

/// Rows as products read them.
#[derive(Clone, Copy)]
pub struct ReadRows<'a> {
    pub addresses: &'a [*const u8],
    /// To be added to each address.
    pub offset: i64,
}

#[derive(Clone, Copy)]
struct Conversion {
    function: ConvertFn,
    values: usize,
    to: *mut u8,
    row_bytes: usize,
}

/// Keys or values, of the first and the second cache.
struct Pools<'a> {
    first: &'a Tensor<'a>,
    scales: &'a Option<Tensor<'a>>,
    second: Second<'a>,
}

struct Second<'a> {
    pool: Option<Tensor<'a>>,
    scales: &'a Option<Tensor<'a>>,
}

impl<'a> Operand<'a> {
    /// The item's keys.
    pub fn keys<const PAIRED: bool>(ctx: ItemContext<'a>) -> Operand<'a> {
        let ItemContext { call, scratch, .. } = ctx;
        let attention = &call.inputs.attention;
        let (dtype, dim) = (call.problem.key_dtype, call.problem.head_dim);
        let index = match PAIRED && call.sizes.key_blocks > 0 {
            true => convert::index_of_codes(dtype),
            false => convert::index(dtype),
        };
        let reader = RowReader::new::<PAIRED>(ctx, dtype, index, dim);
        let second = Second { pool: attention.second_k, scales: &attention.second_k_scales };
        let pools = Pools { first: &call.inputs.k, scales: &attention.k_scales, second };
        Operand::new(ctx, pools, reader, scratch.key_scales)
    }

    /// The item's values.
    pub fn values<const PAIRED: bool>(ctx: ItemContext<'a>) -> Operand<'a> {
        let ItemContext { call, scratch, .. } = ctx;
        let (dtype, dim) = (call.problem.value_dtype, call.problem.value_dim);
        let reader = RowReader::new::<PAIRED>(ctx, dtype, convert::index(dtype), dim);
        let inputs = call.inputs;
        let second = Second { pool: inputs.second_values(), scales: inputs.second_value_scales() };
        let pools = Pools { first: &inputs.v, scales: inputs.value_scales(), second };
        Operand::new(ctx, pools, reader, scratch.value_scales)
    }

    fn new(
        ctx: ItemContext<'a>,
        pools: Pools<'a>,
        reader: RowReader,
        tile: *mut f32,
    ) -> Operand<'a> {
        let ItemContext { call, item, .. } = ctx;
        let (sequence, head) = (&item.sequence, item.heads.start);
        let list = ctx.list();
        let Pools { first: tensor, scales, second } = pools;
        let scales = scales.as_ref().map(|scales| {
            let addresses = KeyAddresses::for_scales(call.inputs, scales, tensor, sequence, head);
            let mut addresses = addresses.listed(list);
            if let Some(scales) = second.scales {
                addresses = addresses.with_second_scales(scales, head);
            }
            let constant = addresses.is_constant();
            if constant && !item.keys.is_empty() {
                // SAFETY: checked: a scale per head. The scratch has a tile of scales per head.
                unsafe { fill_constant(&addresses, item, tile, call.sizes.tile_keys) };
            }
            Scales { addresses, tile, constant }
        });
        let mut rows = KeyAddresses::new(call.inputs, tensor, sequence, head).listed(list);
        if let Some(pool) = &second.pool {
            rows = rows.with_second(pool, head);
        }
        Operand { rows, reader, later_rows: None, scales }
    }

    /// Keys or values of one tile that was converted to `rows`.
    pub fn converted<const PAIRED: bool>(&self, rows: KeyAddresses<'a>) -> Operand<'a> {
        let reader = RowReader { converted: true, ..RowReader::of_products::<PAIRED>() };
        Operand { rows, reader, later_rows: Some(self.rows), scales: None }
    }

    /// Writes the addresses of the span's rows, from its first valid key on, as far as there is
    /// room. There are no more entries than keys up to the span's end.
    pub fn addresses(&self, span: &TileSpan, addresses: &mut [*const u8]) {
        let (tile, later) = addresses.split_at_mut(addresses.len().min(span.valid.len()));
        let first_key = span.first_key();
        self.rows.addresses(first_key, tile);
        if !later.is_empty() {
            self.later_rows.unwrap_or(self.rows).addresses(first_key + tile.len(), later);
        }
    }

    /// The addresses of the span's rows, and of the rows after them up to the span's end, as far as
    /// there is room. The later rows are only prefetched.
    pub fn known_addresses<'b>(
        &self,
        span: &TileSpan,
        addresses: &'b mut [*const u8],
    ) -> &'b [*const u8] {
        let known = (span.end - span.first_key()).min(addresses.len());
        self.addresses(span, &mut addresses[..known]);
        &addresses[..known]
    }

    /// Loads the scales of a tile's valid keys. Other keys get the scale 1: their probability is 0,
    /// and 0 * NaN = NaN.
    ///
    /// # Safety
    /// As [`run_item`](super::attend::run_item), for a tile of the item.
    pub unsafe fn load_scales(&self, ctx: ItemContext, span: &TileSpan) {
        let Some(scales) = self.scales.as_ref().filter(|scales| !scales.constant) else { return };
        let (tile_keys, heads) = (ctx.sizes().tile_keys, ctx.item.heads.len());
        let valid = &span.valid;
        // SAFETY: the scratch has room for the addresses of a tile and for a tile of scales per
        // head. Each address is the address of a visible key's scale.
        unsafe {
            let [addresses, _] = ctx.scratch.addresses(ctx.sizes()).map(|all| &mut *all);
            let addresses = &mut addresses[..valid.len()];
            scales.addresses.addresses(span.first_key(), addresses);
            for head in 0..heads {
                let to = scales.tile.add(head * tile_keys);
                let to = std::slice::from_raw_parts_mut(to, tile_keys);
                to[..valid.start].fill(1.0);
                to[valid.end..].fill(1.0);
                let offset = scales.addresses.head_offset(head) as isize;
                for (to, address) in to[valid.clone()].iter_mut().zip(&*addresses) {
                    *to = address.wrapping_offset(offset).cast::<f32>().read_unaligned();
                }
            }
        }
    }
}

/// Fills the tiles of all heads with the heads' scales.
///
/// # Safety
/// There is a scale per head of the item, and a tile of floats per head at `tile`.
unsafe fn fill_constant(scales: &KeyAddresses, item: &Item, tile: *mut f32, tile_keys: usize) {
    for head in 0..item.heads.len() {
        let address = scales.constant_address(head);
        // SAFETY: same contract.
        unsafe {
            let scale = address.cast::<f32>().read_unaligned();
            std::slice::from_raw_parts_mut(tile.add(head * tile_keys), tile_keys).fill(scale);
        }
    }
}

impl RowReader {
    /// Rows that are read in place, by the index of their type.
    pub fn in_place(index: usize) -> RowReader {
        RowReader { index, conversion: None, converted: false }
    }

    /// Rows of the type that conversions give to products.
    fn of_products<const PAIRED: bool>() -> RowReader {
        RowReader::in_place(if PAIRED { bf16::INDEX } else { f32::INDEX })
    }

    /// Rows in codes that are streamed, if the level's products read them in place. Rows that are
    /// keys and values are converted once for both.
    fn streams<const PAIRED: bool>(ctx: ItemContext, dtype: DType) -> Option<RowReader> {
        let call = ctx.call;
        let streamed = ctx.item.walk == KeyWalk::Stream
            && call.products.reads_codes
            && call.problem.values == Values::Separate;
        let index = rows::index(dtype, PAIRED).filter(|_| streamed)?;
        Some(RowReader::in_place(index))
    }

    /// Rows of `dim` values of `dtype`, by the conversion `index`. Rows of the type of queries are
    /// not converted.
    fn new<const PAIRED: bool>(
        ctx: ItemContext,
        dtype: DType,
        index: usize,
        dim: usize,
    ) -> RowReader {
        let ItemContext { call, scratch, .. } = ctx;
        if index == convert::index(call.problem.dtype) {
            return RowReader::in_place(index);
        }
        if let Some(reader) = RowReader::streams::<PAIRED>(ctx, dtype) {
            return reader;
        }
        let conversion = Conversion {
            function: call.products.convert[index],
            values: dim,
            to: scratch.converted,
            row_bytes: call.sizes.converted_dim * size_of::<f32>(),
        };
        RowReader { conversion: Some(conversion), ..RowReader::of_products::<PAIRED>() }
    }

    /// Whether products read rows in another type than the queries'.
    #[inline(always)]
    pub fn converts(&self) -> bool {
        self.conversion.is_some() || self.converted
    }

    /// Whether rows are converted already, and read in place.
    #[inline(always)]
    pub fn is_converted(&self) -> bool {
        self.converted
    }

    /// The function that converts a row of keys to the products' type.
    pub fn function_for(&self, call: &Call) -> ConvertFn {
        call.products.convert[convert::index(call.problem.key_dtype)]
    }

    /// The rows at `addresses + offset` as products read them. `buffer` has room for their
    /// addresses. Rows that an earlier call returned are overwritten.
    ///
    /// # Safety
    /// As [`run_item`](super::attend::run_item). Every address is the address of a row.
    #[inline(always)]
    pub unsafe fn read<'b>(
        &self,
        addresses: &'b [*const u8],
        offset: i64,
        buffer: &'b mut [*const u8],
    ) -> ReadRows<'b> {
        if self.conversion.is_none() {
            return ReadRows { addresses, offset };
        }
        let rows = &mut buffer[..addresses.len()];
        for (i, (row, address)) in rows.iter_mut().zip(addresses).enumerate() {
            // SAFETY: there are no more rows than the scratch has room for.
            *row = unsafe { self.read_row(address.wrapping_offset(offset as isize), i) };
        }
        ReadRows { addresses: rows, offset: 0 }
    }

    /// The row at `address` as products read it: row `slot` of the rows that are used together.
    ///
    /// # Safety
    /// As [`RowReader::read`], for a slot below [`MAX_CONVERTED_ROWS`].
    #[inline(always)]
    pub unsafe fn read_row(&self, address: *const u8, slot: usize) -> *const u8 {
        let Some(conversion) = &self.conversion else { return address };
        debug_assert!(slot < MAX_CONVERTED_ROWS);
        let to = conversion.to.wrapping_add(slot * conversion.row_bytes);
        // SAFETY: same contract.
        unsafe { self.convert_row(address, to) };
        to
    }

    /// Converts the row at `address` to another place.
    ///
    /// # Safety
    /// As [`RowReader::read`], for rows that are converted; `to` has room for one.
    #[inline(always)]
    pub unsafe fn convert_row(&self, address: *const u8, to: *mut u8) {
        let conversion = self.conversion.as_ref().expect("a reader that converts");
        // SAFETY: same contract.
        unsafe { (conversion.function)(address, to, conversion.values) };
    }
}
