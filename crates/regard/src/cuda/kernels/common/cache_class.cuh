// The class of storage of keys and values, from the macro CACHE; 0 if a module does not define it.
#pragma once

#ifndef CACHE
#define CACHE 0
#endif

// The classes that modules are compiled for. Numbers: `CacheClass::number` of cuda/registry/mod.rs.
enum class CacheClass : int {
    Elements = 0, // as queries are
    Bytes = 1,    // 8-bit codes: e4m3, e5m2, i8, known at run time
    Q8_0 = 2,
    Q4_0 = 3,
    Any = 4,    // any format each, converted while they are loaded; queries are of any type too
    Mla656 = 5, // latent rows of 656 bytes
};
constexpr CacheClass CACHE_CLASS = CacheClass(CACHE);
