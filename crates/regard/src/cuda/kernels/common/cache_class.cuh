// The class of storage of keys and values, from the macro CACHE; 0 if a module does not define it. KEY_CACHE and
// VALUE_CACHE are the classes of each, if they differ.
#pragma once

#ifndef CACHE
#define CACHE 0
#endif
#ifndef KEY_CACHE
#define KEY_CACHE CACHE
#define VALUE_CACHE CACHE
#endif

// The classes that modules are compiled for. Numbers: `CacheClass::number` of cuda/registry/mod.rs.
enum class CacheClass : int {
    Elements = 0, // as queries are
    Bytes = 1,    // 8-bit codes: e4m3, e5m2, i8, known at run time
    Q8_0 = 2,
    Q4_0 = 3,
    Any = 4,    // any format each, converted while they are loaded; queries are of any type too
    Mla656 = 5, // latent rows of 656 bytes
    Pair = 6,   // keys of one of the first four classes and values of another: KEY_CACHE and VALUE_CACHE
};
constexpr CacheClass CACHE_CLASS = CacheClass(CACHE);
constexpr CacheClass KEY_CLASS = CacheClass(KEY_CACHE), VALUE_CLASS = CacheClass(VALUE_CACHE);

// Whether keys or values are codes in shared memory, which are converted on the way into products.
#define READS_CODES (CACHE >= 1 && CACHE <= 3 || CACHE == 6)
