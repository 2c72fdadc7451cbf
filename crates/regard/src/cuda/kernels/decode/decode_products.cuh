// The products of decode: of keys and of values, which may be stored in different ways.
#pragma once
#include "decode/decode_shape.cuh"
#if ELEMENT_TYPE == 2
#include "decode/decode_fma.cuh"
typedef FmaKeys KeyProducts;
typedef FmaValues ValueProducts;
#else
#include "decode/decode_mma.cuh"
#if READS_CODES
#include "decode/decode_codes.cuh"
template <bool KEYS, bool VALUES> struct ProductsOf {
    typedef ElementKeys Keys;
    typedef ElementValues Values;
};
template <> struct ProductsOf<true, true> {
    typedef CodeKeys Keys;
    typedef CodeValues Values;
};
template <> struct ProductsOf<true, false> {
    typedef CodeKeys Keys;
    typedef ElementValues Values;
};
template <> struct ProductsOf<false, true> {
    typedef ElementKeys Keys;
    typedef CodeValues Values;
};
typedef ProductsOf<KeySide::HAS_CODES, ValueSide::HAS_CODES> SideProducts;
typedef SideProducts::Keys KeyProducts;
typedef SideProducts::Values ValueProducts;
#else
typedef ElementKeys KeyProducts;
typedef ElementValues ValueProducts;
#endif
#endif

struct Products {
    KeyProducts keys;
    ValueProducts values;
};

#if READS_CODES
// Sets the operands of products with blocks, through 128 bytes of shared memory at `room`.
template <class Keys, class Values>
static __device__ __forceinline__ void set_block_operands(Keys &keys, Values &values, unsigned room, int lane) {
    if constexpr (KeySide::HAS_BLOCKS) keys.blocks.set(room, lane);
    if constexpr (ValueSide::HAS_BLOCKS) values.blocks.set(room + 64, lane);
}
#endif
