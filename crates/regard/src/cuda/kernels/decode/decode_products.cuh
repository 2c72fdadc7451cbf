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
