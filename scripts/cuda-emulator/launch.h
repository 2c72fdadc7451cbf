// The arguments that the stand-in driver gives an emulated kernel.
#pragma once
struct EmulatedLaunch {
    const AttentionParameters *attention;
    const PrefillParameters *prefill;
    const TensorMaps *maps;
    const CacheParameters *cache;
    bool combines;      // `combine` of a decode module, not `decode`
    bool schedules;     // its `schedule_ctas`
    const PrefixParameters *prefix;
    enum { SCHEDULE, PREFIX_ITEMS, MERGE_PREFIX, WIDEN_UNITS, WIDEN_ROUNDED } entry; // of a module for prefix groups; or of `widen`
    const ListedParameters *listed; // of rows with lists of keys
    const AppendParameters *append;
    const WidenParameters *widening;
    const KvTensor *rest; // key dims from the value dim on, for modules that take them as a tensor of their own
    const TensorMap *rest_map; // the same, by a tensor map
    unsigned blocks[2]; // clusters, of kernels that have them
    unsigned threads, shared_bytes;
    bool copies_late; // asynchronous copies arrive when they are waited for, not at once
    unsigned seed;    // for the order of warps
};
